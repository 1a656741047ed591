"""Before the first round: the inputs that all sites share, and the sites that do not fit."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedpax.console import count_of
from fedpax.errors import ConfigurationError
from fedpax.sites.downlink import whole
from fedpax.sites.participants import Participants, describe_wait
from fedpax.sites.site_experiment import ColumnValues, Json, Question
from fedpax.sites.site_files import SiteWatch, write_federation
from fedpax.sites.site_table import LATE, SiteRecord
from fedpax.sites.stage_calls import StageCalls, without_faults
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import QUESTION, ROUND, VALUES, Task, check_size, new_token
from fedpax.training.progress import Progress
from fedpax.transforms.stages import Request, drive
from fedpax.transport.calls import MalformedError

Properties = Mapping[str, str | None]
"""Properties that must be equal at all sites, in words, by name; None differs from none."""

ABSENT = "absent"


class Remedied(str):
    """The name of a property, and how sites that differ in it can join."""

    remedy: str

    def __new__(cls, name: str, remedy: str) -> Self:
        """Make a name."""
        self = super().__new__(cls, name)
        self.remedy = remedy
        return self


class Needed(Remedied):
    """The name of a property that no site lacks, and how a site can do without it."""


_MOST_WORDS = 200


class VoteOutcome(NamedTuple):
    """The sites that differ: what differs of each, and the unstated properties that tie."""

    refused: dict[str, str]
    undecided: str | None


def count_votes(
    sites: Mapping[str, Properties], stated: Mapping[str, str], by: str = "the syncer states"
) -> VoteOutcome:
    """Return the sites that differ from what the coordinator states, or from most others."""
    refused: dict[str, str] = {}
    while True:
        left = {name: vote for name, vote in sites.items() if name not in refused}
        ties, before = [], len(refused)
        names = [p for vote in left.values() for p in vote]
        needed = [p for p in names if isinstance(p, Needed)]
        for property_name in dict.fromkeys([*needed, *names]):
            having = _values(property_name, left)
            if not having:
                continue
            if property_name in stated:
                expected, whose = stated[property_name], f"as {by} it"
            else:
                first, *others = Counter(having.values()).most_common()
                if others and others[0][1] == first[1]:
                    ties.append(_describe_tie(property_name, having))
                    continue
                expected = first[0]
                whose = f"as {first[1]} of {len(having)} sites have it"
            for name, value in having.items():
                if value != expected and name not in refused:
                    refused[name] = (
                        f"{property_name} is {_shorten(value)} at this site, expected "
                        f"{_shorten(expected)}, {whose}"
                    ) + _remedy(property_name, {value, expected})
        if len(refused) == before:
            return VoteOutcome(refused, "; ".join(ties[:3]) or None)


def _values(property_name: str, sites: Mapping[str, Properties]) -> dict[str, str]:
    """Return the value of a property at each site that has one, or needs one."""
    lacking = ABSENT if isinstance(property_name, Needed) else None
    values = {name: vote.get(property_name, lacking) for name, vote in sites.items()}
    return {name: value for name, value in values.items() if value is not None}


def _describe_tie(property_name: str, having: Mapping[str, str]) -> str:
    shown = ", ".join(f"{_shorten(value)} at {name}" for name, value in list(having.items())[:5])
    return f"{property_name} is {shown}" + _remedy(property_name, having.values())


def _remedy(property_name: str, values: Collection[str]) -> str:
    if not isinstance(property_name, Remedied):
        return ""
    has_other = isinstance(property_name, Needed) and ABSENT not in values
    return "" if has_other else f" ({property_name.remedy})"


def _shorten(value: str) -> str:
    return repr(value if len(value) <= _MOST_WORDS else f"{value[:_MOST_WORDS]}...")


_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a description raises if it has another form."""


def _malformed(error: Exception) -> str:
    return f"its description is malformed: {str(error)[:300]}"


_SECONDS_TO_TELL = 2.0
"""Seconds in which sites can hear why a run ends."""


class Agreement:
    """What the coordinator and the sites agree on; sites that differ are refused."""

    def __init__(
        self,
        experiment: Any,
        folder: Path,
        exchange: TaskExchange,
        calls: StageCalls,
        watch: SiteWatch,
        progress: Progress,
        stop: Callable[[], bool],
        *,
        tie_seconds: float,
    ) -> None:
        self._tie_seconds = tie_seconds
        self._experiment, self._folder, self._exchange = experiment, folder, exchange
        self._calls, self._watch, self._progress, self._stop = calls, watch, progress, stop
        exchange.find_misfit = self._find_misfit
        if exchange.agreed is None:
            progress.note(
                "the run began with an earlier version of fedpax: the columns of sites that join "
                "late or return are not compared"
            )
        self._told_empty: set[tuple[str, str]] = set()  # sites and columns
        self._least_clients: int = getattr(experiment, "least_clients", 1)

    def has_enough(self, number: int, *, ready: bool = True) -> bool:
        """Tell whether so many sites are there, with the fewest clients that a sum can have."""
        present = self._exchange.present(ready=ready)
        clients = sum(site.count for site in present)
        return len(present) >= number and clients >= self._least_clients

    def wait_for_sites(self, number: int, least: int, *, ready: bool) -> bool:
        """Wait until so many sites are there; False at a signal."""
        note = f"waiting for {count_of(number, 'site')}"
        if self._least_clients > 1:
            note += f" with {self._least_clients} clients, the fewest of --aggregator"
        self._exchange.waits_for = note.removeprefix("waiting for ")
        if self._exchange.has_refused and not self._exchange.present(ready=False):
            note += ": all are refused. Mend their data or flags, then start them again"
        self._progress.note(note)

        def enough() -> bool:
            self._watch.update()
            needed = least if self._exchange.has_refused else number
            is_enough = self.has_enough(needed, ready=ready)
            present = self._exchange.present(ready=ready)
            if not is_enough and len(present) >= needed:
                self._tell_few_clients(sum(site.count for site in present))
            return is_enough

        return self._exchange.wait_for(enough, self._stop)

    def _tell_few_clients(self, count: int) -> None:
        """Tell once that all sites have too few clients, also to sites."""
        told = (
            f"more sites: those that are here have {count_of(count, 'client')}, and --aggregator "
            f"needs {self._least_clients}. Or change it, or its settings, in all commands"
        )
        if told != self._exchange.waits_for:
            self._exchange.waits_for = told
            self._progress.note(f"waiting for {told}")

    def wait_for_same(self, names: Collection[str], *, ready: bool) -> bool:
        """Wait for the sites of a sum that was opened; False at a signal."""
        told: list[Any] = []

        def is_whole() -> bool:
            self._watch.update()
            lacking = sorted({*names} - {s.name for s in self._exchange.present(ready=ready)})
            remedies = self._exchange.sites.advise_return(lacking)
            if lacking and told != [remedies]:
                told[:] = [remedies]
                self._exchange.waits_for = ", ".join(lacking[:5])
                self._progress.note(describe_wait(lacking, len(names), remedies))
            return not lacking

        return self._exchange.wait_for(is_whole, self._stop)

    def agree(self, number: int, least: int) -> bool:
        """Make the inputs that all sites share, from what they tell; False at a signal."""
        while True:
            names = self._exchange.opened.get(QUESTION)
            if names and not self.wait_for_same(names, ready=False):
                return False
            if not names and not self.wait_for_sites(number, least, ready=False):
                return False
            present = self._exchange.begin_agreement(names)
            if self._refuse(*self._compare(present)):
                continue
            inputs = self._run(present)
            if inputs is None:
                continue
            self._exchange.agreed = self._list_agreed(present)
            write_federation(self._folder, self._exchange, inputs)
            self._exchange.publish(inputs=inputs)
            return True

    def _list_agreed(self, present: Sequence[SiteRecord]) -> list[list[Any]]:
        """Return each property that has a value, whether all need it, and the remedy, as JSON."""
        votes = [self._experiment.shared_properties(site.description) for site in present]
        known = [(n, x) for vote in votes for n, x in vote.items() if x is not None]
        known.sort(key=lambda each: not isinstance(each[0], Needed))
        return [
            [name, value, isinstance(name, Needed), getattr(name, "remedy", None)]
            for name, value in dict(known).items()
        ]

    def _find_misfit(self, site: str, description: Json) -> str | None:
        """Return how a site differs from what the first sites agreed on; tell empty columns."""
        agreed: dict[str, str] = {}
        for name, value, is_needed, remedy in self._exchange.agreed or ():
            kind = Needed if is_needed else Remedied
            agreed[name if remedy is None else kind(name, remedy)] = value
        try:
            own = self._experiment.shared_properties(description)
        except _MALFORMED as error:
            return _malformed(error)
        votes = {"": agreed, site: own}
        reason = count_votes(votes, agreed, "the first sites have").refused.get(site)
        empty = {(site, n) for n, x in own.items() if x is None and n in agreed and reason is None}
        for _, name in sorted(empty - self._told_empty):
            self._progress.note(f"site {site}: {name} has no value there")
        self._told_empty |= empty
        return reason

    def _compare(self, present: Sequence[SiteRecord]) -> tuple[dict[str, str], str | None]:
        """Return the sites whose descriptions do not fit, and what is undecided."""
        properties: dict[str, Properties] = {}
        malformed: dict[str, str] = {}
        for site in present:
            try:
                properties[site.name] = self._experiment.shared_properties(site.description)
            except _MALFORMED as error:
                malformed[site.name] = _malformed(error)
        differing, undecided = count_votes(properties, self._experiment.stated_properties())
        return {**malformed, **differing}, undecided

    def _run(self, present: Sequence[SiteRecord]) -> Json | None:
        """Return the inputs; None if a site left or was refused."""
        agreement = self._experiment.agree([site.description for site in present])
        self._progress.note(f"{len(present)} sites agree on their inputs")
        inputs: Json | None = drive(agreement, lambda question: self._ask(question, present))
        if inputs is not None:
            for line in _lone_classes(inputs, present):
                self._progress.note(line)
            return inputs
        faults = dict(self._exchange.faults)
        for name in self._awaited_again(faults):
            self._progress.note(f"site {name} is asked again: {faults.pop(name)}")
        if not self._refuse(faults, None):
            self._progress.note("a site left while the inputs were agreed on; begins again")
        return None

    def _awaited_again(self, faults: Mapping[str, str]) -> list[str]:
        """Return the sites that were late, but not several times."""
        sites, now = self._exchange.sites, time.monotonic()
        late = [sites.get(name) for name, fault in sorted(faults.items()) if fault == LATE]
        return [s.name for s in late if s is not None and sites.is_awaited(s, ROUND, now)]

    def _ask_values(self, question: ColumnValues, present: Sequence[SiteRecord]) -> Any:
        """Return what each site lists; None, with faults, if a site has none that counts."""
        header = {"task": VALUES, "stage": 0, "last_stage": 0, "columns": [*question.columns]}
        own: dict[str, Any] = {site.name: ({}, {}) for site in present}
        task = Task(new_token(), header, whole({}), own, {})
        replies = self._exchange.ask(task, len(own), self._tie_seconds, self._stop)
        for name, reply in (replies or {}).items():
            try:
                values = reply.header["values"]
                check_size(name, values, 0, 0)
                question.check(values)
            except (*_MALFORMED, MalformedError) as error:
                self._exchange.faults.setdefault(name, _malformed(error))
        if replies is None or self._exchange.faults:
            return None
        return [replies[site.name].header["values"] for site in present]

    def _ask(self, question: Question | ColumnValues, present: Sequence[SiteRecord]) -> Any:
        if isinstance(question, ColumnValues):
            return self._ask_values(question, present)
        everyone = {s.name: list(range(s.first, s.first + s.count)) for s in present}
        total = question.stages.placement.size
        who = Participants(
            everyone, everyone, {n: entry[0] for n, entry in everyone.items()}, total
        )
        token, stages, earlier = new_token(), question.stages, list[Any]()

        def answer(request: Request) -> tuple[Any, Any, list[int]] | None:
            header: dict[str, Any] = {"task": QUESTION, "settings": question.settings}
            header["num_clients"] = total
            reply = self._calls.compute(stages, request, earlier, who.slots)
            if reply is None:
                replies = self._calls.ask(stages, request, token, header, who, len(present))
                if replies is None or len(without_faults(replies)) < len(present):
                    return None
                reply = self._calls.merge(stages, request, replies, who)
            earlier.append(reply)
            return reply

        return drive(stages.run(*question.args), answer)

    def settle_types(self, types: Json | None, number: int, least: int) -> bool:
        """Decide the types of a batch: as the experiment has them, or as most sites do."""
        if types is not None:
            self._exchange.publish(types=types)
            self._refuse(count_votes(self._batches(), in_words(types)).refused, None)
        while self._exchange.types is None:
            if not self.wait_for_sites(number, least, ready=True):
                return False
            votes = self._batches()
            if self._refuse(*count_votes(votes, {})) or len(votes) < least:
                continue
            first = next(iter(votes))
            if (site := self._exchange.sites.get(first)) is not None:
                self._exchange.publish(types=site.types)
        return True

    def _batches(self) -> dict[str, Properties]:
        return {site.name: in_words(site.types) for site in self._exchange.present()}

    def _refuse(self, reasons: Mapping[str, str], undecided: str | None) -> bool:
        """Refuse sites, or wait for a change; True if the sites must be compared again."""
        for name, reason in sorted(reasons.items()):
            self._progress.note(f"site {name} is refused: {reason}")
        self._exchange.refuse(reasons)
        self._watch.update(force=bool(reasons))
        if undecided is not None and not reasons:
            self._wait_for_others(
                f"{undecided}: as many sites have one as the other. State it at the syncer and at "
                "each site, or mend the data of one"
            )
        return bool(reasons) or undecided is not None

    def _wait_for_others(self, reason: str) -> None:
        """Wait until other sites are there, or sites that were started again; raise in the end."""
        seconds = self._tie_seconds
        self._progress.note(f"waiting {seconds:g} s for other sites: {reason}")
        self._exchange.waits_for = f"sites that agree: {reason}"

        def who() -> set[tuple[str, str]]:
            return {(s.name, s.incarnation) for s in self._exchange.present(ready=False)}

        before, deadline = who(), time.monotonic() + seconds
        self._exchange.wait_for(lambda: who() != before or time.monotonic() >= deadline, self._stop)
        if self._stop() or who() != before:
            return
        self._exchange.refuse({name: reason for name, _ in before})
        end = time.monotonic() + _SECONDS_TO_TELL
        self._exchange.wait_for(lambda: time.monotonic() >= end, self._stop)
        raise ConfigurationError(
            f"after {seconds:g} s sites still differ, expected sites that agree: {reason}. Then "
            "run the same command again."
        )


def _lone_classes(inputs: Json, present: Sequence[SiteRecord]) -> list[str]:
    """Return a line for each class, up to ten, that one site alone has: it can be a stray label."""
    having: dict[str, list[str]] = {}
    if len(present) > 1 and inputs.get("label", {}).get("classes"):
        for site in present:
            for value in site.description["label"]["classes"]:
                having.setdefault(value, []).append(site.name)
    alone = [(value, names[0]) for value, names in sorted(having.items()) if len(names) == 1]
    return [f"class {value!r} is at site {name} alone" for value, name in alone[:10]]


def in_words(types: Json) -> dict[str, str]:
    """Describe the fields of a batch, `{name: [dtype, shape]}`."""
    words = {
        f"the field {name!r} of a batch": f"{kind[0]}{list(kind[1])}"
        for name, kind in types.items()
    }
    return {"the fields of a batch": ", ".join(sorted(types)), **words}
