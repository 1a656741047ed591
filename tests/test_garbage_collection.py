"""Tests of the start without collections of garbage."""

import gc
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedpax import main
from fedpax.garbage_collection import collect_seldom
from fedpax.training import trainer


@pytest.fixture(autouse=True)
def default_thresholds() -> Iterator[None]:
    """Use Python's default, which `conftest` raises."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10)])
def test_the_thresholds_are_restored_also_after_an_error(before: tuple[int, int, int]) -> None:
    gc.set_threshold(*before)
    with pytest.raises(KeyError), collect_seldom():
        inside = gc.get_threshold()[0]
        raise KeyError
    assert gc.get_threshold() == before
    assert inside == (100_000 if before[0] else 0)  # turned off, it stays off


def test_commands_are_imported_and_runs_begin_with_few_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    see = lambda *_, **__: seen.append(gc.get_threshold()[0])

    def import_module(name: str) -> None:
        see()
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ImportError):
        main.main(["list"])

    class Loop:
        start = see

        def train(self, preemption: object) -> None:
            see()
            raise KeyError

    monkeypatch.setattr(trainer, "_open_loop", lambda *_: (see(), (Loop(), None, None))[1])
    job = SimpleNamespace(experiment=SimpleNamespace(training=None))
    with pytest.raises(KeyError):
        trainer._train(cast(Any, job))
    assert seen == [100_000, 100_000, 100_000, 700]
