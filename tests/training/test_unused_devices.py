"""Devices that a run does not use are told, with the setting that uses them."""

import dataclasses
from pathlib import Path

import jax
import pytest
from several_processes import finish, start
from small_regression import regression

from fedpax.experiments.catalog import find_experiment
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.startup_report import check_processes, describe_unused


@pytest.mark.parametrize(
    ("mesh", "participants", "expected"),
    [
        (MeshConfig(), 8, "the mesh has 1 of 8 devices. For all, set --mesh.clients=-1"),
        (MeshConfig(), 10, "make the number of clients a multiple of 8, and set --mesh.clients=-1"),
        (MeshConfig(clients=8), 8, None),
    ],
)
def test_an_experiment_of_ones_own(mesh: MeshConfig, participants: int, expected: str) -> None:
    experiment = dataclasses.replace(regression(), mesh=mesh)
    run = experiment.build()
    check_processes(experiment, run)
    result = describe_unused(experiment, run, participants)
    assert result is None if expected is None else expected in (result or "")


def test_the_setting_of_a_cohort_uses_all_devices() -> None:
    experiment = find_experiment("fedavg_digits")()
    messages = describe_unused(experiment, experiment.build(), experiment.cohort.size)
    assert messages == "the mesh has 5 of 8 devices. For all, set --cohort.size=16"
    cohort = dataclasses.replace(experiment.cohort, size=16)
    assert dataclasses.replace(experiment, cohort=cohort).make_mesh().size == jax.device_count()


@pytest.mark.slow
def test_a_process_without_a_device_of_the_mesh_is_told(tmp_path: Path) -> None:
    stated = ("--mesh.clients=1", "--mesh.fsdp=1")
    completed = finish(start(2, tmp_path / "run", *stated))
    for status, _, errors in completed:
        assert status != 0 and "Traceback" not in errors
        assert "the mesh has 1 of 2 devices, all in 1 of 2 processes" in errors
        assert "Start fewer processes, or set --mesh.clients=-1." in errors
