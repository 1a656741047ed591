"""Collects the notes of coordinators, and divides the rounds of an algorithm once."""

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import fedpax
from fedpax.primitives.placement import trace_for_stages
from fedpax.sites import coordinator_program
from fedpax.training.progress import Progress
from fedpax.transforms.stages import Stages
from fedpax.transforms.wiring import trace_program


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what coordinators tell."""
    messages: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda _, text: messages.append(text))
    return messages


@pytest.fixture(autouse=True, scope="session")
def divided_once() -> Iterator[None]:
    """Divide functions of the same equations and constants once, and trace each function once.

    Else the coordinator and each site of a test would divide, lower and load the same stages.
    """
    divide, lock = fedpax.stages, threading.Lock()
    module = importlib.import_module(divide.__module__)  # whose name in its package is a function
    divided: dict[Any, Stages] = {}

    @functools.wraps(divide)  # until the end of the process: it is documented
    def stages(program: Callable[..., Any], *args: Any, **names: Sequence[str]) -> Stages:
        types, tree = jax.tree.flatten(jax.eval_shape(lambda *x: x, *args))
        key = (program, tree, *types, repr(names))
        with lock:
            if key not in divided:
                with trace_for_stages():
                    traced = trace_program(program, args)
                constants = [np.asarray(x).tobytes() for x in traced[0].consts]
                equations = (str(traced[0].jaxpr), *constants, *key[1:])
                if equations not in divided:
                    with mock.patch.object(module, "trace_program", lambda *_: traced):
                        divided[equations] = divide(program, *args, **names)
                divided[key] = divided[equations]
            return divided[key]

    of_tables = mock.patch.object(fedpax, "stages", stages)
    with of_tables, mock.patch.object(coordinator_program, "stages", stages):
        yield
