"""An island: takes inner steps, sends its progress, and adds the merged fragments to its model."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax

from fedpax.algorithm import AlgorithmParts, Report, most_phases_ahead
from fedpax.islands.island.link import JoinReply, Link, ReceivedFragment, SyncerStatus
from fedpax.islands.island.local_model import LocalModel, LocalState
from fedpax.preemption import PreemptionGuard
from fedpax.processes.communication import ControlChannel
from fedpax.transport.calls import DisconnectedError, RefusedError

SECONDS_BETWEEN_JOINS = 0.2


class SharedLink:
    """The link to the syncer, as all processes of an island see it."""

    # The other processes receive the status of process 0 over the control channel, so that all
    # dispatch the same programs in the same order. All must call `join` and `poll` at the same
    # points.

    def __init__(
        self, link: Link | None, channel: ControlChannel, preemption: PreemptionGuard
    ) -> None:
        self._link, self._channel, self._preemption = link, channel, preemption
        self._count = itertools.count()

    @property
    def transferred_bytes(self) -> int:
        """Bytes that this process has sent to the syncer and received from it."""
        return 0 if self._link is None else self._link.sent_bytes + self._link.received_bytes

    def join(
        self, on_wait: Callable[[DisconnectedError], None], seconds: float
    ) -> JoinReply | None:
        """Join the syncer; None if none answers within `seconds`, or a signal asks to stop."""
        # Process 0 calls `on_wait` after each attempt without an answer.
        while not self._preemption.should_stop(next(self._count)):
            try:
                fields = self._share(lambda link: link.join()._asdict())
            except DisconnectedError as error:
                on_wait(error)
                fields = self._channel.broadcast(None)
                time.sleep(min(SECONDS_BETWEEN_JOINS, seconds))
            if fields is not None:
                return _read_reply(fields)
            if self.poll().silent_seconds >= seconds:
                break
        return None

    def start(self) -> None:
        """Start to exchange, in threads of process 0."""
        if self._link is not None:
            self._link.start()

    def poll(self) -> SyncerStatus:
        """Return the status of process 0's link, in all processes."""
        stop = self._preemption.should_stop(next(self._count))
        fragments: list[ReceivedFragment] = []

        def poll(link: Link) -> dict[str, Any]:
            status = link.poll()
            fragments.extend(status.fragments)
            return status._replace(fragments=[f._replace(arrays=None) for f in fragments])._asdict()

        status = SyncerStatus(**self._share(poll))
        if self._link is None:
            fragments = [ReceivedFragment(*fragment) for fragment in status.fragments]
        return status._replace(fragments=fragments, stop=stop)

    def _share(self, ask: Callable[[Link], dict[str, Any]]) -> Any:
        """Return process 0's answer of the link in all processes, and raise its refusal in all."""
        if self._link is None:
            answer = self._channel.broadcast(None)
            if answer is not None and "refusal" in answer:
                raise RefusedError(answer["refusal"])
            return answer
        try:
            return self._channel.broadcast(ask(self._link))
        except RefusedError as error:
            self._channel.broadcast({"refusal": str(error)})
            raise

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a fragment in process 0; other processes wait in `poll`."""
        if self._link is not None:
            self._link.wait(seconds)

    def prepare(self, arrays: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Start to copy the arrays of an update to process 0's host; none in other processes."""
        return {} if self._link is None else self._link.prepare(arrays)

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Queue an update for sending, in process 0."""
        if self._link is not None:
            self._link.send(header, arrays)

    def report(self, steps: int, seconds_per_update: float) -> None:
        """Set the numbers that the heartbeats of process 0 report."""
        if self._link is not None:
            self._link.report(steps, seconds_per_update)

    def drain(self, seconds: float) -> None:
        """Wait at most `seconds` until the syncer has received the queued updates."""
        if self._link is not None:
            self._link.drain(seconds)

    def close(self) -> None:
        """Stop to exchange, and tell the syncer that the island leaves."""
        if self._link is not None:
            self._link.close()


def _read_reply(fields: Mapping[str, Any]) -> JoinReply:
    """Read a reply from JSON, which has texts as keys and lists instead of tuples."""
    received = {int(p): (process, n) for p, (process, n) in fields["received"].items()}
    return JoinReply(**{**fields, "received": received})


class Island:
    """The training of one island, one phase of S inner steps at a time."""

    # Only `finish` waits for the network. `on_discard` is called with the number of unsent steps
    # that are discarded, because the syncer has restored an older state.

    def __init__(
        self,
        parts: AlgorithmParts,
        model: LocalModel,
        link: Link | SharedLink,
        *,
        shard: int,
        process: str,
        tokens_per_step: float,
        on_discard: Callable[[int], None] = lambda steps: None,
    ) -> None:
        self._on_discard = on_discard
        self._parts, self._model, self._link = parts, model, link
        self.shard, self._process, self._tokens = shard, process, tokens_per_step
        self._phases_since_merge = 0
        self._clock = time.monotonic()
        self._unsent: list[tuple[dict[str, Any], Mapping[str, Any], Report]] = []
        self._report: Report | None = None  # of the phase that has not sent a fragment yet
        self.ledger = Ledger(len(model.formats), parts.steps_per_sync)
        self.state: LocalState = model.init()
        self.status = SyncerStatus()
        self.steps = 0
        self.dropped: dict[str, int] = {}

    @property
    def is_ahead(self) -> bool:
        """Tell whether another phase would exceed the limit of steps without a merge."""
        return self._phases_since_merge >= most_phases_ahead(self._parts)

    @property
    def has_model(self) -> bool:
        """Tell whether all fragments of the outer model have arrived."""
        return min(self.ledger.versions()) >= 0

    def must_stop(self) -> bool:
        """Tell whether the syncer has finished, or a signal asks the island to stop."""
        return self.status.finished or self.status.stop

    def restore(
        self, state: LocalState, ledger: Mapping[str, Any], received: Mapping[int, tuple[str, int]]
    ) -> None:
        """Restore a saved state, without the progress that the syncer may have already."""
        # A fragment whose newest update at the syncer (`received`) is not the ledger's loses its
        # unsent progress: a part of it may have been sent since the save. The island then sends the
        # fragment that the syncer merges next, even if the ledger counts it as sent: a syncer that
        # has ended can have lost it.
        self.ledger.restore(dict(ledger))
        fragments = self.ledger.fragments
        changed = frozenset(
            p
            for p, fragment in enumerate(fragments)
            if received.get(p, ("", 0)) != fragment.last_sent
        )
        self.state = self._model.forget(state, changed)
        for p in changed:
            fragments[p].forget()
        if changed:
            self.ledger.last_merge = -1

    def receive(self) -> None:
        """Poll the link, and add the fragments that have arrived to the model."""
        self.status = self._link.poll()
        if self.status.shard is not None:
            self.shard = self.status.shard
        if self.status.discard:
            self._discard()
        self.ledger.epoch = self.status.epoch
        for reason, merge in self.status.dropped:
            self.ledger.was_dropped(merge)
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            self._phases_since_merge = 0  # it waits for a merge that needs another update
        for fragment in self.status.fragments:
            self.state = self._model.receive(self.state, fragment.number, fragment.arrays)
            self.ledger.received(fragment.number, fragment.version)
            self._phases_since_merge = 0

    def _discard(self) -> None:
        """Discard what belongs to merges that the syncer has lost; its model comes anew."""
        self._on_discard(max(fragment.steps for fragment in self.ledger.fragments))
        self.state = self._model.forget(self.state, frozenset(range(len(self.ledger.fragments))))
        self.ledger.discard()
        self._unsent, self._report, self._phases_since_merge = [], None, 0

    def train(self, batches: chex.ArrayTree, start: int = 0, *frozen: Any) -> Report:
        """Take the S inner steps of a phase from batch `start` on; send a fragment if it is due."""
        # The devices compute the phase while the previous phase's arrays are sent.
        self.state, report = self._model.take_steps(self.state, batches, start, *frozen)
        self._report = report
        self.steps += self._parts.steps_per_sync
        self._phases_since_merge += 1
        self.ledger.add_steps(self._parts.steps_per_sync, self._parts.steps_per_sync * self._tokens)
        # The poll comes before the former update is sent, which the status would count as not
        # acknowledged.
        jax.block_until_ready([before.metrics["loss"] for *_, before in self._unsent])
        self.receive()
        self._hand_over()
        self.send()
        now = time.monotonic()
        self._link.report(self.steps, now - self._clock)
        self._clock = now
        return report

    def send(self) -> None:
        """Encode the fragment of the next merge, once per phase and if the link is free."""
        if self._report is None or self._unsent or not self.status.can_send:
            return
        count = len(self.ledger.fragments)
        merge = self.ledger.next_merge(self.status.merges)
        if merge is not None and self.ledger.fragments[merge % count].steps:
            self._encode(merge % count, merge)
        starved = self.ledger.starved_fragment(but=None if merge is None else merge % count)
        if starved is not None:
            self._encode(starved, None)
        if self._unsent:
            self._report = None
        if self.is_ahead:
            self._hand_over()

    def _encode(self, p: int, merge: int | None) -> None:
        """Dispatch the encoding of fragment p behind the steps so far."""
        assert self._report is not None
        fragment = self.ledger.fragments[p]
        header = {
            "fragment": p,
            "target": merge,
            # A fragment that is sent beside counts as late.
            "merge": max(self.status.merges - 1, 0) if merge is None else merge,
            "shard": self.shard,  # of its encoding, also if it is sent from another one
            "count": fragment.version,
            "base": fragment.base,
            "tokens": fragment.tokens,
            "update_steps": fragment.steps,
        }
        self.state, arrays = self._model.encode(self.state, p, self.shard, fragment.version)
        self.ledger.sent(p, self._process, merge)
        header["sequence"] = self.ledger.sequence
        self._unsent.append((header, self._link.prepare(arrays), self._report))

    def finish(self, seconds: float) -> None:
        """Send the encoded updates, and wait at most `seconds` until the syncer has them."""
        self._hand_over()
        self._link.drain(seconds)

    def _hand_over(self) -> None:
        """Give the encoded updates to the link, with the loss of their last phase."""
        for header, arrays, report in self._unsent:
            loss = float(report.metrics["loss"])
            self._link.send({**header, "loss": loss if abs(loss) < float("inf") else None}, arrays)
        self._unsent = []


@dataclasses.dataclass
class FragmentLedger:
    """The progress of one fragment."""

    # Number of merges of the outer parameters; -1 for none yet.
    version: int = -1
    base: int = -1  # the version at the first unsent step
    steps: int = 0
    tokens: float = 0.0
    last_sent: tuple[str, int] = ("", 0)  # process and sequence number

    def forget(self) -> None:
        """Count no step as unsent."""
        self.steps, self.tokens, self.base = 0, 0.0, self.version


class Ledger:
    """The progress of all fragments, and the rule that chooses the fragment to send next."""

    # A late island skips to the syncer's merge. A fragment not sent for two rounds of its own steps
    # is sent in addition.

    def __init__(self, num_fragments: int, steps_per_sync: int) -> None:
        self.fragments = [FragmentLedger() for _ in range(num_fragments)]
        self.sequence = 0
        self.last_merge = -1
        self.epoch: str | None = None
        self._starved = 2 * num_fragments * steps_per_sync

    def add_steps(self, steps: int, tokens: float) -> None:
        """Count inner steps and their tokens."""
        for fragment in self.fragments:
            fragment.steps += steps
            fragment.tokens += tokens

    def next_merge(self, merges: int) -> int | None:
        """Return the merge of the next update; None if it is too early for an update."""
        merge = max(self.last_merge + 1, merges)
        return merge if merge <= merges + 1 else None

    def starved_fragment(self, but: int | None) -> int | None:
        """Return a fragment, other than `but`, that was not sent for two rounds, or None."""
        starved = [
            p
            for p, fragment in enumerate(self.fragments)
            if p != but and fragment.steps >= self._starved
        ]
        return max(starved, key=lambda p: self.fragments[p].steps, default=None)

    def sent(self, p: int, process: str, merge: int | None) -> None:
        """Record that an update of fragment p was made."""
        self.sequence += 1
        self.fragments[p].last_sent = process, self.sequence
        self.fragments[p].forget()
        if merge is not None:
            self.last_merge = merge

    def was_dropped(self, merge: int | None) -> None:
        """Record that the syncer dropped the update for a merge: the merge needs another one."""
        if merge is not None:
            self.last_merge = min(self.last_merge, merge - 1)

    def received(self, p: int, version: int) -> None:
        """Record outer parameters of fragment p."""
        fragment = self.fragments[p]
        fragment.version = version
        if not fragment.steps:
            fragment.base = version

    def discard(self) -> None:
        """Forget the unsent steps, and the outer parameters that the island has."""
        for fragment in self.fragments:
            fragment.version = -1
            fragment.forget()
        self.last_merge = -1

    def versions(self) -> list[int]:
        """Return the version of each fragment."""
        return [fragment.version for fragment in self.fragments]

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        return {
            "sequence": self.sequence,
            "last_merge": self.last_merge,
            "epoch": self.epoch,
            "fragments": [dataclasses.asdict(fragment) for fragment in self.fragments],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore a ledger from the result of `to_json`."""
        self.sequence, self.last_merge = saved["sequence"], saved["last_merge"]
        self.epoch = saved.get("epoch")
        self.fragments = [
            FragmentLedger(**{**fragment, "last_sent": tuple(fragment["last_sent"])})
            for fragment in saved["fragments"]
        ]
