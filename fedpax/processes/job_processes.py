"""The roll call: find the missing process of a job, before JAX connects them.

JAX aborts without naming it. So process 0 first listens on the coordinator's port itself.
"""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedpax.processes.json_line_socket import greetings, listen_on, printable, read_line

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


class JobProcessesError(Exception):
    """The processes do not form a job; the message names the remedy."""


class JobProcesses(NamedTuple):
    """The processes of a job, as one of them sees it."""

    coordinator: str  # `HOST:PORT`; process 0 listens there
    num_processes: int
    process_id: int  # this process's number, from 0
    source: str  # the names of the variables that were read, for messages

    @property
    def host(self) -> str:
        """The host of process 0."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port on which process 0 listens."""
        return int(self.coordinator.rpartition(":")[2])


def find_job_processes(environment: Mapping[str, str] | None = None) -> JobProcesses | None:
    """Read the job from variables, by default the environment's; None: JAX may find it itself."""
    # A Slurm step's coordinator is its first host.
    environment = os.environ if environment is None else environment
    read = {name: environment.get(name, "") for name in EXPLICIT}
    explicit = [name for name, value in read.items() if value]
    slurm = all(environment.get(name) for name in SLURM)
    if slurm:
        job = int(environment["SLURM_JOB_ID"])
        # As in jax.distributed.
        port = environment.get("JAX_COORDINATOR_PORT") or str(job % 4096 + 61440)
        # node7 or node[007-012,20] or node7,other3
        first = re.match(r"([^,\[]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])
        host = "".join(group or "" for group in first.groups()) if first else "localhost"
        from_slurm = (f"{host}:{port}", environment["SLURM_NTASKS"], environment["SLURM_PROCID"])
        read = {name: read[name] or other for name, other in zip(EXPLICIT, from_slurm, strict=True)}
    elif not explicit:
        return None
    if missing := [name for name, value in read.items() if not value]:
        raise JobProcessesError(
            f"{' and '.join(explicit)} {'is' if len(explicit) == 1 else 'are'} set, but not "
            f"{' and '.join(missing)}, expected all three. Set JAX_COORDINATOR_ADDRESS=HOST:PORT "
            "(of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0) in every process."
        )
    address, count, process = read.values()
    if not re.fullmatch(r"[^:\s]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address):
        raise JobProcessesError(
            f"JAX_COORDINATOR_ADDRESS={address} is not an address, expected HOST:PORT such as "
            "10.0.0.1:8476 or [fd00::1]:8476. Name the host of process 0 and a free port there."
        )
    if not (count.isdecimal() and process.isdecimal() and int(process) < int(count)):
        raise JobProcessesError(
            f"JAX_PROCESS_ID={process} and JAX_NUM_PROCESSES={count}: expected integers with "
            "0 <= JAX_PROCESS_ID < JAX_NUM_PROCESSES. Number the processes from 0, each with its "
            "own number and all with the same count."
        )
    source = "SLURM_*" if slurm and not explicit else ", ".join(explicit)
    return JobProcesses(address, int(count), int(process), source)


# One line of JSON: bytes of another program are recognized.
GREETING = "fedpax roll call 1"
SECONDS_TO_TALK = 2.0


def call_roll(processes: JobProcesses, timeout: float) -> None:
    """Wait until all processes have connected, or raise a `JobProcessesError`."""
    deadline = time.monotonic() + timeout
    if processes.process_id == 0:
        if processes.num_processes > 1:
            _answer_all(processes, deadline, timeout)
    else:
        _report(processes, deadline, timeout)


def _answer_all(processes: JobProcesses, deadline: float, timeout: float) -> None:
    """Listen until each process has connected, then answer all of them."""
    hosts = {0: socket.gethostname()}
    turned_away: list[str] = []
    with contextlib.ExitStack() as connections:
        server = connections.enter_context(listen(processes))
        waiting: dict[int, socket.socket] = {}
        arriving = greetings(server, deadline, SECONDS_TO_TALK)
        with contextlib.closing(arriving):
            for connection, greeting in arriving:
                connections.enter_context(connection)
                connection.settimeout(SECONDS_TO_TALK)
                number, count = greeting.get("process"), greeting.get("count")
                host = printable(greeting.get("host"))
                if greeting.get("greeting") != GREETING or type(number) is not int:
                    connection.close()  # a port scanner, or a process of something else
                    continue
                if number in waiting and _is_closed(waiting[number]):
                    del hosts[number]  # it ended while it waited, and was started again
                if refusal := _refusal(processes, hosts, number, count):
                    turned_away.append(f"process {printable(number)} on {host}: {refusal}")
                    _send(connection, {"error": refusal})
                    continue
                hosts[number], waiting[number] = host, connection
                if len(hosts) == processes.num_processes:
                    break
        if len(hosts) < processes.num_processes:
            message = _missing(processes, hosts, turned_away, timeout)
            for process in waiting.values():
                _send(process, {"error": message})
            raise JobProcessesError(message)
        server.close()  # from here on, a connection to the port is one to JAX's coordinator
        for process in waiting.values():
            _send(process, {"error": None})
        # The other side closes first: then this host's port is free at once.
        for process in waiting.values():
            with contextlib.suppress(OSError):
                process.recv(1)


def wait_for_coordinator(processes: JobProcesses, timeout: float) -> None:
    """Wait after the roll call, at most `timeout` seconds, until JAX's coordinator listens."""
    # If its first attempt to connect fails, JAX waits for one second before the next one.
    deadline = time.monotonic() + timeout
    while processes.process_id and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((processes.host, processes.port), timeout=5).close()
            return
        time.sleep(0.01)


def listen(processes: JobProcesses, port: int | None = None) -> socket.socket:
    """Listen on all addresses of this host, by default on the coordinator's port."""
    port = processes.port if port is None else port
    try:
        return listen_on(port, processes.num_processes)
    except OSError as error:
        raise JobProcessesError(
            f"process 0 cannot listen on port {port} of {socket.gethostname()} "
            f"({error.strerror}), expected a free port. Another job or program may use it: choose "
            "another port in JAX_COORDINATOR_ADDRESS (with Slurm also JAX_COORDINATOR_PORT), the "
            "same in every process."
        ) from None


def _refusal(processes: JobProcesses, hosts: dict[int, str], number: int, count: Any) -> str | None:
    """Return why a process does not belong to the job, or None if it does."""
    if count != processes.num_processes:
        return (
            f"it was started with {printable(count)} processes, process 0 with "
            f"{processes.num_processes}, expected the same number in every process. Set the same "
            "JAX_NUM_PROCESSES (Slurm: --ntasks) everywhere."
        )
    if not 0 <= number < processes.num_processes:
        return (
            f"its number is {printable(number)}, expected 0 to {processes.num_processes - 1}. "
            "Number the processes from 0 in JAX_PROCESS_ID."
        )
    if number in hosts:
        return (
            f"its number {number} belongs to a process on {hosts[number]}, expected one process "
            "per number. Give every process its own JAX_PROCESS_ID, and end the processes of a "
            "former job."
        )
    return None


def _missing(
    processes: JobProcesses, hosts: dict[int, str], turned_away: list[str], timeout: float
) -> str:
    absent = [str(i) for i in range(processes.num_processes) if i not in hosts]
    listed = ", ".join(absent[:20]) + (" and others" if len(absent) > 20 else "")
    present = ", ".join(f"{i} on {host}" for i, host in sorted(hosts.items())[:20])
    strangers = f" Turned away: {'; '.join(turned_away[:5])}" if turned_away else ""
    return (
        f"{len(absent)} of {processes.num_processes} processes did not come within {timeout:g} s: "
        f"{listed}. Present: {present}.{strangers} Read the logs of the missing processes; they "
        f"must reach {processes.coordinator}. If they start later, raise --join_timeout; if there "
        f"are fewer, lower their number ({processes.source})."
    )


def _report(processes: JobProcesses, deadline: float, timeout: float) -> None:
    greeting = {
        "greeting": GREETING,
        "process": processes.process_id,
        "count": processes.num_processes,
        "host": socket.gethostname(),
    }
    reason = "no attempt"
    while (left := deadline - time.monotonic()) > 0:
        try:
            # Short attempts: a host that starts later does not answer the first packets.
            attempt = socket.create_connection((processes.host, processes.port), min(left, 10))
            with attempt as connection:
                _send(connection, greeting)
                # Process 0 ends its wait after the same time, and must be able to say so.
                answer = read_line(connection, left + 5)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if answer.get("error", "") is None:
                return
            if answer.get("error"):
                raise JobProcessesError(f"process {processes.process_id}: {answer['error']}")
            reason = "another program listens there, or process 0 has ended"
        time.sleep(min(0.05, max(deadline - time.monotonic(), 0)))
    raise JobProcessesError(
        f"process {processes.process_id} found no process 0 at {processes.coordinator} within "
        f"{timeout:g} s ({reason}), expected it to listen there. Read the log of process 0; check "
        f"that the address ({processes.source}) is its host's, and that no firewall closes the "
        "port. If process 0 starts later, raise --join_timeout."
    )


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection on which it sends nothing more."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(SECONDS_TO_TALK)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
