"""Two processes with four simulated devices each train one run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import chex
import numpy as np
import pytest
from small_regression import regression

from fedpax.training.checkpoint import latest_round, load_params
from fedpax.training.metrics import FILE, read_metrics, select
from fedpax.training.trainer import train

HERE = Path(__file__).parent
PROGRAM = """
import dataclasses, sys
import jax
process, port, rounds, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
from fedpax.training.trainer import train
from small_regression import regression
training = dataclasses.replace(regression().training, rounds=rounds)
outcome = train(dataclasses.replace(regression(), training=training), folder)
print(outcome.rounds, outcome.finished, outcome.signal and outcome.signal.name)
"""

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(folder: Path, rounds: int) -> list[subprocess.Popen]:
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(process), str(port), str(rounds), str(folder)],
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


def outcomes(processes: list[subprocess.Popen]) -> Iterator[str]:
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        yield output.splitlines()[-1]


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    train(regression(), tmp_path / "one")
    assert list(outcomes(start(tmp_path / "two", 12))) == ["12 True None"] * 2
    chex.assert_trees_all_close(
        load_params(tmp_path / "two"), load_params(tmp_path / "one"), rtol=1e-4, atol=1e-6
    )
    losses = [
        [line["loss"] for line in select(read_metrics(tmp_path / name), "training")]
        for name in ("one", "two")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_makes_both_save_the_same_round(
    tmp_path: Path, number: signal.Signals
) -> None:
    processes = start(tmp_path, 100_000)
    while not (tmp_path / FILE).exists() or len(read_metrics(tmp_path)) < 5:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    processes[1].send_signal(number)
    one, other = outcomes(processes)
    saved = latest_round(tmp_path)
    assert (one, other) == (f"{saved} False SIGTERM", f"{saved} False {number.name}")
    assert read_metrics(tmp_path)[-1]["round"] == saved


def test_the_command_line_joins_processes(tmp_path: Path) -> None:
    train(regression(), tmp_path / "one")
    command = [sys.executable, "-m", "fedpax.main", "train", "--exp=small_regression:regression"]
    shared = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            [*command, f"--job_log_dir={tmp_path / 'two'}", "--multihost"],
            env={**shared, "JAX_PROCESS_ID": str(process)},
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    assert all("Finished 12 of 12 rounds" in line for line in outcomes(processes))
    chex.assert_trees_all_close(
        load_params(tmp_path / "two"), load_params(tmp_path / "one"), rtol=1e-4, atol=1e-6
    )
