"""One stage of a program over sites: what is asked of them, and the merge of their replies."""

import functools
import mmap
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.errors import FedpaxError
from fedpax.secure_sums.asked import AskedStages
from fedpax.secure_sums.roster import Signer
from fedpax.sites.coordinator_program import (
    check_masks,
    coded_arrays,
    expected_arrays,
    weight_limits,
    weighted_terms,
)
from fedpax.sites.downlink import WHOLE, Downlink, whole
from fedpax.sites.participants import Participants, note_opened
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import OF_ONE, ask_for_sums, check_is_sum
from fedpax.sites.site_experiment import Json
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import (
    ROUND,
    ROW,
    SHARED,
    SHOWN,
    TERM,
    WORD,
    SiteReply,
    Task,
    claimed_weight,
    find_wrong_weight,
    in_order,
    is_finite,
    new_token,
    numbered,
    to_numbers,
)
from fedpax.sites.uplink import SUM, Uplink
from fedpax.transforms.client_stages import Value
from fedpax.transforms.stages import Request, Stages

MOST_SHARE = 0.5
"""Part of the weight beyond which a site of three and more is told."""


class StageCalls:
    """Asks sites for the stages of programs."""

    def __init__(
        self,
        exchange: TaskExchange,
        rules: RoundRules,
        folder: Path,
        note: Callable[[str], None],
        stop: Callable[[], bool],
        signer: Signer | None = None,
    ) -> None:
        self._signer, self._asked = signer, AskedStages(OF_ONE)
        self._exchange, self._rules, self._note, self._stop = exchange, rules, note, stop
        self._folder = folder  # of large updates
        self._downlink = Downlink(rules.down, new_token())
        self._told: set[str] = set()  # sites that send floats, although the aggregator encodes
        self._outweighing: set[str] = set()  # sites that were told to weigh more than all others

    def ask(
        self,
        divided: Stages,
        request: Request,
        token: str,
        header: Json,
        who: Participants,
        quorum: int,
    ) -> dict[str, SiteReply] | None:
        """Ask for a stage, as `TaskExchange.ask` does."""
        rows = [to_numbers(x) for x in request.rows]
        coded = None if self._rules.secure_sums else divided.coded(request.stage)
        shared = numbered(SHARED, request.shared)
        is_round, stage, rules = header["task"] == ROUND, divided[request.stage], self._rules
        is_model = is_round and request.stage == 0
        packet = self._downlink.pack(shared) if is_model else whole(shared)
        own = {}
        for name, chosen in who.clients.items():
            site = self._exchange.sites.get(name)
            assert site is not None
            slots = who.slots[name]
            fields: dict[str, Any] = {"clients": list(chosen), "slots": list(slots)}
            fields |= {"counted": site.counted, "first_client": who.firsts[name]}
            # The words of one of several clients would show its update, and not their sum.
            fields |= {"coded": True} if coded is not None and site.count == 1 else {}
            own[name] = fields, numbered(ROW, [x[np.array(slots)] for x in rows])
            if coded is not None and site.count > 1 and rules.up == WHOLE:
                self._tell_float32(name)
        uplink, expected = self._uplink(divided, request.stage), expected_arrays(stage)
        if is_round and uplink.is_active:
            header, expected = {**header, "up": rules.up}, uplink.types(expected)
        task = Task(
            token,
            {**header, "stage": request.stage, "last_stage": last_asked(divided)},
            packet,
            own,
            expected,
            weight_limits(stage, rules.weights) if is_round else {},
            weighted_terms(divided, request.stage) if is_round else {},
            coded_arrays(coded),
        )
        check_masks(divided, rules.secure_sums)
        if rules.secure_sums:
            check_is_sum(stage, divided.adds(request.stage))
            count = {name: len(chosen) for name, chosen in who.clients.items()}
            replies = self.ask_for_sum(
                task,
                stage.terms,
                count,
                quorum,
                rules.round_seconds,
                divided.least_masked or 0,
                who,
            )
        else:
            replies = self._exchange.ask(task, quorum, rules.round_seconds, self._stop)
            replies = self._check_words(task, divided, request, replies or {}, who) or replies
        if task.weights and replies is not None and not rules.secure_sums:
            self._note_weights(without_faults(replies))
        if task.header["stage"] == task.header["last_stage"]:
            for name in without_faults(replies or {}):
                if (site := self._exchange.sites.get(name)) is not None:
                    site.releases += 1
        return replies

    def ask_for_sum(
        self,
        task: Task,
        terms: Sequence[Value],
        clients: Mapping[str, int],
        quorum: int,
        seconds: float,
        least_clients: int = 0,
        who: Participants | None = None,
    ) -> dict[str, SiteReply] | None:
        """Ask for a secure sum of terms, whose values are in the first reply."""
        exchange, stage = self._exchange, task.header["stage"]
        fields = {"token": task.token, "round": exchange.round, "inputs": exchange.inputs}
        asked = self._asked.add(task.token, stage, {**fields, **task.header}, task.packet.whole)
        try:
            return ask_for_sums(
                exchange,
                task,
                terms,
                quorum,
                seconds,
                self._stop,
                threshold=self._rules.secure_threshold,
                clients=clients,
                least_clients=least_clients,
                report=self._report,
                before_opening=lambda present: note_opened(
                    exchange, self._folder, task, who, present
                ),
                asked=asked,
                signer=self._signer,
            )
        except FedpaxError as error:
            self._note(f"no secure sum: {error}")
            return None

    def _report(self, name: str, reason: str) -> None:
        self._note(f"site {name} does not keep to the protocol: {reason}")
        self._exchange.report(name, reason)
        self._exchange.faults[name] = reason

    def _note_weights(self, replies: Mapping[str, SiteReply]) -> None:
        """Note what sites claim to weigh, and tell which one of several outweighs all others."""
        sites = self._exchange.sites
        for site in sites:
            reply = replies.get(site.name)
            site.weight = None if reply is None else reply.header["weight"]
        shares = sites.shares()
        for name, share in shares.items():
            if share > MOST_SHARE and len(shares) > 2 and name not in self._outweighing:
                self._outweighing.add(name)
                self._note(
                    f"site {name} claims {share:.1%} of the weight of all sites: the model is "
                    "mostly its own. --weights=capped:N limits what a client weighs"
                )

    def _tell_float32(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._note(
                f"site {name} has several clients: it sends their sum as float32. "
                "--up=e3m0 sends sums in 4 bits a number"
            )

    def _uplink(self, divided: Stages, number: int) -> Uplink:
        return Uplink(self._rules.up, divided[number], divided.adds(number))

    def _check_words(
        self,
        task: Task,
        divided: Stages,
        request: Request,
        replies: Mapping[str, SiteReply],
        who: Participants,
    ) -> dict[str, SiteReply]:
        """Replace replies whose words have values or weights that do not count."""
        checked = dict(replies)
        for name, reply in without_faults(replies).items():
            if not task.is_encoded(task.own[name][0]):
                continue
            terms = numbered(TERM, self.terms_of(divided, request, name, reply.arrays, who))
            fault = find_wrong_weight(task, len(who.clients[name]), terms)
            if not all(map(is_finite, terms.values())):
                fault = "its words stand for NaN or infinity, expected finite values"
            if fault is None:
                header = {**reply.header, "weight": claimed_weight(task, terms)}
                checked[name] = SiteReply(header, reply.content)
            else:
                checked[name] = SiteReply({"fault": fault}, {})
                self._exchange.report(name, fault)
        return checked

    def terms_of(
        self,
        divided: Stages,
        request: Request,
        name: str,
        arrays: Mapping[str, np.ndarray],
        who: Participants,
    ) -> Sequence[Any]:
        """Return the terms of a site's reply, also if they are encoded."""
        if words := in_order(WORD, arrays):  # of one client
            (slot,), coded = who.slots[name], divided.coded(request.stage)
            assert coded is not None
            return coded.terms(slot, request.shared, [x[slot] for x in request.rows], words)
        if any(name.startswith(f"{SUM} ") for name in arrays):
            uplink = self._uplink(divided, request.stage)
            arrays = uplink.decode(self._exchange.round, who.firsts[name], arrays)
        return in_order(TERM, arrays)

    def compute(
        self,
        divided: Stages,
        request: Request,
        earlier: Sequence[tuple[Any, Any, list[int]]],
        slots: Mapping[str, Sequence[int]],
    ) -> tuple[Any, Any, list[int]] | None:
        """Return a stage's terms from values of earlier stages, which are fixed, or None."""
        if not is_computable(divided, request.stage):
            return None
        known: dict[str, tuple[Any, list[int]]] = {}
        for number, (_, shown, answered) in enumerate(earlier):
            known |= {n: (shown[i], answered) for n, i in divided.seen(number).items()}
        client, merge = divided.client(request.stage), divided.merge(request.stage)
        places = {n: {slot: k for k, slot in enumerate(own)} for n, (_, own) in known.items()}
        participants = [slot for chosen in slots.values() for slot in chosen]

        def terms(slot: int) -> Sequence[Any]:
            values = {n: known[n][0][places[n][slot]] for n in known}
            return client(slot, request.shared, [x[slot] for x in request.rows], values)[0]

        return functools.reduce(merge, map(terms, participants)), [], participants

    def merge(
        self, divided: Stages, request: Request, replies: Mapping[str, SiteReply], who: Participants
    ) -> tuple[Any, Any, list[int]]:
        """Merge the terms of sites, in the order of their names."""
        merge = divided.merge(request.stage)
        merged: Any = ()
        values = divided[request.stage].shown
        with UpdateRows(values, divided.placement.size, self._folder) as shown:
            for name, reply in without_faults(replies).items():
                arrays = reply.arrays
                terms = self.terms_of(divided, request, name, arrays, who)
                if terms:  # the first reply has all of a secure sum
                    merged = merge(merged, terms) if merged else terms
                shown.add(who.slots[name], in_order(SHOWN, arrays))
            return (tuple(jnp.asarray(x) for x in merged), *shown.finish())


def is_computable(divided: Stages, number: int) -> bool:
    """Return whether a stage reads of sites what they showed in earlier stages alone."""
    shown = {name for earlier in range(number) for name in divided.seen(earlier)}
    stage = divided[number]
    return (
        bool(shown)
        and not (stage.shown or stage.noise)
        and {value.name for value in stage.own} <= shown
    )


def last_asked(divided: Stages) -> int:
    """Return the last stage that sites run: a computed one only if they keep its results."""
    return max(
        number
        for number, stage in enumerate(divided)
        if stage.kept or not is_computable(divided, number)
    )


def without_faults(replies: Mapping[str, SiteReply]) -> dict[str, SiteReply]:
    """Return the replies that count."""
    return {name: reply for name, reply in replies.items() if "fault" not in reply.header}


# ---- what a stage's server part reads of each client, such as the updates of a median: `[n, ...]`

LARGEST_IN_MEMORY = 1 << 26
"""Bytes of the values of all clients from which they are in a file."""

SECONDS_BETWEEN_DROPS = 0.02


class UpdateRows:
    """Collects the rows of clients, in memory or in mapped files."""

    def __init__(self, values: Sequence[Value], size: int, folder: Path) -> None:
        self._values, self._size = values, size
        self._files = {
            i: tempfile.TemporaryFile(dir=folder)
            for i, value in enumerate(values)
            if size * value.nbytes >= LARGEST_IN_MEMORY
        }
        self._rows: list[list[np.ndarray]] = [[] for _ in values]
        self._places: list[int] = []

    def __enter__(self) -> "UpdateRows":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()  # what is mapped stays

    def add(self, places: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Add the rows of some clients, whose places in the cohort are given."""
        self._places += places
        for i, (rows, array) in enumerate(zip(self._rows, arrays, strict=True)):
            if (file := self._files.get(i)) is None:
                rows.append(array)
                continue
            for place, row in zip(places, np.ascontiguousarray(array), strict=True):
                file.seek(place * row.nbytes)
                file.write(row.reshape(-1).view(np.uint8))  # bfloat16 is not a buffer

    def finish(self) -> tuple[list[jax.Array], list[int]]:
        """Return the rows of each value, and the places of their clients, all with a file."""
        in_memory = [
            jnp.zeros((0, *value.shape), value.dtype) if not rows else jnp.concatenate(rows)
            for value, rows in zip(self._values, self._rows, strict=True)
        ]
        if not self._files or not self._places:
            return in_memory, self._places
        places = jnp.asarray(self._places, int)
        return [
            self._map(i)
            if i in self._files
            else jnp.zeros((self._size, *rows.shape[1:]), rows.dtype).at[places].set(rows)
            for i, rows in enumerate(in_memory)
        ], list(range(self._size))

    def _map(self, number: int) -> jax.Array:
        value, file = self._values[number], self._files[number]
        shape = self._size, *value.shape
        file.truncate(self._size * value.nbytes)  # zeros for clients without an answer
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
        rows = np.frombuffer(mapped, value.dtype).reshape(shape)
        dropping = threading.Thread(target=_drop_pages, args=(weakref.ref(mapped),), daemon=True)
        dropping.start()
        return jax.device_put(rows, may_alias=True)


def _drop_pages(mapped: "weakref.ref[mmap.mmap]") -> None:
    """Drop the pages of a mapped file from this process's memory while it is in use."""
    while (pages := mapped()) is not None:
        pages.madvise(mmap.MADV_DONTNEED)
        del pages
        time.sleep(SECONDS_BETWEEN_DROPS)
