"""Tests of `fedpax export --stages` and `fedpax inspect`."""

from pathlib import Path

import jax
import numpy as np
import pytest
from small_runs import NAMED, Command

import fedpax
from fedpax.deploy import inspect_round, load


@pytest.fixture
def exported(command: Command, text: Path, tmp_path: Path) -> Path:
    out = tmp_path / "rounds" / "one"
    status, output, _ = command("export", "--stages", f"--job_log_dir={text}", f"--out={out}")
    assert status == 0
    assert output.startswith(f"diloco_text: 2 stages in {out}, ")
    return out


def test_the_round_of_a_run_is_exported_and_inspected(command: Command, exported: Path) -> None:
    assert [path.name for path in exported.parent.iterdir()] == ["one"]  # no draft is left
    artifact = load(exported)
    first = artifact.manifest["stages"][0]
    assert "cohort.batches['targets']" in [value["name"] for value in first["own"]]
    status, output, _ = command("inspect", str(exported))
    assert status == 0
    lines = output.splitlines()
    assert lines[0] == "diloco_round: 2 stages for each of 4 islands"
    assert lines[1] == f"program {artifact.program}"
    assert any(line.startswith("  keeps    state.inner_optimizer_state") for line in lines)
    assert " FLOPs, " in lines[-2]
    assert lines[-1] == "  for devices without JAX: StableHLO without custom calls or unknown sizes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "got 'no folder', expected one folder"),
        (("nowhere",), "nowhere/manifest.json cannot be read"),
        (("a", "b"), "got 'a b', expected one folder"),
    ],
)
def test_inspect_names_the_remedy(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    status, output, errors = command("inspect", *arguments)
    assert (status, output) == (2, "")
    assert message in errors


def test_stages_and_a_format_of_models_are_refused(
    command: Command, regression: Path, tmp_path: Path
) -> None:
    where = (f"--job_log_dir={regression}", f"--out={tmp_path / 'out'}")
    status, _, errors = command("export", "--stages", "--format=npz", *where, NAMED)
    assert status == 2 and "--format is of an exported model" in errors


def test_a_custom_call_is_an_obstacle_for_devices(tmp_path: Path) -> None:
    @fedpax.program(clients=2)
    def largest(x: jax.Array) -> jax.Array:
        svd = lambda x: jax.numpy.linalg.svd(x, compute_uv=False)[0]
        return fedpax.federated_mean(fedpax.federated_map(svd, x))

    from fedpax.deploy import export_stages

    stages = fedpax.stages(largest, np.ones((2, 3, 3), np.float32))
    export_stages(stages, tmp_path / "round")
    assert "not for devices without JAX: it has the custom call lapack" in inspect_round(
        tmp_path / "round"
    )
