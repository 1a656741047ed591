"""The syncer: answers islands, and merges a fragment when a quorum has sent it."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.sites.fragment_format import check_arrays
from fedpax.sites.identity import Identity, find_difference
from fedpax.sites.members import Island, State
from fedpax.sites.message import Message
from fedpax.sites.outer_model import Contribution, OuterModel
from fedpax.sites.requests import Request
from fedpax.sites.syncer_store import SyncerStore
from fedpax.sites.transport import RefusedError
from fedpax.training.algorithm_parts import AlgorithmParts
from fedpax.training.logging import NonFiniteError

UNKNOWN_SHARD = -1


class Update(NamedTuple):
    """An update of a fragment that waits for its merge.

    Attributes:
        island: the island's name.
        incarnation: its process.
        sequence: its number, which grows with each update of the process.
        merge: the merge that the island meant it for.
        count: number of merges of the fragment when it was encoded.
        base: number of merges of the fragment at its first step.
        tokens: tokens of its steps.
        steps: its inner steps.
        loss: mean loss of these steps.
        arrays: the encoded outer gradient.
    """

    island: str
    incarnation: str
    sequence: int
    merge: int
    count: int
    base: int
    tokens: float
    steps: int
    loss: float
    arrays: Mapping[str, np.ndarray]


class MergeReport(NamedTuple):
    """What one merge did.

    Attributes:
        merge: its number, from 1.
        islands: names of the islands in it.
        updates: number of updates in it.
        late: how many of them had missed an earlier merge.
        steps: inner steps in it.
        tokens: tokens of these steps.
        loss: mean loss of these steps.
        staleness: the largest number of merges of the fragment that an update missed.
        metrics: the metrics of the aggregator.
    """

    merge: int
    islands: tuple[str, ...]
    updates: int
    late: int
    steps: int
    tokens: float
    loss: float
    staleness: int
    metrics: Mapping[str, float]


class Totals(NamedTuple):
    """Counts since the run began, over all processes of the syncer.

    Attributes:
        tokens: tokens of merged updates.
        received_bytes: bytes of the arrays of updates.
        sent_bytes: bytes of the arrays of fragments.
        repeated: updates that came again and were not applied again.
        stale: updates dropped because their fragment had been merged too often since.
        not_finite: updates dropped because a value was NaN or infinite.
        too_large: updates dropped because their norm was above `max_norm`.
    """

    tokens: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    repeated: int = 0
    stale: int = 0
    not_finite: int = 0
    too_large: int = 0

    def add(self, **counts: float) -> "Totals":
        """Add to some of the counts."""
        return self._replace(**{name: getattr(self, name) + n for name, n in counts.items()})


class IslandReport(NamedTuple):
    """One island in a table: its name, state, shard, and counts as in `members.Island`."""

    name: str
    state: State
    shard: int
    steps: int
    loss: float | None
    contributed: int
    late: int
    dropped: int
    seconds_since_message: float


class Syncer:
    """The outer model of a run, and the rules by which islands change it.

    `handle` answers one message and may be called by several threads. `advance` does the merges
    that are due; `handle` calls it, and a timer has to, because a grace window ends without a
    message. A merge is saved before any island sees it.

    Args:
        parts: the method.
        model: the outer model with its initial parameters; restored from `store` if that holds a
            state.
        identity: the experiment, which islands must have too.
        num_merges: number of merges after which the run is finished.
        tokens_per_step: tokens of an inner step of an island; an update that claims more is
            refused.
        store: where to save. Default None: nothing is saved.
        heartbeat_seconds: seconds between an island's heartbeats. Default 1.0.
        clock: seconds on a monotonic clock.
        on_merge: called after each merge, in the thread that did it.

    Attributes:
        merges: number of merges so far.
        run: identifies the run, over all processes of the syncer.
        totals: counts since the run began.
        failure: the error that prevents further merges, such as a full disk; None while there is
            none.
    """

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
        clock: Callable[[], float] = time.monotonic,
        on_merge: Callable[[MergeReport], None] = lambda report: None,
    ) -> None:
        self._parts, self._model, self._identity = parts, model, identity
        self._num_merges, self._tokens_per_step = num_merges, tokens_per_step
        self._store, self._heartbeat = store, heartbeat_seconds
        self._clock, self._on_merge = clock, on_merge
        self._lock = threading.RLock()
        self._merging = threading.Lock()
        self._pending: list[dict[int, list[Update]]] = [{} for _ in model.fragments]
        self._deadline: float | None = None
        self._islands: dict[str, Island] = {}
        self.merges, self.run, self.totals = 0, secrets.token_hex(8), Totals()
        self.failure: Exception | None = None
        saved = store and store.load(model)
        if saved:
            self.merges, self.run = saved["merges"], saved["run"]
            self.totals = Totals(**saved["totals"])
            for name, island in saved["islands"].items():
                self._islands[name] = Island.from_json(name, island)
        elif store:
            store.save_all(model, self._manifest())

    @property
    def finished(self) -> bool:
        """Whether all merges are done."""
        return self.merges >= self._num_merges

    def islands(self) -> list[IslandReport]:
        """Return the islands for a table, by shard."""
        with self._lock:
            now = self._clock()
            return [
                IslandReport(
                    island.name,
                    island.state(now, self._heartbeat),
                    island.shard,
                    island.steps,
                    island.loss,
                    island.contributed,
                    island.late,
                    island.dropped,
                    now - island.last_message if island.joined else math.inf,
                )
                for island in sorted(self._islands.values(), key=lambda island: island.shard)
            ]

    def handle(self, peer: str, message: Message) -> Message:
        """Answer a message of an island.

        Args:
            peer: the name in the island's certificate; "" without certificates.
            message: the message.

        Returns:
            The answer. `{"status": "join"}` asks the island to join (again) first.

        Raises:
            RefusedError: the message is not one that an island of this run sends.
        """
        request = Request(message.header)
        kind = request.text("kind")
        if kind == "join":
            return self._join(peer, request)
        kinds = {"push": self._push, "pull": self._pull, "heartbeat": self._note}
        if kind not in (*kinds, "leave"):
            raise RefusedError(
                f"the message has kind {kind[:100]!r}, expected join, push, pull, heartbeat or "
                "leave. Use the same version of fedpax on both sides."
            )
        with self._lock:
            island = self._member(peer, request)
            if island is None:
                return Message({"status": "join"})
            island.saw(self._clock(), request.count("steps"))
            if kind == "leave":
                island.left = True
                return self._answer(island)
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

    # Messages, in the order in which an island sends them.

    def _join(self, peer: str, request: Request) -> Message:
        name, folder = request.text("island"), request.text("folder")
        incarnation, run = request.text("incarnation"), request.optional_text("run")
        if difference := find_difference(self._identity, request.mapping("identity")):
            raise RefusedError(difference)
        if run is not None and run != self.run:
            raise RefusedError(
                f"island {name!r} has trained in another run ({run}), not in that of this syncer "
                f"({self.run}). Give `fedpax join` an empty --job_log_dir, or `fedpax syncer` the "
                "folder of that run."
            )
        with self._lock:
            now = self._clock()
            island = self._islands.get(name)
            if island is not None:
                self._check_return(island, peer, folder, incarnation, now)
                if incarnation != island.incarnation:
                    island.incarnations.append(incarnation)
                    island.dropped_sequences, island.steps = {}, 0
            else:
                shard = self._free_shard(name, request.optional_count("shard"))
                island = Island(name, shard, peer, folder, [incarnation])
                self._islands[name] = island
            island.joined, island.left, island.last_step = True, False, now
            island.saw(now)
            if self._store:  # else a syncer that restarts would give its shard to another one
                self._store.save_manifest(self._manifest())
            return self._answer(
                island,
                run=self.run,
                shard=island.shard,
                heartbeat_seconds=self._heartbeat,
                received=self._newest_updates(island),
            )

    def _newest_updates(self, island: Island) -> dict[str, list[Any]]:
        """Return process and sequence number of the island's newest update of each fragment."""
        newest = dict(island.merged)
        for p, waiting in enumerate(self._pending):
            for update in waiting.get(island.shard, []):
                if update.island == island.name:
                    newest[p] = update.incarnation, update.sequence
        return {str(p): list(sent) for p, sent in newest.items()}

    def _check_return(
        self, island: Island, peer: str, folder: str, incarnation: str, now: float
    ) -> None:
        if peer != island.peer:
            raise RefusedError(
                f"island {island.name!r} belongs to the certificate {island.peer!r}, not to "
                f"{peer!r}. Give --name another name."
            )
        if folder != island.folder:
            alive = island.state(now, self._heartbeat) in ("starting", "training", "stalled")
            if alive:
                raise RefusedError(
                    f"an island called {island.name!r} is training already, in another folder. "
                    "Give --name another name."
                )
            island.folder = folder
        if incarnation in island.incarnations[:-1]:
            raise RefusedError(
                f"this process of island {island.name!r} was replaced by a newer one. Stop it."
            )

    def _free_shard(self, name: str, wanted: int | None) -> int:
        count, now = self._parts.islands, self._clock()
        if wanted is not None and wanted >= count:
            raise RefusedError(
                f"--shard={wanted} is no shard of this run, expected 0 to {count - 1}. Leave out "
                "--shard to take a free one."
            )
        holders = {island.shard: island for island in self._islands.values()}
        free = [k for k in range(count) if k not in holders]
        absent = [
            k
            for k, island in holders.items()
            if island.state(now, self._heartbeat) in ("silent", "left")
        ]
        absent.sort(key=lambda k: holders[k].last_message)
        candidates = [k for k in (*free, *absent) if wanted in (None, k)]
        if not candidates:
            held = f"shard {wanted} is" if wanted is not None else f"all {count} shards are"
            raise RefusedError(
                f"{held} in use by other islands ({', '.join(sorted(self._islands))[:300]}). Wait "
                "until one leaves, or start a run with more --islands."
            )
        shard = candidates[0]
        if shard in holders:
            del self._islands[holders[shard].name]
        return shard

    def _push(self, island: Island, request: Request, arrays: Mapping[str, np.ndarray]) -> Message:
        p = request.fragment(len(self._model.fragments))
        update = Update(
            island.name,
            island.incarnation,
            request.count("sequence", least=1),
            request.count("merge"),
            request.count("count"),
            request.count("base"),
            request.number("tokens"),
            request.count("update_steps", least=1),
            request.number("loss"),
            arrays,
        )
        version = self._model.fragments[p].version
        if not update.base <= update.count <= version:
            raise RefusedError(
                f"the update of fragment {p} begins at merge {update.base} and is encoded for "
                f"{update.count}, but the fragment has {version}. Stop this island; start it in "
                "an empty --job_log_dir."
            )
        if not 0 < update.tokens <= self._tokens_per_step * update.steps:
            raise RefusedError(
                f"the update claims {update.tokens:g} tokens in {update.steps} steps, expected at "
                f"most {self._tokens_per_step:g} per step. Use the same data settings everywhere."
            )
        if difference := check_arrays(arrays, self._model.formats[p].wire_shapes):
            raise RefusedError(
                f"the update of fragment {p} has other parameters: {difference}. Use the same "
                "model and the same version of fedpax on both sides."
            )
        # Outside of the lock, because it takes long.
        gradient = self._model.decode[p](dict(arrays), island.shard, update.count)
        squares = [np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradient)]
        norm, limit = math.sqrt(sum(squares)), self._parts.max_norm
        with self._lock:
            size = sum(array.nbytes for array in arrays.values())
            self.totals = self.totals.add(received_bytes=size)
            waiting = self._pending[p].setdefault(island.shard, [])
            known = [u.sequence for u in waiting if u.incarnation == update.incarnation]
            if update.incarnation != island.incarnation:
                return Message({"status": "join"})
            if update.sequence <= max([island.last_sequence(p), *known]):
                self.totals = self.totals.add(repeated=1)
                return self._answer(island, status="repeated")
            version = self._model.fragments[p].version
            reason = None
            if not math.isfinite(norm) or not math.isfinite(update.loss):
                reason = "not_finite"
            elif limit is not None and norm > limit:
                reason = "too_large"
            elif version - update.base > self._parts.max_staleness:
                reason = "stale"
            if reason:
                self.totals = self.totals.add(**{reason: 1})
                island.dropped += 1
                island.dropped_sequences[p] = update.sequence
                return self._answer(island, status=reason)
            waiting.append(update)
            island.loss = update.loss
            late = update.merge < self.merges
            island.late += late
        self.advance()
        with self._lock:
            return self._answer(island, status="late" if late else "accepted")

    def _pull(self, island: Island, request: Request, arrays: Mapping[str, np.ndarray]) -> Message:
        have = request.versions(len(self._model.fragments))
        with self._lock:
            newer = [p for p, state in enumerate(self._model.fragments) if state.version > have[p]]
            if not newer:
                return self._answer(island)
            # The fragment that was merged first. One at a time, so that messages stay small.
            p = min(newer, key=lambda p: self._model.fragments[p].version * len(have) + p)
            state = self._model.fragments[p]
            content = self._model.formats[p].to_arrays(state.params)
            size = sum(array.nbytes for array in content.values())
            self.totals = self.totals.add(sent_bytes=size)
            header = self._answer(
                island, fragment=p, version=state.version, more=len(newer) > 1
            ).header
        return Message(header, content)

    def _note(self, island: Island, request: Request, arrays: Mapping[str, np.ndarray]) -> Message:
        with self._lock:
            island.seconds_per_update = request.number("seconds_per_update")
            return self._answer(island)

    def _member(self, peer: str, request: Request) -> Island | None:
        """Return the island that sent a message; None if it has to join first."""
        name, incarnation = request.text("island"), request.text("incarnation")
        island = self._islands.get(name)
        if island is None:
            return None
        if peer != island.peer or incarnation != island.incarnation:
            known = incarnation in island.incarnations and peer == island.peer
            raise RefusedError(
                f"this process of island {name[:100]!r} was replaced by a newer one. Stop it."
                if known
                else f"island {name[:100]!r} is another process. Join first."
            )
        return island if island.joined else None

    def _answer(self, island: Island, **fields: Any) -> Message:
        saved = {
            str(p): sequence
            for p, (process, sequence) in island.merged.items()
            if process == island.incarnation
        }
        return Message(
            {"status": "ok", "merges": self.merges, "finished": self.finished, "saved": saved}
            | fields
        )

    # Merges.

    def _merge_if_due(self) -> bool:
        with self._lock:
            p = self.merges % len(self._pending)
            if self.finished or not self._is_due(p):
                return False
            waiting, self._pending[p] = self._pending[p], {}
            self._deadline = None
            version = self._model.fragments[p].version
            updates = [update for own in waiting.values() for update in own]
        contributions = [
            self._contribution(p, shard, own) for shard, own in sorted(waiting.items()) if own
        ]
        state, metrics = self._model.merge(p, contributions)
        if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params)):
            raise NonFiniteError(
                f"merge {self.merges + 1} made a parameter of fragment {p} NaN or infinite, "
                "expected finite values. The state before it is saved. Use a smaller outer "
                "learning rate, or a robust aggregator."
            )
        steps = sum(update.steps for update in updates)
        report = MergeReport(
            merge=self.merges + 1,
            islands=tuple(sorted({update.island for update in updates})),
            updates=len(updates),
            late=sum(update.merge < self.merges for update in updates),
            steps=steps,
            tokens=sum(update.tokens for update in updates),
            loss=sum(update.loss * update.steps for update in updates) / steps,
            staleness=max(version - update.base for update in updates),
            metrics=metrics,
        )
        with self._lock:
            for update in updates:
                island = self._islands.get(update.island)
                if island is not None:  # else its shard was given to another island
                    before = island.merged.get(p, ("", 0))
                    sequence = max(update.sequence, before[1] * (before[0] == update.incarnation))
                    island.merged[p] = update.incarnation, sequence
                    island.contributed += 1
            totals = self.totals.add(tokens=report.tokens)
            versions = [fragment.version for fragment in self._model.fragments]
            versions[p] = state.version
            manifest = self._manifest() | {
                "merges": self.merges + 1,
                "versions": versions,
                "totals": totals._asdict(),
            }
        if self._store:
            self._store.log({"merge": report.merge, "fragment": p, "time": time.time()}, updates)
            self._store.save(p, state, manifest)
        with self._lock:
            self._model.put(p, state)
            self.merges, self.totals = self.merges + 1, self.totals.add(tokens=report.tokens)
        self._on_merge(report)
        return True

    def _is_due(self, p: int) -> bool:
        """Return whether fragment p has its quorum and the grace window has ended."""
        on_time = {
            shard
            for shard, updates in self._pending[p].items()
            if any(update.merge >= self.merges for update in updates)
        }
        if len(on_time) < self._parts.quorum:
            self._deadline = None
            return False
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + self._parts.grace_seconds
        alive = {
            island.shard
            for island in self._islands.values()
            if island.state(now, self._heartbeat) in ("starting", "training")
        }
        return now >= self._deadline or alive <= on_time

    def _contribution(self, p: int, shard: int, updates: list[Update]) -> Contribution:
        """Add the updates of one island: its steps since its last part in a merge."""
        decoded = [
            jax.device_get(self._model.decode[p](dict(update.arrays), shard, update.count))
            for update in updates
        ]
        gradient = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *decoded)
        steps, tokens = sum(u.steps for u in updates), sum(u.tokens for u in updates)
        return Contribution(shard, gradient, tokens**2 / steps)

    def _manifest(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "merges": self.merges,
            "versions": [state.version for state in self._model.fragments],
            "islands": {name: island.to_json() for name, island in self._islands.items()},
            "totals": self.totals._asdict(),
        }
