"""The syncer: answers islands, and merges a fragment when a quorum has sent it."""

import copy
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedpax.algorithm import AlgorithmParts, most_phases_ahead
from fedpax.islands.method_parts import MAX_DATA_SETS
from fedpax.islands.syncer.island_table import IslandReport
from fedpax.islands.syncer.members import (
    FREE_SHARD_AFTER,
    Epochs,
    IslandRecord,
    Members,
    note_merged,
)
from fedpax.islands.syncer.merge_report import REPORTED, MergeReport, Totals, make_report
from fedpax.islands.syncer.merge_votes import (
    NO_GUARDS,
    GuardedMerges,
    combine,
    gradient_norm,
    group_votes,
    leave_out,
)
from fedpax.islands.syncer.outer_model import OuterModel, check_finite
from fedpax.islands.syncer.pending import JoinLimit, PendingUpdates, Quorum, StepCredits
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.islands.syncer.updates import check_update, read_update, why_dropped
from fedpax.sites.site_process import Identity, find_difference
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.call_limits import LimitedLog
from fedpax.transport.calls import MalformedError, RefusedError
from fedpax.transport.message import Message

_logger = logging.getLogger(__name__)


class Syncer:
    """The outer model of a run, and the rules by which islands change it."""

    # `handle` runs in several threads. `advance` runs after each update and by a timer, because a
    # grace window ends without a message. A merge is saved before an island receives it, and
    # `on_merge` is called in the thread that did it. In a quorum, and in a merge such as a median,
    # the islands of a certificate count once. `failure` is the error that prevents further merges,
    # such as a full disk.

    def __init__(
        self,
        parts: AlgorithmParts,
        model: OuterModel,
        identity: Identity,
        *,
        num_merges: int,
        tokens_per_step: float = math.inf,
        store: SyncerStore | None = None,
        heartbeat_seconds: float = 1.0,
        free_shard_after: float = FREE_SHARD_AFTER,
        islands_per_certificate: int = 1,
        is_expelled: Callable[[str], bool] = lambda site: False,
        clock: Callable[[], float] = time.monotonic,
        on_merge: Callable[[MergeReport], None] = lambda report: None,
        guard: GuardedMerges | None = None,
    ) -> None:
        self._parts, self._model, self._identity = parts, model, identity
        self._one_vote = parts.aggregator.needs_all  # of each certificate in a merge
        self._num_merges, self._tokens_per_step = num_merges, tokens_per_step
        self._store, self._heartbeat = store, heartbeat_seconds
        self._clock, self._on_merge, self._is_expelled = clock, on_merge, is_expelled
        self._lock, self._log = threading.RLock(), LimitedLog(_logger)
        self._merging = threading.Lock()
        self._guard = guard or GuardedMerges(NO_GUARDS, len(model.fragments))
        self._pending = PendingUpdates(len(model.fragments))
        self._quorum = Quorum(parts.quorum, parts.grace_seconds, heartbeat_seconds, clock)
        self._members = Members(
            parts.islands,
            heartbeat_seconds,
            free_shard_after=free_shard_after,
            per_certificate=islands_per_certificate,
            quorum=parts.quorum,
        )
        per_merge = parts.steps_per_sync * most_phases_ahead(parts)
        self._credits = StepCredits(len(model.fragments), per_merge)
        self._joins = JoinLimit(islands_per_certificate)
        self.merges, self.run, self.totals = 0, secrets.token_hex(8), Totals()
        self.failure: Exception | None = None
        self._epochs = Epochs(len(model.fragments))
        saved = store and store.load(model)
        if saved:
            self.merges, self.run = saved["merges"], saved["run"]
            self._epochs = Epochs(len(model.fragments), saved["epochs"], self.merges)
            self.totals = Totals(**saved["totals"])
            self._members.restore(saved["islands"], self._clock())
            self._guard.restore(saved.get("norms", []))
            for island in self._members:
                island.heard_end = island.heard_end and self.finished
            assert store is not None
            store.save_manifest(self._manifest())  # the epoch, before an island hears of it
        elif store:
            store.save_all(model, self._manifest())

    @property
    def finished(self) -> bool:
        """Tell whether all merges are done."""
        return self.merges >= self._num_merges

    @property
    def everyone_heard_end(self) -> bool:
        """Tell whether the run is finished, and each island knows it."""
        with self._lock:
            return self.finished and self._members.all_heard_end()

    def islands(self) -> list[IslandReport]:
        """Return the islands for a table, by shard."""
        with self._lock:
            return self._members.reports(self._clock())

    def handle(self, peer: str, message: Message) -> Message:
        """Answer a message; `{"status": "join"}`: the island must join, or join again, first."""
        request = CheckedHeader(message.header)
        kind = request.text("kind")
        if kind == "join":
            return self._join(peer, request)
        kinds = {"push": self._push, "pull": self._pull, "heartbeat": self._note}
        if kind not in (*kinds, "leave"):
            raise MalformedError(
                f"the message has kind {kind[:100]!r}, expected join, push, pull, heartbeat or "
                "leave. Use the same version of fedpax on both sides."
            )
        with self._lock:
            # If the run is finished, no merge saves a manifest any more.
            heard_end = self.finished and (request.flag("heard_end") or kind == "leave")
            name, incarnation = request.text("island"), request.text("incarnation")
            island = self._members.find(name, peer, incarnation)
            if island is None:
                return Message({"status": "join"})
            island.left = kind == "leave"
            island.saw(self._clock(), request.count("steps"))
            self._note_end(island, heard_end)
            # Under the same lock: an island knows the end if the answer says that it is finished.
            if kind == "leave":
                return self._answer(island)
            if island.shard is None:  # another island has taken it
                return Message({"status": "join"})
        return kinds[kind](island, request, message.arrays)

    def advance(self) -> None:
        """Do all merges that are due; returns at once if another thread does them."""
        while self.failure is None and self._merging.acquire(blocking=False):
            try:
                if not self._merge_if_due():
                    return
            except Exception as error:
                self.failure = error  # for the main thread; islands get their answers
            finally:
                self._merging.release()

    def _note_end(self, island: IslandRecord, heard_end: bool) -> None:
        """Note whether an island knows the end; it is saved before the island's answer."""
        # After the answer the island exits, and a restarted syncer would wait for it.
        before, island.heard_end = island.heard_end, heard_end
        if heard_end and not before and self._store:
            try:
                self._store.save_manifest(self._manifest())
            except BaseException:
                island.heard_end = before
                raise

    # Messages, in the order in which an island sends them.

    def _join(self, peer: str, request: CheckedHeader) -> Message:
        name, folder = request.text("island"), request.text("folder")
        incarnation, run = request.text("incarnation"), request.optional_text("run")
        if difference := find_difference(self._identity, request.mapping("identity")):
            raise RefusedError(difference)
        if run is not None and run != self.run:
            raise RefusedError(
                f"island {name!r} has trained in another run ({run}) than this syncer's "
                f"({self.run}). Give `fedpax join` an empty --job_log_dir, or `fedpax syncer` the "
                "folder of that run."
            )
        if not self._joins.count(peer, self._clock()):
            known = {"merges": self.merges, "finished": self.finished, "saved": {}}
            reason = f"the certificate {peer!r} joins too often. Wait a second"
            return Message({"status": "wait", "reason": reason} | known)
        # No merge may save its manifest between this one's making and its saving.
        with self._merging, self._lock:
            shard, before = request.optional_count("shard"), self._members.to_json()
            data = request.texts("data", MAX_DATA_SETS)
            epoch = request.optional_text("epoch")
            versions = None if epoch is None else request.versions(len(self._pending))
            island = self._admit(name, peer, folder, incarnation, shard, self._clock(), data)
            island.steps_before = request.optional_count("steps_before") or 0
            self._forget_updates_without_shard()
            if name not in self._credits:
                self._credits.add(name, self.merges, returns=name in before)
            elif incarnation not in before[name]["incarnations"]:
                self._credits[name].add_merge()
            if island.shard is None and not self.finished:
                reason = self._members.why_no_shard(shard)
                return self._answer(island, status="wait", reason=reason)
            if discard := not self._epochs.include(epoch, versions, self.merges):
                self._log.warning(
                    "island %r has merges that are not in this state of the run: a newer state was "
                    "lost. It is told to take the model, and to discard its unsent steps",
                    name,
                )
            return self._answer(
                island,
                run=self.run,
                wire_format=self._identity.wire_format,
                rounds=self._num_merges // len(self._pending),
                shard=island.shard,
                heartbeat_seconds=self._heartbeat,
                received=island.merged | self._pending.newest(name),
                epoch=self._epochs.current,
                discard=discard,
            )

    def _admit(self, name: str, *asked: Any) -> IslandRecord:
        """Add an island to the members, as `Members.join` does, after it is saved with them."""
        # Else a syncer that restarts would give its shard to another one.
        members = copy.deepcopy(self._members)
        members.join(name, *asked)
        islands = members.to_json()
        if self._store and islands != self._members.to_json():
            try:
                self._store.save_manifest(self._manifest() | {"islands": islands})
            except OSError as error:
                reason = error.strerror or error
                raise RefusedError(
                    f"the syncer cannot save that island {name!r} joins ({reason}), "
                    "expected free space on its disk. Free some at the syncer, then start the "
                    "same command again."
                ) from error
        return self._members.join(name, *asked)

    def _forget_updates_without_shard(self) -> None:
        """Forget updates of islands whose shards were taken, which send them again, or expelled."""
        for island in self._members:
            if island.shard is None:
                self._credits.pop(island.name, None)
                self._pending.forget(island.name)

    def _push(
        self, island: IslandRecord, request: CheckedHeader, arrays: Mapping[str, np.ndarray]
    ) -> Message:
        p = request.fragment(len(self._model.fragments))
        if (shard := island.shard) is None:
            return Message({"status": "join"})
        update = read_update(request, arrays, shard, self._parts.islands)
        version = self._model.fragments[p].version
        check_update(update, p, version, self._tokens_per_step, self._model.formats[p].wire_shapes)
        # Outside of the lock, because it takes long.
        gradient = self._model.decode[p](dict(arrays), update.shard, update.count)
        norm = gradient_norm(gradient)
        with self._lock:
            self.totals = self.totals.add(received_bytes=sum(x.nbytes for x in arrays.values()))
            if update.incarnation != island.incarnation or island.shard is None:
                return Message({"status": "join"})
            unmerged = self._pending.find(p, island.name)
            known = [u.sequence for u in unmerged if u.incarnation == update.incarnation]
            if update.sequence <= max([island.last_sequence(p), *known]):
                self.totals = self.totals.add(repeated=1)
                # If the answer was lost, the island must still learn of a drop, and send another.
                dropped, reason = island.newest_dropped.get(p, (0, ""))
                status = reason if dropped == update.sequence else "repeated"
                return self._answer(island, status=status)
            self._pending.check_room(p, island.name)
            version = self._model.fragments[p].version
            reason = why_dropped(update, norm, version, self._parts)
            if reason:
                self.totals = self.totals.add(**{reason: 1})
                island.dropped += 1
                island.newest_dropped[p] = update.sequence, reason
                self._credits[island.name].add_merge()
                return self._answer(island, status=reason)
            counted = self._credits[island.name].take(p, update.steps, self.merges)
            self._pending.add(p, update.counting(counted))
            island.loss = update.loss
            late = update.merge < self.merges
            island.late += late
        self.advance()
        with self._lock:
            return self._answer(island, status="late" if late else "accepted")

    def _pull(
        self, island: IslandRecord, request: CheckedHeader, arrays: Mapping[str, np.ndarray]
    ) -> Message:
        have = request.versions(len(self._model.fragments))
        with self._lock:
            newer = self._model.newer_than(have)
            if not newer:
                return self._answer(island)
            p, state = newer[0], self._model.fragments[newer[0]]  # one, so messages stay small
            content = self._model.formats[p].to_arrays(state.params)
            self.totals = self.totals.add(sent_bytes=sum(x.nbytes for x in content.values()))
            answer = self._answer(island, fragment=p, version=state.version, more=len(newer) > 1)
        return Message(answer.header, content)

    def _note(
        self, island: IslandRecord, request: CheckedHeader, arrays: Mapping[str, np.ndarray]
    ) -> Message:
        with self._lock:
            island.seconds_per_update = request.number("seconds_per_update")
            return self._answer(island)

    def _answer(self, island: IslandRecord, **fields: Any) -> Message:
        known = {"merges": self.merges, "finished": self.finished, "saved": island.saved()}
        return Message({"status": "ok"} | known | fields)

    # Merges.

    def _merge_if_due(self) -> bool:
        with self._lock:
            if self._members.mark_expelled(self._is_expelled):
                self._forget_updates_without_shard()
            p = self.merges % len(self._pending)
            on_time = self._pending.on_time(p, self.merges)
            if self.finished or not self._quorum.is_due(self._members, on_time):
                return False
            waiting = self._pending.begin_merge(p)
            self._quorum.begin_merge()
            version = self._model.fragments[p].version
            votes = group_votes(self._members, waiting, self._one_vote)
            now, inside = self._clock(), [i for i in self._members if i.name in waiting]
            seconds = {i.name: now - i.last_parts.get(p, i.since) for i in inside}
        contributions = combine(self._model.decode[p], votes, seconds)
        dropped = self._guard.drop(self._model, p, votes, contributions)
        self._note_dropped(dropped)
        left, contributions = leave_out(dropped, votes, contributions)
        state = self._model.fragments[p]._replace(version=version + 1)
        metrics: Mapping[str, float] = {}
        if left:
            state, metrics = self._model.merge(p, contributions)
        check_finite(state, p, self.merges + 1)
        if self._guard.is_active:
            metrics = {**metrics, "dropped_islands": float(len(dropped))}
        report = make_report(self.merges, version, left or votes, metrics, robust=self._one_vote)
        with self._lock:
            islands = self._members.to_json()
            updates = [update for of_island in waiting.values() for update in of_island]
            for update in updates:
                note_merged(islands[update.island], p, update.incarnation, update.sequence)
            totals = self.totals.add(tokens=report.tokens, guarded=len(dropped))
            versions = [fragment.version for fragment in self._model.fragments]
            versions[p] = state.version
            manifest = self._manifest() | {
                "merges": self.merges + 1,
                "versions": versions,
                "totals": totals._asdict(),
                "islands": islands,
            }
        if self._store:
            fields = {name: getattr(report, name) for name in REPORTED}
            self._store.log({"fragment": p, "time": time.time()} | fields, updates)
            self._store.save(p, state, manifest)
        with self._lock:  # only now: islands forget what the saved model has
            self._members.update_merged(islands)
            self._model.put(p, state)
            self.totals = self.totals.add(tokens=report.tokens, guarded=len(dropped))
            self.merges += 1
            self._pending.end_merge()
            for island in inside:
                island.last_parts[p] = now
        self._on_merge(report)
        return True

    def _note_dropped(self, dropped: Mapping[str, str]) -> None:
        """Name the votes that a guard dropped, and count them for their islands."""
        merge = self.merges + 1
        for name, reason in dropped.items():
            self._log.warning("merge %d: the update of %r is dropped: %s", merge, name, reason)
            with self._lock:
                for island in self._members:
                    island.dropped += island.name in name.split(", ")

    def _manifest(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "epochs": self._epochs.to_json(),
            "merges": self.merges,
            "versions": [state.version for state in self._model.fragments],
            "islands": self._members.to_json(),
            "totals": self.totals._asdict(),
            "norms": self._guard.to_json(),
        }
