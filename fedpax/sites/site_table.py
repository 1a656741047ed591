"""The sites of a coordinator: who they are, which clients are theirs, and what became of them."""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpax.console import count_of, format_bytes, format_value, markdown_table
from fedpax.sites.report_tables import format_ago, read_reports
from fedpax.sites.site_experiment import ClientRange, Json
from fedpax.sites.tasks import EVALUATION, ROUND, Task

MOST_MISSED = 3
"""Default number of missed deadlines after which a site is not waited for."""

LATE = "it did not answer in time"
"""The fault of a site that misses the deadline of a task."""


class Attendance:
    """The deadlines that a site has missed, by the kind of the task."""

    # A round with the site takes 1 back. A late answer is in time if the task ended early.

    def __init__(self) -> None:
        self.missed: Counter[str] = Counter()
        # Token and stage -> kind and deadline, of tasks that have ended before their deadlines.
        self._owed: dict[tuple[str, int], tuple[str, float]] = {}

    def miss(self, task: Task, now: float, *, deadline: float, most: int) -> None:
        """Note that a task has ended without this site's answer; at most `most` misses count."""
        if now >= deadline:
            self.missed[task.kind] = min(self.missed[task.kind] + 1, most)
            return
        self._owed = {place: owed for place, owed in self._owed.items() if now <= owed[1]}
        self._owed[task.token, task.header["stage"]] = task.kind, deadline

    def take_part(self, kind: str) -> None:
        """Note that this site was part of a round or an evaluation."""
        self.missed[kind] = max(0, self.missed[kind] - 1)

    def answer_late(self, token: str, stage: int, now: float) -> None:
        """Note an answer to a task that has ended."""
        kind, deadline = self._owed.pop((token, stage), ("", -math.inf))
        if now <= deadline:
            self.take_part(kind)


SITES = "sites.json"
"""The table of sites in the coordinator's folder, for `fedpax show`."""

CLIENTS_PER_SITE = 10_000
"""Default number of clients that a site may have at most."""

_COUNTS = ("rounds", "late", "dropped", "sent_bytes", "received_bytes")
_SAVED = (
    *("name", "first", "count", "renumbered", "counted", "heldout", "releases", "epsilon"),
    *("weight", *_COUNTS),
)


class SiteRecord:
    """A site that has joined a run."""

    def __init__(self, name: str, first: int, count: int) -> None:
        self.name, self.first, self.count = name, first, count
        self.renumbered = 0  # times that it has joined with another number of clients
        self.description: Json = {}
        self.types: Json = {}
        self.incarnation = ""  # of its process
        self.counted: str | None = None  # token of the last round that counted its terms
        self.ready = False  # whether it knows the inputs of all sites
        self.left = self.failed = self.heard_end = False  # failed: it left with an error
        self.is_refused = False  # its last process
        self.has_rival = False  # whether another process of its name was told to wait
        self.attendance = Attendance()
        self.seen = -math.inf
        self.rounds = self.late = self.dropped = 0
        self.releases = 0  # sums of rounds, and of questions before, that have its terms
        self.epsilon: float | None = None
        self.sent_bytes = self.received_bytes = 0  # of arrays, to and from the site
        self.heldout: dict[str, float] = {}
        self.weight: float | None = None  # that it claimed in the last round that asked for one

    def to_json(self) -> dict[str, Any]:
        """Return what outlives the coordinator's process."""
        return {name: getattr(self, name) for name in _SAVED}


class SiteReport(NamedTuple):
    """A line of the table of sites."""

    name: str
    # "joining", "training", "overdue" (it is heard and does not answer), "silent", "left",
    # "failed" (it left with an error), "finished" or "expelled"
    state: str
    clients: int
    rounds: int  # rounds that counted its terms
    late: int  # rounds that did not wait for it
    dropped: int  # replies that were refused
    sent_bytes: int  # bytes of the arrays that the site received
    received_bytes: int
    epsilon: float | None  # of its clients' privacy, if the method is private
    heldout: Mapping[str, float]  # metrics of its held-out examples
    seconds_since_message: float | None  # None: no message since the coordinator began
    share: float | None = None  # of the weight of the last round, if the coordinator sees it

    @property
    def subject(self) -> str:
        """The site, in a line on its state."""
        return f"site {self.name} ({count_of(self.clients, 'client')})"


class SiteTable:
    """The sites by name; each has a range of numbers for its clients."""

    def __init__(
        self,
        silent_after: float,
        is_expelled: Callable[[str], bool] = lambda name: False,
        most_missed: int = MOST_MISSED,
    ) -> None:
        self._most_missed = most_missed
        self._is_expelled = is_expelled
        self._sites: dict[str, SiteRecord] = {}
        self._silent_after = silent_after
        self.num_clients = 0  # of all sites, also of those that left

    def __iter__(self) -> Iterator[SiteRecord]:
        sites = self._sites
        return iter([sites[name] for name in sorted(sites)])

    def get(self, name: str) -> SiteRecord | None:
        """Return a site, or None if there is none of this name."""
        return self._sites.get(name)

    def add(self, name: str, count: int) -> SiteRecord:
        """Return the site of a name; one with another number of clients gets new numbers."""
        site = self._sites.setdefault(name, SiteRecord(name, self.num_clients, 0))
        if site.count != count:
            site.renumbered += site.count > 0
            site.first, site.count = self.num_clients, count
            self.num_clients += count
        return site

    def forget(self, name: str) -> SiteRecord | None:
        """Forget a site that was never ready and has the last numbers; return one that stays."""
        site = self._sites.get(name)
        if site is None or site.types or site.rounds or site.releases:
            return site
        if site.first + site.count < self.num_clients:
            return site
        self._sites = {other: each for other, each in self._sites.items() if other != name}
        self.num_clients = site.first
        return None

    def keep(self, sites: Sequence[SiteRecord]) -> None:
        """Forget other sites, and number clients by the names of sites, not by their arrival."""
        self._sites, self.num_clients = {site.name: site for site in sites}, 0
        for site in self:
            site.first, site.renumbered = self.num_clients, 0
            self.num_clients += site.count

    def leave_out_refused(self) -> bool:
        """Renumber clients before the first round, without those of refused sites; return True."""
        self.num_clients = 0
        for site in self:
            site.first, site.count = self.num_clients, 0 if site.is_refused else site.count
            self.num_clients += site.count
        return True

    def clients(self, site: SiteRecord) -> ClientRange:
        """Return the clients of a site."""
        return ClientRange(site.first, site.count, self.num_clients)

    def is_present(self, site: SiteRecord, now: float) -> bool:
        """Tell whether a site is heard."""
        heard = not site.left and now - site.seen <= self._silent_after
        return heard and not self._is_expelled(site.name)

    @property
    def members(self) -> list[SiteRecord]:
        """The sites that have clients in the run and are not expelled."""
        return [site for site in self if site.count and not self._is_expelled(site.name)]

    def hears(self, name: str, now: float) -> bool:
        """Tell whether the site of a name is heard."""
        site = self._sites.get(name)
        return site is not None and self.is_present(site, now)

    def advise_rival(self) -> str:
        """Return what to do about a second process of a site's name."""
        return (
            "The second one joins when the first one has ended or has sent nothing for "
            f"{self._silent_after:g} s. Wait, or stop one of them. Give another --name only to a "
            "site with other data, since rows that two sites have count twice"
        )

    def advise_return(self, names: Sequence[str]) -> list[str]:
        """Say which of some sites were expelled or refused, and how they return."""
        refused = {site.name for site in self if site.is_refused}
        return [
            f"{name} was expelled: let it return by `fedpax sites admit {name}`"
            if self._is_expelled(name)
            else f"{name} was refused: mend its data or its flags, and start it again"
            for name in names
            if self._is_expelled(name) or name in refused
        ]

    def is_awaited(self, site: SiteRecord, kind: str, now: float) -> bool:
        """Tell whether a task of a kind waits for a site until its deadline."""
        is_overdue = site.attendance.missed[kind] >= self._most_missed
        return self.is_present(site, now) and not is_overdue

    def awaited(
        self, task: Task, answered: Container[str], now: float, *, needs_more: bool
    ) -> list[str]:
        """Return the sites that a task waits for: overdue ones only if it needs more answers."""
        pending = [site for site in self if site.name in task.own and site.name not in answered]
        awaited = [site.name for site in pending if self.is_awaited(site, task.kind, now)]
        if awaited or not needs_more:
            return awaited
        return [site.name for site in pending if self.is_present(site, now)]

    def end_task(
        self, task: Task, answered: Container[str], now: float, *, deadline: float
    ) -> None:
        """Note which sites have answered a task."""
        for site in self:
            if site.name not in task.own:
                continue
            if site.name in answered:
                if task.kind == EVALUATION:  # a round has several tasks: its coordinator notes it
                    site.attendance.take_part(EVALUATION)
            elif self.is_present(site, now):
                site.attendance.miss(task, now, deadline=deadline, most=self._most_missed)

    def shares(self) -> dict[str, float]:
        """Return the part of each site in the weight of the last round."""
        weights = {site.name: site.weight for site in self if site.weight is not None}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()} if total else {}

    def reports(self, now: float) -> list[SiteReport]:
        """Return the table."""
        shares = self.shares()
        return [
            SiteReport(
                site.name,
                self._state(site, now),
                site.count,
                site.rounds,
                site.late,
                site.dropped,
                site.sent_bytes,
                site.received_bytes,
                site.epsilon,
                site.heldout,
                None if math.isinf(site.seen) else now - site.seen,
                shares.get(site.name),
            )
            for site in self
        ]

    def _state(self, site: SiteRecord, now: float) -> str:
        if self._is_expelled(site.name):
            return "expelled"
        if site.heard_end:
            return "finished"
        if site.left:
            return "failed" if site.failed else "left"
        if not self.is_present(site, now):
            return "silent"
        if not self.is_awaited(site, ROUND, now):
            return "overdue"
        return "training" if site.ready else "joining"

    def to_json(self) -> list[dict[str, Any]]:
        """Return what outlives the coordinator's process."""
        return [site.to_json() for site in self]

    def restore(self, saved: list[Mapping[str, Any]]) -> None:
        """Take over the sites of an earlier process of the coordinator."""
        for fields in saved:
            site = SiteRecord(fields["name"], fields["first"], fields["count"])
            for name in _SAVED[3:]:
                setattr(site, name, fields.get(name, getattr(site, name)))
            self._sites[site.name] = site
            self.num_clients = max(self.num_clients, site.first + site.count)


def read_sites(job_log_dir: str | Path) -> list[SiteReport]:
    """Read the sites as last written; empty without a readable file."""
    return read_reports(Path(job_log_dir) / SITES, SiteReport)


def format_sites(sites: Sequence[SiteReport]) -> str:
    """Format the sites of a coordinator as a Markdown table."""
    metrics = {name for site in sites for name in site.heldout}
    names = sorted(metrics, key=lambda name: (name != "loss", name))
    head = ["site", "state", "clients", "rounds", "late", "dropped", "down", "up"]
    private = any(site.epsilon is not None for site in sites)
    weighted = any(site.share is not None for site in sites)
    head += ["weight"] if weighted else []
    head += ["epsilon"] if private else []
    head += [f"held-out {name}" for name in names] + ["last message"]
    rows = [
        [
            site.name,
            site.state,
            *(str(number) for number in (site.clients, site.rounds, site.late, site.dropped)),
            format_bytes(site.sent_bytes),
            format_bytes(site.received_bytes),
            *(["-" if site.share is None else f"{site.share:.1%}"] if weighted else []),
            *(["-" if site.epsilon is None else f"{site.epsilon:.4g}"] if private else []),
            *(format_value(site.heldout[name]) if name in site.heldout else "-" for name in names),
            format_ago(site.seconds_since_message),
        ]
        for site in sites
    ]
    return markdown_table(head, rows)
