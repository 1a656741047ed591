"""Several threads of one process trace, run and train programs at once."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.checkpoints import load_params
from fedpax.checkpoints.orbax_files import QuietFailedSaves, _is_no_failed_save
from fedpax.errors import ConfigurationError
from fedpax.main import main
from fedpax.training.folder_owners import JobDirLock

LEAF = f"{Path(__file__).parent / 'small_leaf.py'}:line"


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each function in a thread of its own, all at once; return or raise what they do."""
    barrier, results = threading.Barrier(len(functions)), [None] * len(functions)
    errors: list[BaseException] = []

    def call(i: int) -> None:
        barrier.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_programs_of_threads_do_not_see_each_other() -> None:
    waiting = threading.Barrier(2)

    def use(placement: str, size: int, chunk_size: int | None) -> Any:
        @fedpax.program(**{placement: size}, chunk_size=chunk_size)
        def step(w: jax.Array, x: jax.Array) -> jax.Array:
            waiting.wait()  # both threads are inside of their programs
            moved = fedpax.federated_map(lambda x: jnp.sin(w * x), x)
            waiting.wait()
            return fedpax.federated_mean(moved)

        x = np.linspace(0, 1, 3 * size, dtype=np.float32).reshape(size, 3)
        with jax.set_mesh(fedpax.make_mesh(**{placement: size}, devices=jax.devices()[:size])):
            mean = jax.jit(step)(0.5, x)
            text = fedpax.explain(step, 0.5, x)
            sizes = {name: each.size for name, each in fedpax.cost(step, 0.5, x).placements.items()}
        np.testing.assert_allclose(mean, np.sin(0.5 * x).mean(0), rtol=1e-5)
        return text.splitlines()[2].split(",")[0].strip(), sizes

    result = in_threads([lambda: use("clients", 4, None), lambda: use("islands", 2, 1)])
    assert result == [("clients=4", {"clients": 4}), ("islands=2", {"islands": 2})]


def test_commands_in_threads_train_as_one_after_the_other(tmp_path: Path) -> None:
    def train(folder: str, seed: int) -> int:
        return main(["train", f"--exp={LEAF}", f"--job_log_dir={tmp_path / folder}",
                     f"--seed={seed}", "--training.rounds=4"])  # fmt: skip

    before, streams = dict(os.environ), (sys.stdout, sys.stderr)
    hook = sys.unraisablehook
    assert in_threads([lambda s=seed: train(f"together_{s}", s) for seed in range(3)]) == [0, 0, 0]
    assert (dict(os.environ), (sys.stdout, sys.stderr)) == (before, streams)
    assert sys.unraisablehook is hook
    for seed in range(3):
        assert train(f"alone_{seed}", seed) == 0
        together, alone = (
            load_params(tmp_path / f"{name}_{seed}") for name in ("together", "alone")
        )
        np.testing.assert_array_equal(together, alone)


def test_a_folder_has_one_thread(tmp_path: Path) -> None:
    with JobDirLock(tmp_path / "run"):
        with pytest.raises(ConfigurationError, match="is in use"):
            in_threads([lambda: JobDirLock(tmp_path / "run")])


def test_failed_saves_stay_quiet_until_the_last_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # After an error of an earlier run they stay quiet.
    monkeypatch.setattr(QuietFailedSaves, "_in_effect", 0)
    hook, logger = sys.unraisablehook, logging.getLogger("absl")
    first, second = QuietFailedSaves(), QuietFailedSaves()
    first.__enter__()
    second.__enter__()
    first.__exit__(None)
    assert _is_no_failed_save in logger.filters and sys.unraisablehook is hook
    second.__exit__(None)
    assert _is_no_failed_save not in logger.filters


def test_a_failed_save_is_quiet_whichever_logger_writes_it() -> None:
    """The error names no file of the checkpoint, and absl logs it for Orbax."""

    def logged(file: str) -> bool:
        try:
            exec(compile("raise OSError('Cannot connect to host')", file, "exec"))
        except OSError:
            result = sys.exc_info()
        record = logging.LogRecord("absl", logging.ERROR, "/absl/logging.py", 1, "", (), result)
        return _is_no_failed_save(record)

    assert not logged("/site-packages/orbax/checkpoint/_src/futures/future.py")
    assert logged("/site-packages/other/future.py")
