"""An elastic job of real processes."""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from several_processes import environment, finish, free_port, start_one

from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import METRICS

ROUNDS = 60
ENDLESS = 10**6
"""Rounds of a run that a test ends by a signal: however slowly a host starts, it returns before."""
SETTINGS = (
    "--clients=6",
    "--mesh.clients=3",
    "--mesh.fsdp=1",
    f"--training.rounds={ROUNDS}",
    "--training.checkpoint_every=15",
    "--training.evaluate_every=0",
)


class Job:
    """An elastic job of several hosts, each of them a supervisor on this machine."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *arguments: str,
        settings: Sequence[str] = SETTINGS,
        exp: str = "small_regression:regression",
    ) -> None:
        self.folder, self.count, self.port = folder, count, free_port()
        self.arguments = (
            "train",
            "--elastic",
            f"--exp={exp}",
            f"--job_log_dir={folder}",
            "--heartbeat_timeout=8",
            *settings,
            *arguments,
        )
        self.ended: list[subprocess.Popen] = []
        self.processes = [self.launch(number) for number in range(count)]

    def launch(self, number: int) -> subprocess.Popen:
        return start_one(self.arguments, environment(number, self.count, self.port))

    def return_of(self, number: int) -> None:
        """Start a supervisor again."""
        self.ended.append(self.processes[number])
        self.processes[number] = self.launch(number)

    def training_process(self, number: int) -> int:
        """Return the training process of a supervisor, its child."""
        command = ["ps", "-o", "pid=", "--ppid", str(self.processes[number].pid)]
        return int(subprocess.run(command, capture_output=True, text=True).stdout)

    def last_round(self) -> int:
        lines = select(read_metrics(self.folder), "training")
        return int(lines[-1]["round"]) if (self.folder / METRICS).exists() and lines else 0

    def wait_until_it_trains(self, number: int) -> None:
        """Wait for the training process of a supervisor that has returned."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(ValueError):  # it has not been started yet
                self.training_process(number)
                return
            assert time.monotonic() - began < 240
            time.sleep(0.05)

    def wait_for(self, more: int, last: int = ROUNDS) -> float:
        """Wait for rounds after the present one; return the seconds."""
        began, target = time.monotonic(), min(self.last_round() + more, last)
        while self.last_round() < target:
            assert time.monotonic() - began < 240
            assert self.processes[0].poll() is None
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> tuple[list[int], str]:
        """End an endless job; return the rounds of all saves for a signal, and its errors."""
        self.processes[0].send_signal(signal.SIGTERM)
        ends = finish(self.processes)
        assert [status for status, _, _ in ends] == [143] * self.count, ends[0][2]
        saved = re.findall(rf"SIGTERM: saved (\d+) of {ENDLESS:,} rounds", ends[0][1])
        return [int(number) for number in saved], ends[0][2]
