"""The clients and the sites that take part in a sum, and the sums that were opened."""

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpax.console import count_of
from fedpax.files import read_file
from fedpax.secure_sums.arithmetic import SecureSumError
from fedpax.sites.coordinator_program import CoordinatorProgram
from fedpax.sites.site_files import write_federation
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import ROUND, Task

OPENED = "opened_sums.jsonl"
"""The file of opened secure sums in the folder of a site."""


class Participants(NamedTuple):
    """The clients that take part in a stage, by site: their numbers, and places in the program."""

    clients: Mapping[str, Sequence[int]]
    slots: Mapping[str, Sequence[int]]
    firsts: Mapping[str, int]
    total: int

    @property
    def cohort_size(self) -> int:
        """The number of clients."""
        return sum(map(len, self.clients.values()))

    def of(self, sites: Mapping[str, Any]) -> "Participants":
        """Return the participants of some sites."""
        return Participants(
            {name: x for name, x in self.clients.items() if name in sites},
            {name: x for name, x in self.slots.items() if name in sites},
            {name: x for name, x in self.firsts.items() if name in sites},
            self.total,
        )


def choose_participants(
    program: CoordinatorProgram, number: int, ranges: Mapping[str, range], total: int
) -> Participants:
    """Choose the clients of a round among the clients of connected sites."""
    present = np.zeros(total, np.bool_)
    for places in ranges.values():
        present[places.start : places.stop] = True
    sampled = [int(client) for client in program.run.sample(number - 1, present)]
    slots = {client: slot for slot, client in enumerate(sampled)}
    clients = {name: [k for k in places if k in slots] for name, places in ranges.items()}
    clients = {name: chosen for name, chosen in clients.items() if chosen}
    return Participants(
        clients,
        {name: [slots[k] for k in chosen] for name, chosen in clients.items()},
        {name: places.start for name, places in ranges.items()},
        total,
    )


class OpenedSums:
    """The secure sums of a run that a site has helped to open, each with its sites and clients.

    The difference of two sums of the same values over different sites is the part of one site.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._known = path, dict[str, Any]()
        if path is not None and path.exists():
            for line in read_file(path, 1 << 30).decode().splitlines():
                with contextlib.suppress(ValueError):  # a kill can leave half of a line
                    name, of = json.loads(line)
                    self._known[name] = of

    def get(self, name: str) -> Any:
        """Return who took part in a sum; None if it was not opened."""
        return self._known.get(name)

    def add(self, name: str, of: Any) -> None:
        """Keep who takes part in a sum, before it is opened."""
        if self._known.get(name) == of:
            return
        self._known[name] = of
        if self._path is not None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            with open(os.open(self._path, flags, 0o600), "ab") as file:
                file.write(f"\n{json.dumps([name, of])}\n".encode())
                file.flush()
                os.fsync(file.fileno())


def opened_round(exchange: TaskExchange, number: int) -> Participants | None:
    """Return who takes part in a round again, if the coordinator has had a sum of it opened."""
    known, who = exchange.opened.get(ROUND, (None, {}))
    return Participants(**who) if known == number else None


def note_opened(
    exchange: TaskExchange,
    folder: Path,
    task: Task,
    who: Participants | None,
    present: Collection[str],
) -> None:
    """Keep who is in a sum before it is opened; raise if a sum of other sites was opened."""
    if who is None:  # a sum of metrics, which is not repeated
        return
    is_round, stage = task.header["task"] == ROUND, task.header["stage"]
    expected = {*who.clients} if stage or not is_round else {*present}
    if is_round and (again := opened_round(exchange, exchange.round)) is not None:
        expected = {*again.clients}
    if left := expected.symmetric_difference(present):
        raise SecureSumError(
            f"{', '.join(sorted(left)[:5])} left between sums of the same sites: the difference "
            "would show their part"
        )
    if not stage:
        of = who.of(dict.fromkeys(present))._asdict()
        exchange.opened[task.header["task"]] = [exchange.round, of] if is_round else [*present]
        write_federation(folder, exchange, exchange.inputs)


def describe_wait(missing: Sequence[str], number: int, remedies: Sequence[str]) -> str:
    """Say for which of the sites of an opened sum a coordinator waits, why, and what to do."""
    return (
        f"waiting for {', '.join(missing[:5])}: a sum of {count_of(number, 'site')} was opened, "
        "and one without these would show their part. "
        f"{''.join(f'{remedy}. ' for remedy in remedies[:5])}If they do not return, see "
        "site_trust.md, sums that are repeated"
    )
