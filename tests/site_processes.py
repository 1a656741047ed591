"""A syncer and its islands as commands of `fedpax`, in processes over loopback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedpax.islands.syncer.logs import read_merges

HERE = Path(__file__).parent / "islands"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_script(script: str, folder: Path) -> None:
    """Run commands of a page in a folder, where `fedpax` and `python` are those of the test."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, module in (("fedpax", "-m fedpax.main"), ("python", "")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        command.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


class Processes:
    """Commands of `fedpax` in processes of their own; all are ended in the end."""

    def __init__(self, folder: Path, exp: str = "small_sites:sites_regression") -> None:
        self.folder, self.started, self.exp = folder, [], exp
        self.address = f"127.0.0.1:{free_port()}"

    def start(
        self,
        command: str,
        name: str,
        *more: str,
        log: str | None = None,
        cwd: Path = HERE,
        **variables: str,
    ) -> subprocess.Popen:
        """Start a command for the folder `name`, with further environment variables."""
        where = f"--listen={self.address}" if command == "syncer" else f"--syncer={self.address}"
        options = [
            where,
            f"--exp={self.exp}",
            f"--job_log_dir={self.folder / name}",
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        with (self.folder / f"{log or name}.log").open("a") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedpax.main", command, *options, *more],
                cwd=cwd,
                stdout=file,
                stderr=file,
                env=environment | {"JAX_NUM_CPU_DEVICES": "1"} | variables,
            )
        self.started.append(process)
        return process

    def start_island(self, name: str, count: int, *more: str) -> list[subprocess.Popen]:
        """Start the processes of one island; the log of process i is `{name}{i}.log`."""
        coordinator = f"127.0.0.1:{free_port()}"
        return [
            self.start(
                "join",
                name,
                "--multihost",
                *more,
                log=f"{name}{number}",
                JAX_COORDINATOR_ADDRESS=coordinator,
                JAX_NUM_PROCESSES=str(count),
                JAX_PROCESS_ID=str(number),
            )
            for number in range(count)
        ]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        """Return the end of all logs."""
        return "".join(f"{path.stem}: {path.read_text()}" for path in self.folder.glob("*.log"))[
            -6000:
        ]

    def end(self) -> None:
        """End all processes that were started."""
        for process in self.started:
            process.kill()
            process.wait()

    def finish(self, started: Sequence[subprocess.Popen], seconds: float = 400) -> None:
        """Wait until each of some processes has ended with status 0."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in started):
            assert time.monotonic() < deadline, self.logs()
            assert all(process.poll() in (None, 0) for process in started), self.logs()
            time.sleep(0.1)
        assert all(process.poll() == 0 for process in started), self.logs()

    def merges(self) -> int:
        return len(read_merges(self.folder / "syncer"))

    def islands_since(self, merge: int) -> set[str]:
        """Return the islands with updates in merges after a number of merges."""
        content = read_merges(self.folder / "syncer")[merge:]
        return {update["island"] for merge in content for update in merge["updates"]}


def wait_until(condition: Callable[[], bool], processes: Processes, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, processes.logs()
        time.sleep(0.02)


def updates_of(folder: Path) -> list[tuple[str, str, int, int]]:
    """Return island, process, fragment and sequence number of each update that was merged."""
    return [
        (update["island"], update["incarnation"], merge["fragment"], update["sequence"])
        for merge in read_merges(folder)
        for update in merge["updates"]
    ]
