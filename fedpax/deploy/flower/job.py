"""One round of a program on Flower's nodes, started and awaited by this process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import FederatedAlgorithm
from fedpax.deploy.batch_work import Clients
from fedpax.deploy.flower.app_files import PACKAGE, RESULTS, write_app
from fedpax.deploy.round_program import Settings, pack_program
from fedpax.errors import FedpaxError, MissingPackageError

_LEVEL = re.compile(r"[^A-Za-z]*INFO[^A-Za-z]*")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_TAIL = 2000  # characters of Flower's output in an error
_SECONDS_TO_STOP = 30


class FlowerRunError(FedpaxError):
    """A run of Flower without results; the message has the end of its log."""


def run_flower(
    program: Callable[..., Any],
    *args: Any,
    clients: Callable[[], Clients],
    write_data: Callable[[Path], None],
    name: str = "round",
    flags: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[Any]:
    """Run one round of a program on Flower's nodes by `flwr run`, and return its result.

    It is for results of a few numbers, such as metrics and analytics: they come back in the log of
    the run, wherever the SuperLink is. The arguments are in the app, which has at most 10 MB.
    """
    beside = Path(sys.executable).with_name("flwr")
    command = str(beside) if beside.exists() else shutil.which("flwr")
    if command is None:
        raise MissingPackageError(
            "run_flower() needs the command flwr. Install it in an environment of its own: pip "
            "install 'fedpax[flower]'."
        )
    shapes = clients().shapes
    size = jax.tree.leaves(shapes)[0].shape[0]
    constants = jax.tree.map(jnp.asarray, args)
    algorithm = FederatedAlgorithm(
        lambda params: constants, lambda state, data: (state, program(*state, data))
    )
    settings = Settings(rounds=1, num_clients=size)
    text = pack_program(algorithm, lambda key: (), shapes, settings)
    with tempfile.TemporaryDirectory() as temporary:
        app = Path(temporary) / "app"
        write_app(
            app,
            name=name,
            program=text,
            settings=settings,
            size=size,
            participants="participants",
            prints_results=True,
        )
        write_data(app / PACKAGE)
        results = _read_results([command, "run", str(app), *flags, "--stream"], tell)
    like = jax.eval_shape(program, *constants, shapes)
    leaves = [
        jnp.asarray(np.array(results[jax.tree_util.keystr(path)], leaf.dtype))
        for path, leaf in jax.tree.leaves_with_path(like)
    ]
    return [jax.tree.unflatten(jax.tree.structure(like), leaves)]


def _read_results(command: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Run `flwr run APP [SUPERLINK] ...` to its end; return the results in its output."""
    lines: list[str] = []
    results: dict[str, Any] | None = None
    run = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                line = _COLORS.sub("", line)
                before, mark, content = line.partition(RESULTS)
                if mark and _LEVEL.fullmatch(before):  # not the text of a node, in a warning
                    results = json.loads(content)
                    continue
                if not run and (started := _STARTED.search(line)):
                    run = started[1]
                lines.append(line)
                tell(line.rstrip())
        except BaseException:
            process.terminate()
            if run:
                _stop(command, run, tell)
            raise
    if results is None:
        raise FlowerRunError(
            f"{' '.join(command[:2])} ended without results, with status {process.returncode}. Its "
            f"last lines: {''.join(lines)[-_TAIL:].strip()}"
        )
    return results


def _stop(command: Sequence[str], run: str, tell: Callable[[str], None]) -> None:
    """End a run, which would otherwise go on at its SuperLink."""
    superlink = command[3:4] if not command[3].startswith("-") else []
    stop = [command[0], "stop", run, *superlink]
    try:
        ended = subprocess.run(stop, capture_output=True, timeout=_SECONDS_TO_STOP, check=False)
        is_ended = ended.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        is_ended = False
    tell(
        f"Run {run} is ended."
        if is_ended
        else f"Run {run} can still be active. End it: {' '.join(['flwr', *stop[1:]])}"
    )
