"""The coordinator's side of the messages: sites ask for work, and send what it asks for."""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.sites.downlink import WHOLE
from fedpax.sites.site_experiment import Json
from fedpax.sites.site_process import Identity, find_difference
from fedpax.sites.site_table import CLIENTS_PER_SITE, LATE, SiteRecord, SiteTable
from fedpax.sites.tasks import (
    SiteReply,
    Task,
    check_renumbered,
    check_size,
    check_types,
    checked_fields,
    claimed_weight,
    find_fault,
    largest_message,
    shorten_types,
    write_message,
)
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message

LONGEST_WAIT = 1.0
"""Seconds for which a site's question for work waits for some."""

SMALL_MESSAGE = 1 << 20
"""Bytes of arrays that any message may have; the tasks of a run can allow more."""

LARGE = 1 << 20
"""Bytes of arrays from which a reply is kept on the disk, and is offered first."""

MOST_UPLOADS = 4
"""Large replies that are received at a time."""

LONGEST_UPLOAD = 600.0


class TaskExchange:
    """Answers sites, and collects their replies to one task at a time."""

    def __init__(
        self,
        identity: Identity,
        sites: SiteTable,
        *,
        rounds: int,
        run: str,
        heartbeat_seconds: float = 1.0,
        down: str = WHOLE,
        folder: Path | None = None,
        on_fault: Callable[[str, str], None] = lambda name, reason: None,
        clients_per_site: int = CLIENTS_PER_SITE,
    ) -> None:
        self._most_clients = clients_per_site
        self._identity, self.sites, self._rounds, self.run = identity, sites, rounds, run
        self._heartbeat, self._on_fault, self._down = heartbeat_seconds, on_fault, down
        self._changed = threading.Condition()
        self._task: Task | None = None
        self._replies: dict[str, SiteReply] = {}
        self.inputs: Json | None = None  # what all sites share, once they agree
        self.agreed: list[Any] | None = []  # as `Agreement` lists it; None: it was not saved
        self.find_misfit: Callable[[str, Json], str | None] = lambda name, description: None
        self.types: Json | None = None  # of a batch
        self.round, self.finished, self.waits_for = 0, False, "sites"
        self.opened: dict[str, Any] = {}  # who is in the last secure sums, by the kind of task
        self.sent_bytes = self.received_bytes = 0
        self.max_message_bytes = SMALL_MESSAGE
        self.awaits_model: Callable[[str], bool] = lambda name: False  # a site, at the end
        self._folder = folder
        self._receiving: set[str] = set()
        # The process of a site, the reason, and whether the coordinator has told it.
        self._refused: dict[str, tuple[str, str, bool]] = {}
        self._uploads: dict[str, float] = {}  # sites that may send a large reply, and since when
        self.faults: dict[str, str] = {}  # of the replies to the last task, by site

    def handle(self, peer: str, message: Message) -> Message:
        """Answer a message of a site."""
        request = CheckedHeader(message.header)
        kind = request.text("kind")
        kinds: dict[str, Callable[..., Message]] = {
            "work": self._work,
            "ready": self._ready,
            "offer": self._offer,
            "heartbeat": lambda site, *_: self._answer(site, status="ok"),
            "leave": self._leave,
        }
        if kind not in ("join", "reply", *kinds):
            raise RefusedError(
                f"the message has kind {kind[:100]!r}, expected join, reply, {', '.join(kinds)}. "
                "Use the same version of fedpax on both sides, and a method that both run."
            )
        name, incarnation = self._name(peer, request), request.text("incarnation")
        if kind == "reply":
            self._check_is_not_refused(name, incarnation)
            return self._reply(name, request, message.arrays)
        with self._changed:  # a site that is refused meanwhile is not heard again
            self._check_is_not_refused(name, incarnation)
            if kind == "join":
                return self._join(name, request)
            if (site := self._site(name, request)) is None:
                return Message({"status": "join"})
            self._changed.notify_all()
            return kinds[kind](site, request, message.arrays)

    def _check_is_not_refused(self, name: str, incarnation: str) -> None:
        refused, reason, is_told = self._refused.get(name, ("", "", False))
        if refused and refused == incarnation:
            error = RefusedError(
                f"the syncer refuses site {name!r}: {reason}. Mend the data or the flags of this "
                "site, then start it again."
            )
            error.is_told = is_told
            raise error

    def _site(self, name: str, request: CheckedHeader) -> SiteRecord | None:
        """Return the site that sends a message; None if it must join first."""
        site = self.sites.get(name)
        if site is None or site.incarnation != request.text("incarnation"):
            return None
        site.seen, site.left = time.monotonic(), False
        return site

    @staticmethod
    def _name(peer: str, request: CheckedHeader) -> str:
        name = request.text("site")
        if peer and peer != name:
            raise RefusedError(
                f"the site calls itself {name!r}, expected {peer!r}, the name in its certificate. "
                f"Leave --name out, or give --name={peer}."
            )
        return name

    def _join(self, name: str, request: CheckedHeader, *_: Any) -> Message:
        identity, run = request.mapping("identity"), request.optional_text("run")
        if difference := find_difference(self._identity, identity):
            raise RefusedError(difference)
        if run not in (None, self.run):
            raise RefusedError(
                f"site {name!r} has trained in another run ({run}) than this one ({self.run}). "
                "Give `fedpax join` an empty --job_log_dir, or `fedpax syncer` the folder of that "
                "run."
            )
        description, incarnation = request.mapping("description"), request.text("incarnation")
        count = CheckedHeader(description).count("clients", 1)
        known, now = self.sites.get(name), time.monotonic()
        check_size(name, description, count, self._most_clients)
        is_renumbered = known is not None and known.count != count
        if known is not None and is_renumbered:
            check_renumbered(name, known.renumbered)
        # A process in the folder of the one before proves by its name that that one has ended.
        accepted = "", incarnation, request.optional_text("follows")
        is_rival = known is not None and known.incarnation not in accepted
        if known is not None and is_rival and self.sites.is_present(known, now):
            known.has_rival = True
            reason = f"another process of site {name!r} is connected. {self.sites.advise_rival()}"
            return Message({"status": "wait", "reason": reason})
        if self.finished and known is None:
            raise RefusedError("the run is finished, and this site was not part of it.")
        if self.inputs is not None and (misfit := self.find_misfit(name, description)):
            self._refuse_now(name, incarnation, misfit)
        site = self.sites.add(name, count)
        if self._task is not None and is_renumbered and name in self._task.own:
            self._replies[name] = SiteReply({"fault": "it has joined with other clients"}, {})
        site.incarnation, site.description, site.ready = incarnation, description, False
        site.seen, site.left, site.is_refused = now, False, False
        self._changed.notify_all()
        return self._answer(site, status="ok", run=self.run, down=self._down)

    def _ready(self, site: SiteRecord, request: CheckedHeader, arrays: Any) -> Message:
        types = request.mapping("types")
        check_types(types)
        if self.types is not None and types != self.types:
            ours, stated = shorten_types(types), shorten_types(self.types)
            reason = f"its batches are {ours}, expected {stated}"
            self._refuse_now(site.name, site.incarnation, reason)
        site.types, site.ready = types, True
        return self._answer(site, status="ok")

    def _work(self, site: SiteRecord, request: CheckedHeader, arrays: Any) -> Message:
        deadline, had_inputs = time.monotonic() + LONGEST_WAIT, request.flag("inputs")
        while True:
            if self.inputs is not None and not had_inputs:
                if (reason := self.find_misfit(site.name, site.description)) is not None:
                    self._refuse_now(site.name, site.incarnation, reason)
                return self._answer(site, status="inputs", inputs=self.inputs)
            task = self._task
            if task is not None and site.name in task.own and site.name not in self._replies:
                fields, rows = task.own[site.name]
                place, arrays = task.packet.for_site(request.optional_text("have"))
                content = {**arrays, **rows}
                size = sum(x.nbytes for x in content.values())
                self.sent_bytes, site.sent_bytes = self.sent_bytes + size, site.sent_bytes + size
                header = self._answer(site, status="task", token=task.token).header
                return Message({**header, **task.header, **fields, **place}, content)
            if self.finished and not (site.ready and self.awaits_model(site.name)):
                site.heard_end = True
                return self._answer(site, status="finished")
            if (rest := deadline - time.monotonic()) <= 0:
                return self._answer(site, status="wait", waits_for=self.waits_for)
            self._changed.wait(rest)
            self._check_is_not_refused(site.name, site.incarnation)
            site.seen = time.monotonic()

    def _offer(self, site: SiteRecord, request: CheckedHeader, arrays: Any) -> Message:
        """Tell a site whether to send a large reply now: few at a time are in memory."""
        now = time.monotonic()
        self._uploads = {
            name: since
            for name, since in self._uploads.items()
            if now - since < LONGEST_UPLOAD and name != site.name and self.sites.hears(name, now)
        }
        if len(self._uploads) >= MOST_UPLOADS:
            return self._answer(site, status="later")
        self._uploads[site.name] = now
        return self._answer(site, status="send")

    def _reply(
        self, name: str, request: CheckedHeader, arrays: Mapping[str, np.ndarray]
    ) -> Message:
        """Check a reply and keep it; without the lock, since it can be large."""
        token, stage = request.text("token"), request.count("stage")
        fields = checked_fields(request.mapping("fields"))
        with self._changed:
            site, task = self._site(name, request), self._task
            if site is None:
                return Message({"status": "join"})
            size = sum(x.nbytes for x in arrays.values())
            self.received_bytes += size
            site.received_bytes += size
            if task is None or (token, stage) != (task.token, task.header["stage"]):
                self._uploads.pop(name, None)
                site.late += 1
                site.attendance.answer_late(token, stage, time.monotonic())
                return self._answer(site, status="late")
            if name not in task.own or name in self._replies or name in self._receiving:
                return self._answer(site, status="repeated")
            self._receiving.add(name)
        try:
            reply, reason = self._keep(name, task, fields, arrays)
        finally:
            with self._changed:
                self._receiving.discard(name)
                self._uploads.pop(name, None)
        with self._changed:
            self._changed.notify_all()
            if self._task is not task:
                site.late += 1
                return self._answer(site, status="late")
            self._replies[name] = reply
        if reason is None:
            return self._answer(site, status="ok")
        self.report(name, reason)
        return self._answer(site, status="dropped", reason=reason)

    def report(self, name: str, reason: str) -> None:
        """Count a fault of a site, which is muted and in the end expelled."""
        if (site := self.sites.get(name)) is not None:
            site.dropped += 1
        self._on_fault(name, reason)

    def _keep(
        self, name: str, task: Task, fields: Json, arrays: Mapping[str, np.ndarray]
    ) -> tuple[SiteReply, str | None]:
        """Return a reply, on the disk if it is large, and why it does not count."""
        if fields.get("fault") is not None:  # the site itself tells why it has no reply
            return SiteReply({"fault": CheckedHeader(fields).text("fault")}, {}), None
        if reason := find_fault(task, task.own[name][0], arrays):
            return SiteReply({"fault": reason}, {}), reason
        is_encoded = task.is_encoded(task.own[name][0])
        fields = {**fields, "weight": None if is_encoded else claimed_weight(task, arrays)}
        if self._folder is None or sum(x.nbytes for x in arrays.values()) < LARGE:
            return SiteReply(fields, arrays), None
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{secrets.token_hex(8)}.reply"
        write_message(path, Message({}, arrays), sync=False)
        return SiteReply(fields, path), None

    def _leave(self, site: SiteRecord, request: CheckedHeader, arrays: Any) -> Message:
        site.left, site.failed = True, request.flag("failed")
        site.heard_end = site.heard_end or self.finished
        return self._answer(site, status="ok")

    def _answer(self, site: SiteRecord, **fields: Any) -> Message:
        clients = self.sites.clients(site)
        return Message(
            {
                "round": self.round,
                "rounds": max(self._rounds, self.round),  # which a restarted run can have done
                "first_client": clients.first,
                "heartbeat_seconds": self._heartbeat,
                **fields,
            }
        )

    def begin_agreement(self, only: Collection[str] | None) -> list[SiteRecord]:
        """Give numbers to the clients of the sites that are heard, and return these sites."""
        with self._changed:
            present = [s for s in self.present(ready=False) if only is None or s.name in only]
            self.sites.keep(present)
            return present

    def snapshot(self) -> tuple[dict[str, range], int]:
        """Return the clients of each site that can take part, and the number of all clients."""
        with self._changed:
            ranges = {s.name: range(s.first, s.first + s.count) for s in self.present()}
            return ranges, self.sites.num_clients

    def _refuse_now(self, name: str, incarnation: str, reason: str) -> None:
        """Refuse the process that calls; raises."""
        self._refused[name] = incarnation, reason, False
        if (site := self.sites.forget(name)) is not None:
            site.left, site.ready, site.is_refused = True, False, True
        self._changed.notify_all()
        self._check_is_not_refused(name, incarnation)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse the processes of sites from now on; a site can be started again."""
        with self._changed:
            for name, reason in reasons.items():
                if (site := self.sites.get(name)) is not None:
                    self._refused[name] = site.incarnation, reason, True
                    site.left, site.ready, site.is_refused = True, False, True
            self._changed.notify_all()

    @property
    def has_refused(self) -> bool:
        """Whether a site was refused."""
        return bool(self._refused)

    def present(self, *, ready: bool = True) -> list[SiteRecord]:
        """Return the sites that are heard, and by default only those that can take part."""
        with self._changed:
            now = time.monotonic()
            present = [site for site in self.sites if self.sites.is_present(site, now)]
            return [site for site in present if site.ready or not ready]

    def ask(
        self, task: Task, quorum: int, seconds: float, stop: Callable[[], bool]
    ) -> dict[str, SiteReply] | None:
        """Ask sites; return the replies by name, sorted; None: `stop()`, or no quorum is left."""
        # It waits until each site has answered, is silent or late; after `seconds`, for a quorum.
        deadline = time.monotonic() + seconds
        self._forget_replies()
        with self._changed:
            self.max_message_bytes = max(self.max_message_bytes, largest_message(task))
            self._task, self._replies, self._uploads, self.faults = task, {}, {}, {}
            self._changed.notify_all()
            try:
                while not stop():
                    now = time.monotonic()
                    whole = sum("fault" not in reply.header for reply in self._replies.values())
                    waiting = self.sites.awaited(
                        task, self._replies, now, needs_more=whole < quorum
                    )
                    self.waits_for = ", ".join(waiting[:5]) or "sites"
                    if whole >= quorum and (not waiting or now >= deadline):
                        return dict(sorted(self._replies.items()))
                    if not waiting or now >= deadline:
                        self.faults = dict.fromkeys(waiting, LATE)
                        return None
                    self._changed.wait(0.2)
                return None
            finally:
                self._task = None
                self.sites.end_task(task, self._replies, time.monotonic(), deadline=deadline)
                for name, reply in self._replies.items():
                    if fault := reply.header.get("fault"):
                        self.faults[name] = str(fault)

    def _forget_replies(self) -> None:
        """Remove the files of replies to earlier tasks."""
        if self._folder is not None and self._folder.exists():
            for path in self._folder.glob("*.reply"):
                path.unlink(missing_ok=True)

    def wait_for(self, condition: Callable[[], bool], stop: Callable[[], bool]) -> bool:
        """Wait until a condition on the sites holds; False if `stop()` is True before."""
        with self._changed:
            while not condition():
                if stop():
                    return False
                self._changed.wait(0.2)
            return True

    def publish(self, **fields: Any) -> None:
        """Set attributes that sites are told, and wake those that wait for work."""
        with self._changed:
            for name, value in fields.items():
                setattr(self, name, value)
            self._changed.notify_all()
