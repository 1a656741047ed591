"""Simulated devices have the requested number, and worker threads for their collectives."""

import os
import subprocess
import sys

import pytest

from fedpax.parallel.compiler_options import simulate_devices

PROGRAM = """
from fedpax.parallel.compiler_options import simulate_devices
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


def test_every_device_has_eight_worker_threads():
    assert run() == ["3", "24", "None"]


@pytest.mark.slow
def test_without_subgroups_the_worker_threads_are_those_of_xla():
    assert run(subgroups=False) == ["3", "None", "None"]


@pytest.mark.slow
def test_a_number_of_threads_in_the_environment_is_kept():
    assert run(NPROC="5") == ["3", "None", "5"]


@pytest.mark.parametrize("count", [0, 1025, 1_000_000])
def test_a_number_of_devices_out_of_range_is_an_error(count: int):
    with pytest.raises(ValueError, match=r"expected 1 to 1,024 devices\. Pass the size"):
        simulate_devices(count)
