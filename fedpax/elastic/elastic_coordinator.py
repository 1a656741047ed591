"""The coordinator of an elastic job (`--keeper`): decides which processes train together.

A **generation** is a run of the supervisors' training processes, until one ends, or a supervisor
leaves or joins.
"""

import contextlib
import ipaddress
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from fedpax.processes.job_processes import JobProcesses, JobProcessesError, listen
from fedpax.processes.json_line_socket import MOST_STRANGERS, JsonLineSocket, printable

# A message is one line of JSON. A supervisor sends to the keeper:
#   process, count, host, round, copies: the supervisor joins; `round` is the newest checkpoint, and
#     `copies` are names JOB-ROUND of copies in its host's memory
#   beat: the supervisor runs
#   ended, generation, round, copies: its training process ended with the status `ended`
#   signal: the supervisor received a signal to stop; the status of the job
# The keeper sends to a supervisor:
#   start, members, address, port, job, round: start a training process for this generation of
#     members; it reads the copies of `round`, unless that is null
#   save, kill: make the training process of this generation save and end, or end it at once
#   stop, reason: the job ends with the status `stop`
#   beat: the keeper runs

FINISHED, FAILED, CANNOT_RUN = 0, 1, 2
SIGNALS = (143, 130)
LOST = -1
"""The status of a training process whose host is lost."""
SIGNALED = 128
"""Statuses above it are from signals."""
MOST_FAILURES = 3
SECONDS_TO_END = 30.0
SECONDS_TO_GREET = 5.0
TICK = 0.1


class ElasticCoordinator:
    """The keeper, which runs in a thread until the job has an exit status."""

    # The first generation starts after `join_timeout` seconds without missing supervisors.
    # Processes of a `group`, such as an island's, only train together. `alone`: no process of the
    # job is on the keeper's host.

    def __init__(
        self,
        processes: JobProcesses,
        *,
        join_timeout: float,
        heartbeat_timeout: float,
        group: int = 1,
        alone: bool = False,
        tell: Callable[[str], None],
    ) -> None:
        self._processes, self._tell, self._alone = processes, tell, alone
        self.status: int | None = None
        self._heartbeat_timeout, self._group = heartbeat_timeout, group
        self._job = secrets.token_hex(8)
        self._copies: dict[int, set[int]] = {}  # rounds in the memory of each process's host
        self._checkpoint = 0
        self._resumed: int | None = None  # the copies that were used last
        self._start_by = time.monotonic() + join_timeout
        self._strangers: dict[JsonLineSocket, str] = {}  # with their addresses, the oldest first
        self._members: dict[int, JsonLineSocket] = {}
        self._addresses: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._generation = 0
        self._trained: list[int] = []  # the members of the generation
        self._ended: dict[int, int] = {}  # the statuses of those whose process has ended
        self._cause: int | None = None  # the first status of a failure
        self._order: str | None = None
        self._ended_since: float | None = None
        self._failures = 0
        self._round = -1
        self._most = processes.num_processes
        self._signal: int | None = None
        self._asked_to_stop = False  # by `signal`: no supervisor has made its process save
        self._stopped = False
        self._server = listen(processes)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the job has ended, at most `timeout` seconds."""
        self._thread.join(timeout)

    def signal(self, status: int) -> None:
        """Make all processes save and end; `status`, 143 or 130, is the exit status of the job."""
        self._signal, self._asked_to_stop = status, True

    def _run(self) -> None:
        last_beat = 0.0
        while not self._stopped:
            for key, _ in self._selector.select(TICK):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() - last_beat > 1:
                last_beat = time.monotonic()
                for member in self._members.values():
                    member.send(beat=True)
            self._forget_lost()
            self._decide()
        time.sleep(0.2)  # the last messages are on their way
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all are sockets

    def _accept(self) -> None:
        full = len(self._strangers) >= MOST_STRANGERS
        try:
            connection, (address, *_) = self._server.accept()
        except BlockingIOError:  # it is gone
            return
        except OSError:  # too many files are open
            full = True
            time.sleep(TICK)
        else:
            lines = JsonLineSocket(connection)
            self._selector.register(connection, selectors.EVENT_READ, lines)
            self._strangers[lines] = address.removeprefix("::ffff:")
        if full and self._strangers:
            next(iter(self._strangers)).closed = True

    def _read(self, lines: JsonLineSocket) -> None:
        for message in lines.receive():
            if lines in self._strangers:
                self._admit(lines, message)
            elif message.get("signal") in SIGNALS:
                self._signal = message["signal"]
            elif "ended" in message and message.get("generation") == self._generation:
                number = next(i for i, member in self._members.items() if member is lines)
                status = message["ended"]
                self._note_end(number, status if type(status) is int else FAILED)
                self._note_progress(number, message)

    def _admit(self, lines: JsonLineSocket, message: dict[str, Any]) -> None:
        number, count = message.get("process"), message.get("count")
        refusal = None
        if count != self._processes.num_processes:
            refusal = (
                f"it was started with {printable(count)} processes, process 0 with "
                f"{self._processes.num_processes}. Set the same number in every process"
            )
        elif type(number) is not int or not 0 <= number < self._processes.num_processes:
            refusal = (
                f"its number is {printable(number)}, expected 0 to "
                f"{self._processes.num_processes - 1}. Number the processes from 0"
            )
        elif number in self._members:
            refusal = (
                f"number {number} belongs to a process on {self._hosts[number]}, expected one "
                "supervisor per number. End the other one"
            )
        if refusal is not None or number is None:
            lines.send(stop=CANNOT_RUN, reason=refusal)
            lines.closed = True
        else:
            self._members[number], self._addresses[number] = lines, self._strangers.pop(lines)
            self._hosts[number] = printable(message.get("host"))
            self._note_progress(number, message)
            self._most = self._processes.num_processes  # a new device may make a mesh fit again
            if self._generation:
                self._tell(f"process {number} on {self._hosts[number]} has joined")

    def _forget_lost(self) -> None:
        """Remove supervisors whose connection is closed, or that are silent."""
        now = time.monotonic()
        for lines in [*self._strangers, *self._members.values()]:
            silent = now - lines.heard > self._heartbeat_timeout
            silent |= lines in self._strangers and now - lines.began > SECONDS_TO_GREET
            if not lines.closed and not silent:
                continue
            self._selector.unregister(lines.connection)
            lines.connection.close()
            if lines in self._strangers:
                del self._strangers[lines]
                continue
            number = next(i for i, member in self._members.items() if member is lines)
            del self._members[number], self._copies[number]
            why = "is silent" if silent else "is gone"
            self._tell(f"process {number} on {self._hosts[number]} {why}")
            if number in self._running():
                self._note_end(number, LOST)
                self._kill()

    def _note_end(self, number: int, status: int) -> None:
        self._ended[number] = status
        if self._cause is None and self._order != "kill" and status not in (0, *SIGNALS):
            self._cause = status

    def _running(self) -> list[int]:
        """Return the members of the generation whose training process has not ended."""
        return [number for number in self._trained if number not in self._ended]

    def _decide(self) -> None:
        """Begin or end a generation if it is due."""
        if not self._running():
            if self._signal is not None:
                self._stop(self._signal, "")
            elif self._trained:
                self._conclude()
            else:
                self._begin_first()
            return
        if any(status not in (0, *SIGNALS) for status in self._ended.values()):
            self._kill()
        elif self._ended and self._order != "kill":
            # The others follow at once, unless one was stopped before it could tell them.
            self._ended_since = self._ended_since or time.monotonic()
            finished = all(status == 0 for status in self._ended.values())
            if not finished and time.monotonic() - self._ended_since > SECONDS_TO_END:
                self._kill()
        elif self._order is None and (
            self._asked_to_stop if self._signal is not None else self._joining()
        ):
            self._order = "save"
            self._members[self._running()[0]].send(save=self._generation)

    def _joining(self) -> bool:
        """Return whether members are connected that could train, but do not."""
        return len(self._choose(self._members)) > len(self._trained)

    def _choose(self, numbers: Collection[int]) -> list[int]:
        """Return the processes that train if these are there: whole groups if there are any."""
        groups: dict[int, list[int]] = {}
        for number in sorted(numbers):
            groups.setdefault(number // self._group, []).append(number)
        whole = [number for each in groups.values() if len(each) == self._group for number in each]
        return (whole or sorted(numbers))[: self._most]

    def _kill(self) -> None:
        if self._order != "kill":
            self._order = "kill"
            for number in self._running():
                self._members[number].send(kill=self._generation)

    def _begin_first(self) -> None:
        complete = len(self._members) == self._processes.num_processes
        late = time.monotonic() > self._start_by
        if complete or (late and (0 in self._members or (self._alone and self._members))):
            self._begin(self._choose(self._members), None)

    def _begin_again(self) -> None:
        round_number = None if self._order == "save" else self._newest_copy()
        candidates: Collection[int] = self._members
        if round_number is not None:
            self._resumed = round_number
            # Members without this copy join when the generation has saved.
            candidates = [i for i in self._members if round_number in self._copies[i]]
        self._begin(self._choose(candidates), round_number)

    def _newest_copy(self) -> int | None:
        """Return the newest round of which all remaining members have a copy, if it helps."""
        left = [number for number in self._trained if self._ended[number] != LOST]
        held = [self._copies[number] for number in left if number in self._members]
        newest = max(set.intersection(*held), default=0) if held else 0
        by_itself = self._cause is not None and 0 < self._cause < SIGNALED
        tried = newest == self._resumed and by_itself
        return newest if newest > self._checkpoint and not tried else None

    def _begin(self, members: list[int], round_number: int | None) -> None:
        self._generation += 1
        self._trained = members
        self._ended, self._cause, self._order, self._ended_since = {}, None, None, None
        if self._generation > 1 or len(self._trained) < self._processes.num_processes:
            source = "" if round_number is None else f" from the copies of round {round_number}"
            count = f"{len(self._trained)} of {self._processes.num_processes} processes"
            self._tell(f"start {self._generation}: {count} train{source}")
        first = self._trained[0]
        # JAX's coordinator is in the training process of the first member.
        address = self._addresses[first]
        if (first == 0 and not self._alone) or ipaddress.ip_address(address).is_loopback:
            address = self._processes.coordinator.rpartition(":")[0]  # on the keeper's host
        elif ":" in address:
            address = f"[{address}]"
        port = self._free_port()
        for number in self._trained:
            self._members[number].send(
                start=self._generation,
                members=self._trained,
                address=address,
                port=port,
                job=self._job,
                round=round_number,
            )

    def _free_port(self) -> int:
        """Return a port for the coordinator of the training processes, free on this host."""
        for port in range(self._processes.port - 1, max(self._processes.port - 100, 1024), -1):
            with contextlib.suppress(JobProcessesError), listen(self._processes, port):
                return port
        return self._processes.port - 1

    def _conclude(self) -> None:
        """Begin the next generation after the end of one, or stop the job."""
        statuses = [self._ended[number] for number in self._trained]
        full = len(self._trained) == self._processes.num_processes
        if all(status == 0 for status in statuses):
            self._stop(FINISHED, "")
        elif self._order is None and any(status in SIGNALS for status in statuses):
            self._stop(max(status for status in statuses if status in SIGNALS), "")
        elif self._cause == CANNOT_RUN:  # and not the consequence of another process's end
            # The configuration is wrong, or does not fit this number of processes.
            if full or len(self._trained) == 1:
                self._stop(CANNOT_RUN, "the training processes cannot run; see the message above")
                return
            self._most = len(self._trained) - 1
            self._tell(f"the mesh does not fit {len(self._trained)} processes")
            self._begin_again()
        elif self._order != "save" and self._count_failure() >= MOST_FAILURES:
            self._stop(
                FAILED,
                f"the training processes ended {MOST_FAILURES} times without a new round. Correct "
                "the cause, which their messages above name. With --copy_every=0, lower "
                "--training.checkpoint_every if they only had too little time",
            )
        elif self._members:
            self._begin_again()
        else:
            self._trained = []

    def _note_progress(self, number: int, message: dict[str, Any]) -> None:
        """Note the newest checkpoint, and the copies in the memory of a process's host."""
        names = message.get("copies")
        names = [str(name) for name in names] if isinstance(names, list) else []
        pairs = [name.rpartition("-") for name in names if len(name) < 100]
        rounds = {int(text) for job, _, text in pairs if job == self._job and text.isdecimal()}
        self._copies[number] = rounds
        saved = message.get("round")
        if type(saved) is int:
            self._checkpoint = max(self._checkpoint, saved)
        newest = max(self._checkpoint, *rounds, 0)
        if newest > self._round:
            self._round, self._failures = newest, 0

    def _count_failure(self) -> int:
        # A host that is lost is not a failure of the program.
        self._failures += LOST not in self._ended.values()
        return self._failures

    def _stop(self, status: int, reason: str) -> None:
        for member in self._members.values():
            member.send(stop=status, reason=reason)
        self.status = status
        self._stopped = True
