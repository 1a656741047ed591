"""Simulated devices: as many as asked for, with workers enough for all their collectives."""

import os
import subprocess
import sys

import pytest

from fedpax.parallel.simulated_devices import simulate_devices

PROGRAM = """
from fedpax.parallel.simulated_devices import simulate_devices
simulate_devices(3, subgroups=SUBGROUPS)
import jax, os
print(jax.device_count(), os.environ.get("PJRT_NPROC"), os.environ.get("NPROC"))
"""


def run(subgroups=True, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("SUBGROUPS", str(subgroups))],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_there_are_as_many_devices_and_eight_workers_for_each():
    assert run() == ["3", "24", "None"]


def test_where_all_devices_take_part_there_are_no_more_workers_than_xla_has_itself():
    assert run(subgroups=False) == ["3", "None", "None"]


def test_a_number_of_workers_that_the_user_has_set_stays():
    assert run(NPROC="5") == ["3", "None", "5"]


def test_too_few_devices_are_refused():
    with pytest.raises(ValueError, match="Pass the size of the mesh"):
        simulate_devices(0)
