"""`fedpax train --elastic`: supervise a training process, and restart it when processes change.

The supervisor uses no device. It starts a training process, `fedpax train --multihost`, when the
keeper requests it (`fedpax.parallel.keeper`), reports the exit status of that process, and ends it
when the set of training processes changes. The supervisor of process 0 runs the keeper.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fedpax.commands import UsageError
from fedpax.commands.fitting_mesh import fit_mesh
from fedpax.parallel.cluster import Cluster, ClusterError, find_cluster
from fedpax.parallel.keeper import CANNOT_RUN, Keeper, Lines
from fedpax.training.console import print_error
from fedpax.training.experiment import Experiment
from fedpax.training.preemption import PreemptionGuard
from fedpax.training.saved_rounds import latest_round

KEEPER_IS_GONE = 75  # EX_TEMPFAIL of sysexits.h: the same command can succeed later


def train_elastically(
    options: flags.FlagValues, arguments: Sequence[str], experiment: Experiment, folder: Path
) -> int:
    """Supervise a training process on this host until the job ends.

    Args:
        options: the command's flags.
        arguments: the arguments after `train`.
        experiment: the experiment, configured for all processes.
        folder: the run's folder.

    Returns:
        The exit status.

    Raises:
        UsageError: the variables of the launcher are wrong, the keeper's port is in use, or no
            keeper answers within `--join_timeout`.
    """
    try:
        cluster = find_cluster() or Cluster(f"localhost:{_free_port()}", 1, 0, "no variables")
        keeper = None
        if cluster.process_id == 0:
            keeper = Keeper(
                cluster,
                join_timeout=options.join_timeout,
                heartbeat_timeout=options.heartbeat_timeout,
                tell=lambda line: print_error(f"fedpax: elastic: {line}."),
            )
    except ClusterError as error:
        raise UsageError(f"--elastic: {error}") from None
    with PreemptionGuard() as preemption:
        supervisor = Supervisor(options, arguments, experiment, folder, cluster)
        with contextlib.closing(supervisor):
            status = supervisor.run(preemption)
    if keeper is not None:
        keeper.join()
    return status


class Supervisor:
    """The supervisor of one training process.

    Args:
        options: the command's flags.
        arguments: the arguments after `train`.
        experiment: the experiment, configured for all processes.
        folder: the run's folder.
        cluster: the processes of the job; process 0 runs the keeper.

    Raises:
        UsageError: no keeper answers within `--join_timeout`.
    """

    def __init__(
        self,
        options: flags.FlagValues,
        arguments: Sequence[str],
        experiment: Experiment,
        folder: Path,
        cluster: Cluster,
    ) -> None:
        self._options, self._arguments = options, arguments
        self._experiment, self._folder, self._cluster = experiment, folder, cluster
        self._child: subprocess.Popen[bytes] | None = None
        self._generation = 0
        self._lines = self._connect()

    def _connect(self) -> Lines:
        timeout = self._options.join_timeout
        deadline = time.monotonic() + timeout
        reason = ""
        while time.monotonic() < deadline:
            try:
                address = (self._cluster.host, self._cluster.port)
                lines = Lines(socket.create_connection(address, timeout=5))
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(0.2)
                continue
            lines.send(
                process=self._cluster.process_id,
                count=self._cluster.num_processes,
                host=socket.gethostname(),
            )
            return lines
        raise UsageError(
            f"--elastic: process {self._cluster.process_id} found no keeper at "
            f"{self._cluster.coordinator} within {timeout:g} s ({reason}), expected process 0 to "
            "listen there. Read its log; if it starts later, raise --join_timeout."
        )

    def run(self, preemption: PreemptionGuard) -> int:
        """Follow the keeper until the job ends.

        Args:
            preemption: has the signal to stop that this process received.

        Returns:
            The exit status.
        """
        signaled = False
        last_beat = 0.0
        while True:
            readable, _, _ = select.select([self._lines.connection], [], [], 0.1)
            for message in self._lines.receive() if readable else ():
                if "stop" in message:
                    if message["reason"]:
                        print_error(f"fedpax: elastic: {message['reason']}.")
                    return int(message["stop"])
                self._follow(message)
            if self._child is not None and self._child.poll() is not None:
                self._report()
            if preemption.signal is not None and not signaled:
                signaled = True
                self._lines.send(signal=128 + preemption.signal)
                self._signal(signal.SIGTERM)
            if time.monotonic() - last_beat > 1:
                last_beat = time.monotonic()
                self._lines.send(beat=True)
            silent = time.monotonic() - self._lines.heard > self._options.heartbeat_timeout
            if self._lines.closed or silent:
                kept = latest_round(self._folder)
                print_error(
                    f"fedpax: elastic: the keeper, process 0 at {self._cluster.coordinator}, is "
                    f"{'silent' if silent else 'gone'}. Start all processes again: the run resumes "
                    f"{f'from round {kept}' if kept else 'from its beginning'}."
                )
                return KEEPER_IS_GONE

    def _follow(self, message: dict) -> None:
        if "start" in message:
            self._start(message["start"], message["members"], message["port"])
        elif message.get("kill") == self._generation:
            self._signal(signal.SIGKILL)
        elif message.get("save") == self._generation:
            self._signal(signal.SIGTERM)

    def _start(self, generation: int, members: list[int], port: int) -> None:
        self._generation = generation
        count = self._cluster.num_processes
        settings = fit_mesh(self._experiment, len(members), count)
        if settings is None:
            self._send_end(CANNOT_RUN)
            return
        allowed = ",".join(
            ["mesh", "islands"] if hasattr(self._experiment, "islands") else ["mesh"]
        )
        command = [sys.executable, "-m", "fedpax", "train", *self._arguments, *settings]
        command += ["--noelastic", f"--allow_config_change={allowed}"]
        environment = dict(os.environ)
        if count > 1:
            command.append("--multihost")
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"{self._cluster.coordinator.rpartition(':')[0]}:{port}",
                "JAX_NUM_PROCESSES": str(len(members)),
                "JAX_PROCESS_ID": str(members.index(self._cluster.process_id)),
            }
        # In a session of its own: the supervisor alone receives Ctrl-C.
        self._child = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=_end_with_parent
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(number)

    def _report(self) -> None:
        assert self._child is not None
        status = self._child.wait()
        self._child = None
        self._send_end(status if status >= 0 else 128 - status)

    def _send_end(self, status: int) -> None:
        self._lines.send(
            ended=status, generation=self._generation, round=latest_round(self._folder) or 0
        )

    def close(self) -> None:
        """End the training process, if there is one, and the connection."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
        self._lines.connection.close()


def _end_with_parent() -> None:
    """Make Linux kill this process when its parent ends, so that it never trains unsupervised."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
