"""`fedpax train --elastic`: supervise a training process, and restart it when processes change."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from fedpax.console import print_error
from fedpax.elastic.elastic_coordinator import CANNOT_RUN, ElasticCoordinator
from fedpax.elastic.host_copies import (
    list_copies,
    memory_folder,
    remove_copies,
)
from fedpax.elastic.membership import MEMBERSHIP, Membership
from fedpax.errors import UsageError
from fedpax.preemption import PreemptionGuard
from fedpax.processes.job_processes import JobProcesses, JobProcessesError, find_job_processes
from fedpax.processes.json_line_socket import JsonLineSocket
from fedpax.run_files.paths import latest_round

KEEPER_IS_GONE = 75  # EX_TEMPFAIL of sysexits.h: the same command can succeed later
TICK = 0.05


class ElasticOptions(NamedTuple):
    """The options of an elastic job, the same in the command of each host."""

    # the command that runs the keeper: the command of process 0 ("first"), this one, which does not
    # train ("alone"), or one with `--keeper=alone` ("elsewhere")
    keeper: Literal["first", "alone", "elsewhere"]
    join_timeout: float  # seconds to wait for the keeper
    heartbeat_timeout: float  # seconds until a silent process is lost
    copy_every: int  # rounds between copies of the state in the host's memory; 0: none
    copy_dir: str | None  # the folder in the host's memory. None: `/dev/shm`.


FitJob: TypeAlias = Callable[[Sequence[int], int], tuple[list[str], list[int] | None] | None]
"""Fits a job to some of its processes: (members, number of all processes) -> (arguments, numbers).

The arguments change the mesh. The numbers are the participants that train; None if they do
not depend on the processes. The result is None if the job cannot run with these processes.
"""


def supervise(
    folder: Path,
    saved_in: Path,
    arguments: Sequence[str],
    options: ElasticOptions,
    *,
    fit: FitJob,
    processes_per_island: Callable[[int], int],
) -> int:
    """Supervise a training process on this host until the job ends."""
    try:
        processes = find_job_processes() or JobProcesses(
            f"localhost:{_free_port()}", 1, 0, "no variables"
        )
        keeper = None
        if options.keeper == "alone" or (options.keeper == "first" and processes.process_id == 0):
            keeper = ElasticCoordinator(
                processes,
                join_timeout=options.join_timeout,
                heartbeat_timeout=options.heartbeat_timeout,
                group=processes_per_island(processes.num_processes),
                alone=options.keeper == "alone",
                tell=lambda line: print_error(f"fedpax: elastic: {line}."),
            )
    except JobProcessesError as error:
        raise UsageError(f"--elastic: {error}") from None
    with PreemptionGuard() as preemption:
        if options.keeper == "alone":
            assert keeper is not None
            return _wait_for(keeper, preemption)
        supervisor = Supervisor(folder, saved_in, arguments, options, processes, fit)
        with contextlib.closing(supervisor):
            supervisor.connect()
            status = supervisor.run(preemption)
    if keeper is not None:
        keeper.join()
    return status


def _wait_for(keeper: ElasticCoordinator, preemption: PreemptionGuard) -> int:
    signaled = False
    while keeper.status is None:
        keeper.join(TICK)
        if preemption.signal is not None and not signaled:
            signaled = True
            keeper.signal(128 + preemption.signal)
    keeper.join()
    return keeper.status


class Supervisor:
    """The supervisor of one training process."""

    def __init__(
        self,
        folder: Path,
        saved_in: Path,
        arguments: Sequence[str],
        options: ElasticOptions,
        processes: JobProcesses,
        fit: FitJob,
    ) -> None:
        self._options, self._arguments = options, arguments
        self._processes, self._fit, self._saved_in = processes, fit, saved_in
        self._memory = memory_folder(options.copy_dir, folder, processes.process_id)
        self._generation = 0
        self._training: TrainingProcess | None = None
        self._lines: JsonLineSocket | None = None

    def connect(self) -> None:
        """Connect to the keeper."""
        deadline = time.monotonic() + self._options.join_timeout
        reason = "no attempt"
        greeting = {  # complete before the keeper waits for it
            "process": self._processes.process_id,
            "count": self._processes.num_processes,
            "host": socket.gethostname(),
            "round": latest_round(self._saved_in) or 0,
            "copies": list_copies(self._memory),
        }
        while True:
            try:
                address = (self._processes.host, self._processes.port)
                lines = JsonLineSocket(socket.create_connection(address, timeout=5))
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                lines.send(**greeting)
                self._lines = lines
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        raise UsageError(
            f"--elastic: process {self._processes.process_id} found no keeper at "
            f"{self._processes.coordinator} within {self._options.join_timeout:g} s ({reason}), "
            "expected process 0, or the command with --keeper=alone, to listen there. Read its "
            "log; if it starts later, raise --join_timeout."
        )

    def run(self, preemption: PreemptionGuard) -> int:
        """Follow the keeper until the job ends."""
        lines = self._lines
        assert lines is not None
        signaled = False
        last_beat = 0.0
        while True:
            ready, _, _ = select.select([lines.connection], [], [], TICK)
            for message in lines.receive() if ready else ():
                if "stop" in message:
                    if message["reason"]:
                        print_error(f"fedpax: elastic: {message['reason']}.")
                    return int(message["stop"])
                self._follow(message)
            if self._training is not None and (status := self._training.poll()) is not None:
                self._end_training()
                self._send_end(status)
            if preemption.signal is not None and not signaled:
                signaled = True
                lines.send(signal=128 + preemption.signal)
                self._signal(signal.SIGTERM)
            if time.monotonic() - last_beat > 1:
                last_beat = time.monotonic()
                lines.send(beat=True)
            silent = time.monotonic() - lines.heard > self._options.heartbeat_timeout
            if lines.closed or silent:
                kept = latest_round(self._saved_in)
                print_error(
                    f"fedpax: elastic: the keeper at {self._processes.coordinator} is "
                    f"{'silent' if silent else 'gone'}. Start all processes again: the run resumes "
                    f"{f'from round {kept}' if kept else 'from its beginning'}."
                )
                return KEEPER_IS_GONE

    def _follow(self, message: dict) -> None:
        if "start" in message:
            self._start(message)
        elif message.get("kill") == self._generation:
            self._signal(signal.SIGKILL)
        elif message.get("save") == self._generation:
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._training is not None:
            self._training.signal(number)

    def _start(self, message: dict) -> None:
        self._generation, members = message["start"], message["members"]
        count = self._processes.num_processes
        fitted = self._fit(members, count)
        if fitted is None:
            self._send_end(CANNOT_RUN)
            return
        arguments, participants = fitted
        remove_copies(self._memory, but=message["job"])
        membership = Membership(
            folder=str(self._memory),
            job=message["job"],
            copy_every=self._options.copy_every,
            round=message["round"],
            participants=participants,
        )
        arguments = ["--noelastic", *arguments]
        environment = {MEMBERSHIP: membership.to_json()}
        if count > 1:
            arguments.append("--multihost")
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"{message['address']}:{message['port']}",
                "JAX_NUM_PROCESSES": str(len(members)),
                "JAX_PROCESS_ID": str(members.index(self._processes.process_id)),
            }
        self._end_training()
        self._training = TrainingProcess([*self._arguments, *arguments], environment)

    def _end_training(self) -> None:
        if self._training is not None:
            self._training.close()
            self._training = None

    def _send_end(self, status: int) -> None:
        assert self._lines is not None
        self._lines.send(
            ended=status,
            generation=self._generation,
            round=latest_round(self._saved_in) or 0,
            copies=list_copies(self._memory),
        )

    def close(self) -> None:
        """End the training process, remove the copies, and close the connection."""
        self._end_training()
        remove_copies(self._memory)
        if self._lines is not None:
            self._lines.connection.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class TrainingProcess:
    """The training process of a supervisor: `fedpax train` with these arguments and variables."""

    # Its input is a pipe, which closes when the supervisor ends, also by SIGKILL, and ends the
    # training process (`end_with_supervisor`).

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedpax", "train", *arguments],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            start_new_session=True,  # the supervisor alone receives Ctrl-C
        )

    def poll(self) -> int | None:
        """Return the exit status if the process has ended; 128 + signal if a signal ended it."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def end_with_supervisor() -> None:
    """Kill this training process when its supervisor ends, so that it never trains unsupervised."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="supervisor", daemon=True).start()
