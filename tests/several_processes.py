"""Start the processes of a job on this machine, as a launcher does on several hosts."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from fedpax.run_files.metrics import read_metrics
from fedpax.run_files.paths import METRICS

HERE = Path(__file__).parent
TRAINING = str(HERE / "training")
FEDPAX = (sys.executable, "-m", "fedpax.main")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def environment(number: int, count: int, port: int) -> dict[str, str]:
    """Return the variables of one process."""
    # The devices are those that fedpax simulates.
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC")}
    return kept | {
        # Some experiments are beside the tests of training.
        "PYTHONPATH": os.pathsep.join(filter(None, (TRAINING, os.environ.get("PYTHONPATH")))),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }


def start(
    count: int,
    folder: Path,
    *arguments: str,
    exp: str = "small_regression:regression",
    of_one: Sequence[str] = (),
    variables_of_one: Mapping[str, str] = MappingProxyType({}),
) -> list[subprocess.Popen]:
    """Start `fedpax train --multihost`, process 1 with arguments and variables of its own."""
    port = free_port()
    command = ["train", f"--exp={exp}", f"--job_log_dir={folder}", "--multihost", *arguments]
    return [
        start_one(
            [*command, *(of_one if number == 1 else ())],
            environment(number, count, port) | (variables_of_one if number == 1 else {}),
        )
        for number in range(count)
    ]


def start_one(
    arguments: Sequence[str], variables: dict[str, str] | None, cwd: Path = HERE
) -> subprocess.Popen:
    """Start fedpax, by default in the folder that has the tests' experiments."""
    return subprocess.Popen(
        [*FEDPAX, *arguments],
        env=variables,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: Sequence[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Return the status, output and errors of each process, without what gloo prints."""
    try:
        completed = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, without_gloo(output), errors)
        for process, (output, errors) in zip(processes, completed, strict=True)
    ]


def without_gloo(output: str) -> str:
    """Remove the lines of gloo, which connects CPU processes and writes on stdout itself.

    Two of its threads can write at once, so that a line can be a part of one.
    """
    return "".join(
        line
        for line in output.splitlines(keepends=True)
        if not re.search(r"\[Gloo\]|connected to|peer ranks|^[\d\s]*$", line)
    )


def wait_for_rounds(folder: Path, rounds: int, processes: Sequence[subprocess.Popen]) -> None:
    """Wait until a run has logged some rounds."""
    while not (folder / METRICS).exists() or len(read_metrics(folder)) < rounds:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
