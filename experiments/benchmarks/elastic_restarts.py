"""Time from a failure of an elastic job to its next useful round, beside the time of a start.

    python -m fedpax.experiments.benchmarks.elastic_restarts --processes=3 --repetitions=5

Each repetition starts `fedpax train --elastic`, and measures the start, a training process that
gets `kill -9` and one that gets SIGSTOP, a supervisor that is killed, and its return: until the
keeper has decided, and until the next round whose number was not trained before. The largest CPU
time of a training process depends less on other programs.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedpax.elastic.host_copies import memory_folder, remove_copies
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.run_files.metrics import read_metrics, select

KILLED, STOPPED = "killed training process", "stopped training process"
EVENTS = ("start", KILLED, STOPPED, "killed host", "returned host")
LONGEST = 600.0


class Job(contextlib.AbstractContextManager["Job"]):
    """An elastic job of FedAvg on digits on this machine; a context manager that ends it."""

    def __init__(self, folder: Path, processes: int, heartbeat: int) -> None:
        self._folder, self._log = folder / "run", (folder / "errors").open("wb")
        address = f"localhost:{timing.free_port()}"
        settings = {
            "exp": "fedavg_digits",
            "job_log_dir": self._folder,
            "cohort.size": 2 * processes * max(processes - 1, 1),
            "population.num_clients": 4 * processes**2,
            "training.rounds": 1_000_000,
            "training.checkpoint_every": 10_000,
            "training.evaluate_every": 0,
            "heartbeat_timeout": heartbeat,
        }
        self._flags = [f"--{name}={value}" for name, value in settings.items()]
        self._environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(processes),
        }
        self._supervisors = [self._launch(number) for number in range(processes)]

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "fedpax", "train", "--elastic", *self._flags],
            env=self._environment | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    def __exit__(self, *error: object) -> None:
        for number, supervisor in enumerate(self._supervisors):
            supervisor.kill()
            supervisor.wait()
            remove_copies(memory_folder(None, self._folder, number))
        self._log.close()

    def wait_for_message(self, text: str, times: int) -> float:
        """Wait until the keeper has printed a text several times; return the time."""
        return self._wait(lambda: self._messages().count(text) >= times)

    def useful_round(self) -> float:
        """Wait for a round whose number was not trained before; return the time."""
        most = self._last_round()
        return self._wait(lambda: self._last_round() > most)

    def _messages(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8")

    def _last_round(self) -> int:
        lines = select(read_metrics(self._folder), "training")
        return int(lines[-1]["round"]) if lines else 0

    def _wait(self, until: Callable[[], bool]) -> float:
        deadline = time.monotonic() + LONGEST
        while not until():
            if self._supervisors[0].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the job did not train on, expected a round within {LONGEST:g} s. Its "
                    f"messages: {self._messages()[-2000:]}"
                )
            time.sleep(0.02)
        return time.monotonic()

    def _training_process(self, supervisor: subprocess.Popen[bytes]) -> int:
        process = supervisor.pid
        return int(Path(f"/proc/{process}/task/{process}/children").read_bytes())

    def cpu_seconds(self) -> float:
        """Return the largest CPU time of a training process until now, in seconds."""
        ticks = [0]
        for supervisor in self._supervisors:
            if supervisor.poll() is None:
                stat = Path(f"/proc/{self._training_process(supervisor)}/stat").read_bytes()
                ticks.append(sum(map(int, stat.rpartition(b")")[2].split()[11:13])))
        return max(ticks) / os.sysconf("SC_CLK_TCK")

    def act(self, event: str) -> None:
        last = self._supervisors[-1]
        if event in (KILLED, STOPPED):
            sent = signal.SIGKILL if event == KILLED else signal.SIGSTOP
            os.kill(self._training_process(last), sent)
        elif event == "killed host":
            last.kill()  # and with it its training process
            last.wait()
        else:
            self._supervisors[-1] = self._launch(len(self._supervisors) - 1)


class ElasticRestarts(Benchmark):
    processes: int = option(3, "processes, at least 2", least=2)
    repetitions: int = option(3, "number of jobs", least=1)
    heartbeat: int = option(10, "--heartbeat_timeout, seconds")
    pause: float = option(12.0, "seconds between a useful round and the next event")
    columns = (
        "event {name:24} | decided {decided:.1f} | seconds {seconds:.1f} | cpu {cpu:.1f} "
        "| of a start {ratio:.2f}"
    )

    def measure(self) -> Iterator[Row]:
        jobs = [self.measure_job() for _ in range(self.repetitions)]
        starts = [job["start"][1] for job in jobs]
        for name in EVENTS:
            decided, seconds, cpu = map(list, zip(*(job[name] for job in jobs), strict=True))
            ratio = timing.paired_ratio(seconds, starts)
            yield Row(name=name, decided=decided, seconds=seconds, cpu=cpu, ratio=ratio)

    def measure_job(self) -> dict[str, tuple[float, float, float]]:
        """Return the seconds until the decision and a useful round, and of the CPU, by event."""
        with timing.new_folder() as folder:
            began = time.monotonic()
            with Job(folder, self.processes, self.heartbeat) as job:
                seconds = {EVENTS[0]: (0.0, job.useful_round() - began, job.cpu_seconds())}
                for times, name in enumerate(EVENTS[1:], start=1):
                    time.sleep(self.pause)
                    began = time.monotonic()
                    job.act(name)
                    joined = job.wait_for_message("has joined", 1) if name == EVENTS[-1] else None
                    started = job.wait_for_message("processes train", times)
                    ended = job.useful_round()
                    seconds[name] = (joined or started) - began, ended - began, job.cpu_seconds()
        return seconds


main = command(ElasticRestarts)
