"""An island: takes inner steps, sends its progress, and adds the merged fragments to its model."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax

from fedpax.algorithm import AlgorithmParts, Report, most_phases_ahead
from fedpax.islands.island.link import Link, SyncerStatus
from fedpax.islands.island.local_model import LocalModel, LocalState
from fedpax.islands.island.progress_ledger import Ledger
from fedpax.islands.island.shared_link import SharedLink


class Island:
    """The training of one island, one phase of S inner steps at a time."""

    # Only `finish` waits for the network. An island of several processes has an object of this
    # class in each of them: which programs it dispatches depends on the status alone, which is the
    # same in all processes. `process` is the `incarnation` of its messages. `on_discard` is called
    # with the number of unsent steps that are discarded, because the syncer has restored an older
    # state.

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
        # If a fragment's newest update at the syncer (`received`) is not the newest one of the
        # saved ledger, the fragment loses its unsent progress: a part of it may have been sent
        # since the save. The island then sends the fragment that the syncer merges next, although
        # the ledger can count it as sent: the update can be lost with a syncer that has ended.
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
        # The devices compute the phase while the arrays of the previous phase are sent. The report
        # that is returned may still be computed.
        self.state, report = self._model.take_steps(self.state, batches, start, *frozen)
        self._report = report
        self.steps += self._parts.steps_per_sync
        self._phases_since_merge += 1
        self.ledger.add_steps(self._parts.steps_per_sync, self._parts.steps_per_sync * self._tokens)
        # The devices have their next steps now. The poll comes last before the former update is
        # sent, which the status would count as not acknowledged.
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
