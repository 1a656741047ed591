"""The compiled round of a process that starts again."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from small_regression import regression

from fedpax.algorithm import FederatedAlgorithm
from fedpax.elastic.saved_program import ProgramFile
from fedpax.parallel.mesh import MeshConfig
from fedpax.training import compiled_round
from fedpax.training.compiled_round import CompiledRound, compile_round, init_state
from fedpax.training.experiment import Run
from fedpax.training.prefetch import put_on_mesh

CONFIGURATION = {"learning_rate": 0.01}


@pytest.fixture
def run() -> Run:
    return dataclasses.replace(regression(), mesh=MeshConfig(clients=2)).build()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the rounds that are traced."""
    found: list[Any] = []
    monkeypatch.setattr(compiled_round, "_check_round", lambda *args: found.append(args))
    return found


def compile_with(run: Run, path: Path, configuration: Any = CONFIGURATION) -> CompiledRound:
    cohort = put_on_mesh(next(run.cohorts), run.shardings.cohort)
    with jax.set_mesh(run.mesh):
        return compile_round(run, cohort, saved=ProgramFile(path, configuration))


def test_a_loaded_round_equals_the_compiled_one(
    run: Run, tmp_path: Path, checked: list[Any]
) -> None:
    path = tmp_path / "memory" / "job-2.program"
    compiled = compile_with(run, path)
    assert path.parent.stat().st_mode & 0o777 == 0o700 and len(checked) == 1
    loaded = compile_with(run, path)
    assert len(checked) == 1 and loaded.round is not compiled.round
    assert loaded[1:] == compiled[1:]
    with jax.set_mesh(run.mesh):
        cohort = put_on_mesh(next(run.cohorts), run.shardings.cohort)
        expected, metrics = compiled.round(init_state(run, compiled, 0), cohort)
        state = init_state(run, compiled, 0)
        found, found_metrics = loaded.round(state, cohort)
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal(found_metrics, metrics)
    assert state.params["hidden"].is_deleted()  # donated
    compile_with(run, path, {"learning_rate": 0.02})
    assert len(checked) == 2  # another configuration


def test_a_changed_source_or_a_damaged_file_is_compiled(
    run: Run, tmp_path: Path, checked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job-2.program"
    compile_with(run, path)
    path.write_bytes(path.read_bytes()[:-100])
    compile_with(run, path)
    assert len(checked) == 2
    times = os.stat(__file__)
    os.utime(__file__, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000))
    try:
        compile_with(run, path)
        assert len(checked) == 3
    finally:
        os.utime(__file__, ns=(times.st_atime_ns, times.st_mtime_ns))
    compile_with(run, path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    compile_with(run, path)
    assert len(checked) == 5  # a folder of another user is not read


def test_a_round_that_calls_python_is_not_saved(run: Run, tmp_path: Path) -> None:
    def round(state: Any, cohort: Any) -> Any:
        jax.debug.callback(lambda value: None, jnp.sum(cohort["x"]))
        return run.algorithm.round(state, cohort)

    calls = run._replace(algorithm=FederatedAlgorithm(run.algorithm.init, round))
    path = tmp_path / "job-2.program"
    compile_with(calls, path)
    assert not path.exists()
