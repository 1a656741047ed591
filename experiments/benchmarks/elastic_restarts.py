"""Time from a failure of an elastic job to its next useful round, beside the time of a start.

    python -m fedpax.experiments.benchmarks.elastic_restarts --processes=3 --repetitions=5

Each repetition starts `fedpax train --elastic` with processes on this machine, and measures

- the start: from the commands to the first round;
- a killed training process: from `kill -9` to the next useful round, with all processes;
- a killed host: from `kill -9` of a supervisor to the next useful round, with those that are left;
- the return: from the command of that supervisor to the next useful round with all processes.

A round is useful if no round of its number was trained before: rounds since the newest checkpoint
are trained again. There is a checkpoint after every round.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from fedpax.experiments.benchmarks.timing import paired_ratio, write
from fedpax.training.metrics import read_metrics, select

EVENTS = ("start", "killed training process", "killed host", "returned host")
LONGEST = 600.0


class Row(NamedTuple):
    """An event.

    Attributes:
        name: the event.
        seconds: seconds until the next useful round, in each repetition.
        ratio: median of the ratios to the start of the same repetition.
    """

    name: str
    seconds: list[float]
    ratio: float


class Job(AbstractContextManager["Job"]):
    """An elastic job of FedAvg on digits on this machine; a context manager that ends it.

    Args:
        folder: an empty folder.
        processes: number of processes; each simulates a device.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder, self._count = folder / "run", processes
        with socket.create_server(("localhost", 0)) as free:
            self._address = f"localhost:{free.getsockname()[1]}"
        self._log = (folder / "errors").open("wb")
        self._supervisors = [self._launch(number) for number in range(processes)]

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        settings = {
            "exp": "fedavg_digits",
            "job_log_dir": self._folder,
            "cohort.size": 2 * self._count * max(self._count - 1, 1),
            "population.num_clients": 4 * self._count**2,
            "training.rounds": 1_000_000,
            "training.checkpoint_every": 1,
            "training.evaluate_every": 0,
        }
        variables = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COORDINATOR_ADDRESS": self._address,
            "JAX_NUM_PROCESSES": str(self._count),
            "JAX_PROCESS_ID": str(number),
        }
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "fedpax", "train", "--elastic", *flags],
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    def useful_round(self, generation: int = 1) -> float:
        """Wait for a useful round of a generation or a later one; return the time."""
        deadline = time.monotonic() + LONGEST
        while self._generation() < generation:
            self._check(deadline)
        most = self._last_round()
        while self._last_round() <= most:
            self._check(deadline)
        return time.monotonic()

    def _generation(self) -> int:
        """Return the generation that the keeper has told of last."""
        text = Path(self._log.name).read_text()
        return max(1, text.count("processes train.") + 1)

    def _last_round(self) -> int:
        lines = select(read_metrics(self._folder), "training")
        return int(lines[-1]["round"]) if lines else 0

    def _check(self, deadline: float) -> None:
        if self._supervisors[0].poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"the job did not train on, expected a round within {LONGEST:g} s. Its messages: "
                f"{Path(self._log.name).read_text()[-2000:]}"
            )
        time.sleep(0.02)

    def kill_training_process(self, number: int) -> None:
        """Kill the training process of a host: the child of its supervisor."""
        supervisor = self._supervisors[number].pid
        tasks = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
        os.kill(int(tasks.split()[0]), signal.SIGKILL)

    def kill_host(self, number: int) -> None:
        """Kill a supervisor, and with it its training process."""
        self._supervisors[number].kill()
        self._supervisors[number].wait()

    def return_host(self, number: int) -> None:
        """Start a supervisor again."""
        self._supervisors[number] = self._launch(number)

    def __exit__(self, *error: object) -> None:
        """Kill all processes."""
        for supervisor in self._supervisors:
            supervisor.kill()
            supervisor.wait()
        self._log.close()


def measure(processes: int) -> dict[str, float]:
    """Measure one job.

    Args:
        processes: number of its processes, at least 2.

    Returns:
        Seconds by event.
    """
    last = processes - 1
    with tempfile.TemporaryDirectory() as folder:
        times = [time.monotonic()]
        ends = []
        with Job(Path(folder), processes) as job:
            ends.append(job.useful_round())
            job.useful_round()  # so that a checkpoint is there
            actions = (job.kill_training_process, job.kill_host, job.return_host)
            for generation, act in enumerate(actions, start=2):
                times.append(time.monotonic())
                act(last)
                ends.append(job.useful_round(generation))
    return {name: end - began for name, began, end in zip(EVENTS, times, ends, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the rows.

    Args:
        arguments: the command's arguments. Default None: those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=3, help="processes, at least 2")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args(arguments)
    if options.processes < 2 or options.repetitions < 1:
        parser.error("expected --processes of at least 2 and --repetitions of at least 1")
    found = [measure(options.processes) for _ in range(options.repetitions)]
    seconds = {name: [one[name] for one in found] for name in EVENTS}
    rows = [
        Row(name, seconds[name], paired_ratio(seconds[name], seconds["start"])) for name in EVENTS
    ]
    print(f"{'event':24} {'seconds':>9} {'of a start':>11}")
    for row in rows:
        print(f"{row.name:24} {sorted(row.seconds)[len(row.seconds) // 2]:9.1f} {row.ratio:11.2f}")
    if options.json:
        write(options.json, rows, processes=options.processes, repetitions=options.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
