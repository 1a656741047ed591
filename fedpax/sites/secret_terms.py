"""Terms of sites as secure sums: the coordinator learns the sum over sites alone."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.errors import ArgumentError
from fedpax.secure_sums.arithmetic import (
    EXACT_WORDS,
    WORDS,
    Codes,
    NotSummableError,
    SecureSumError,
    from_words,
    to_exact_words,
    to_words,
)
from fedpax.secure_sums.asked import AskedStages
from fedpax.secure_sums.coordinator_side import CoordinatorSide
from fedpax.secure_sums.message import Message
from fedpax.secure_sums.roster import Signer
from fedpax.secure_sums.site_side import SiteSums
from fedpax.sites.downlink import whole
from fedpax.sites.participants import OPENED, OpenedSums
from fedpax.sites.site_experiment import Json
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import (
    EVALUATION,
    ROUND,
    SHARED,
    TERM,
    SiteReply,
    Task,
    in_order,
    numbered,
)
from fedpax.transforms.client_stages import Stage, Value
from fedpax.transforms.stages import Stages
from fedpax.transport.admission import MAX_TEXT
from fedpax.transport.calls import RefusedError

TASK = "secure_sum"
"""The task of the phases of a secure sum in which no values are sent."""

Arrays = Mapping[str, np.ndarray]

OF_ONE = frozenset(
    {"base", "checksum", "clients", "counted", "first_client", "heartbeat_seconds", "request"}
    | {"rounds", "session", "slots", "status", "target"}
)
"""Fields of a task that differ between sites, or on which no term depends."""


REPEATED = 2
"""Rounds that may be repeated after a sum with noise, as when a coordinator was killed."""


class SecretTerms:
    """A site's part in the secure sums of its rounds."""

    def __init__(
        self,
        name: str,
        least_sites: int = 0,
        signer: Signer | None = None,
        folder: Path | None = None,
    ) -> None:
        self._name, self._least = name, least_sites
        self._opened = OpenedSums(None if folder is None else folder / OPENED)
        # The session, and the name of the sum and this site's clients when it sent values.
        self._masked = "", "", "", 0  # session, name, clients, noisy stages if the stage has noise
        self.rounds, self._noisy = 0, 0
        self._counted = ""  # session of the last sum with noise
        self._sums = SiteSums(least_sites or 3, signer)
        self._asked = AskedStages(OF_ONE)

    @property
    def is_required(self) -> bool:
        """Tell whether the site sends its terms in secure sums alone."""
        return self._least > 0

    def answer(self, header: Json) -> Json:
        """Answer a phase in which no values are sent."""
        try:
            answer = self._step(header)
            if answer.header["phase"] in ("confirm", "reveal"):
                self._check_opened(self._sums.sites)
            if answer.header["phase"] == "reveal":
                session, name, clients, _ = self._masked
                self._count_noise(session, name.split()[0])
                self._opened.add(name, {"sites": sorted(self._sums.sites), "clients": clients})
        except SecureSumError as error:
            return {"fault": str(error)[:MAX_TEXT]}
        return {"answer": dict(answer.header)}

    def _step(
        self, header: Json, encode: Callable[[], Codes] | None = None, asked: bytes = b""
    ) -> Message:
        """Answer a phase: only a request for masked values is with a task that makes some."""
        request = header.get("request")
        if ((request or {}).get("phase") == "mask") != (encode is not None):
            raise SecureSumError("the coordinator asks for values in another phase than 'mask'")
        return self._sums.answer(self._name, header["session"], request, encode, asked)

    def send(
        self, header: Json, received: Arrays, fields: Json, arrays: Arrays
    ) -> tuple[Json, Arrays]:
        """Return the fields and the arrays of a reply: under masks, if the task asks for a sum."""
        if "request" not in header:
            if self._least:
                raise RefusedError(
                    "the syncer asks for the terms of this site, expected a secure sum: this site "
                    f"has --only_sums_of={self._least}. Start `fedpax syncer` with --secure_sums."
                )
            return fields, arrays
        if "fault" in fields:
            return fields, {}
        # Squares of columns are of any size, and models are large.
        to = to_words if header["task"] == ROUND else to_exact_words

        def encode() -> dict[str, np.ndarray]:
            return numbered(TERM, [to(x) for x in in_order(TERM, arrays)])

        shared = numbered(SHARED, in_order(SHARED, received))
        session = header["session"]
        try:
            # Values of a later stage are bound to what the earlier ones were asked for.
            if header["stage"] and header["token"] != self._asked.token:
                raise SecureSumError("another sum came between two stages of this one")
            asked = self._asked.add(header["token"], header["stage"], header, shared)
            answer = self._step(header, encode, asked)
            if self._masked[0] != session:
                parts = {ROUND: ("round", "stage"), EVALUATION: ("model",)}.get(header["task"], ())
                name = " ".join(str(header[part])[:20] for part in ("task", *parts))
                own = sorted(k - header["first_client"] for k in header.get("clients", ()))
                digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
                self._masked = session, name, digest, self._noisy
            self._check_opened(self._sums.sites)
        except (SecureSumError, NotSummableError) as error:
            return {"fault": str(error)[:MAX_TEXT]}, {}
        return {**fields, "answer": dict(answer.header)}, answer.arrays

    def expect(self, divided: Stages, number: int) -> None:
        """Note the stage whose values are sent next."""
        self._noisy = sum(bool(s.noise) for s in divided) if divided[number].noise else 0

    def _count_noise(self, session: str, task: str) -> None:
        """Count a sum with noise before it is opened; raise if epsilon is stated for fewer."""
        if not (noisy := self._masked[3]) or task == EVALUATION or session == self._counted:
            return
        opened = self._opened.get(f"noise {task}") or 0
        most = noisy * (REPEATED + (self.rounds if task == ROUND else 1))
        if opened >= most:
            raise SecureSumError(
                f"this site has helped to open {opened} sums with noise, expected at most {most}: "
                "more would add to its epsilon. Begin a new run"
            )
        self._opened.add(f"noise {task}", opened + 1)
        self._counted = session

    def _check_opened(self, sites: Collection[str]) -> None:
        """Raise if this site has helped to open another sum of the values that it sends."""
        _, name, clients, _ = self._masked
        known = self._opened.get(name)
        if known is not None and known != {"sites": sorted(sites), "clients": clients}:
            raise SecureSumError(
                f"the sum of {name!r} was opened before, of {', '.join(known['sites'])[:50]}: "
                "a second sum would show the part of a site. Begin a new run with an empty "
                "--job_log_dir of each site"
            )


def check_is_sum(stage: Stage, adds: bool) -> None:
    """Raise if a stage sends anything else than sums."""
    if stage.shown or not adds:
        what = f"{stage.shown[0].name} of each client" if stage.shown else "a maximum or a minimum"
        raise ArgumentError(
            f"secure_sums: the method sends {what}, expected sums and means alone. Use another "
            "aggregator or method, or leave --secure_sums out."
        )
    for value in stage.terms:
        if np.dtype(value.dtype).kind == "c":
            raise ArgumentError(
                f"secure_sums: {value.name} is {value.dtype}, expected real numbers. Keep the real "
                "and the imaginary part as two parameters, or leave --secure_sums out."
            )


def ask_for_sums(
    exchange: TaskExchange,
    task: Task,
    terms: Sequence[Value],
    quorum: int,
    seconds: float,
    stop: Callable[[], bool],
    *,
    threshold: int | None,
    clients: Mapping[str, int],
    least_clients: int,
    report: Callable[[str, str], None],
    before_opening: Callable[[Collection[str]], None],
    asked: bytes,
    signer: Signer | None = None,
) -> dict[str, SiteReply] | None:
    """Ask sites as `TaskExchange.ask`, for the sum of their terms alone, in the first reply."""
    # Malformed or unsigned answers are left out; too few sites or clients raise a `SecureSumError`.
    session = f"{exchange.run} {task.token} {task.header['stage']}"
    words = WORDS if task.header["task"] == ROUND else EXACT_WORDS
    shapes = {f"{TERM} {i}": (*v.shape, words) for i, v in enumerate(terms)}
    side = CoordinatorSide(
        session, list(task.own), threshold=threshold, shapes=shapes, asked=asked, signer=signer
    )
    requests: dict[str, Message | None] = dict.fromkeys(task.own)
    fields, faults = dict[str, Any](), dict[str, SiteReply]()
    named, told = set[str](), dict[str, str]()
    while not side.done:
        phase = side.phase
        if (count := sum(clients[name] for name in requests)) < least_clients:
            raise SecureSumError(
                f"{count} clients are left, expected at least min_participants={least_clients}: "
                "with fewer, the noise is too small, and the sum is not opened"
            )
        part = _phase_task(task, session, phase, requests, shapes)
        needed = len(requests) // 2 + 1  # more than half, before a deadline ends a phase
        replies = exchange.ask(part, max(quorum, needed), seconds, stop)
        exchange.faults |= told
        if replies is None:
            return None
        for name, reply in replies.items():
            header = reply.header.get("answer")
            try:
                if isinstance(header, dict):
                    side.receive(name, Message(header, reply.arrays))
                    if accused := header.get("accused"):
                        told[name] = f"it cannot open what {', '.join(accused)[:100]} sent"
                        reply, exchange.faults[name] = (
                            SiteReply({"fault": told[name]}, {}),
                            told[name],
                        )
            except SecureSumError as error:
                reply = SiteReply({"fault": str(error)}, {})
                report(name, str(error))
            if "fault" in reply.header:
                faults[name] = reply
            elif phase == "mask":
                fields[name] = {k: v for k, v in reply.header.items() if k != "answer"}
        try:
            requests = dict(side.advance())
        finally:
            for name in side.suspects.keys() - named:
                report(name, side.suspects[name])
            named |= side.suspects.keys()
        if side.phase == "reveal":
            before_opening(side.present)
    total = {
        name: from_words(side.total[name], np.dtype(value.dtype))
        for name, value in zip(shapes, terms, strict=True)
    }
    first, *others = side.present
    sent = {first: SiteReply(fields[first], total)} | {n: SiteReply(fields[n], {}) for n in others}
    return sent | {name: reply for name, reply in faults.items() if name not in sent}


def _phase_task(
    task: Task,
    session: str,
    phase: str,
    requests: Mapping[str, Message | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> Task:
    """Return the task of a phase: the values are sent as the answer to the task itself."""

    def extra(request: Message | None) -> dict[str, Any]:
        return {"session": session, "request": None if request is None else dict(request.header)}

    if phase == "mask":
        own = {
            name: ({**task.own[name][0], **extra(request)}, task.own[name][1])
            for name, request in requests.items()
        }
        words = {name: (shape, np.dtype(np.uint32)) for name, shape in shapes.items()}
        return task._replace(own=own, expected=words, weights={}, weighted={})
    none: dict[str, np.ndarray] = {}
    return Task(
        f"{task.token} {phase}",
        {
            "task": TASK,
            "of": task.header["task"],
            "stage": task.header["stage"],
            "last_stage": task.header["last_stage"],
        },
        whole(none),
        {name: (extra(request), none) for name, request in requests.items()},
        {},
    )
