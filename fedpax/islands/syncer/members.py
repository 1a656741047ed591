"""The islands of a syncer: their identities, merged updates and states."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fedpax.islands.method_parts import describe_other_data
from fedpax.islands.syncer.island_table import IslandReport
from fedpax.transport.calls import RefusedError

State = Literal[
    "starting", "training", "stalled", "silent", "left", "waiting", "finished", "expelled"
]

SILENT_AFTER = 1.75
"""An island is silent after this many heartbeats without a message."""

STALLED_AFTER = 10.0
"""An island that sends heartbeats is stalled after this many times its usual seconds per update."""

LEAST_STALL_SECONDS = 30.0

FREE_SHARD_AFTER = 1800.0
"""Default seconds without a message of an island after which another island can take its shard."""

KNOWN_PROCESSES = 16
"""Processes of an island that the syncer knows. The manifest, saved with each merge, has them."""


@dataclasses.dataclass
class IslandRecord:
    """An island, as the syncer knows it."""

    # Of the saved fields, `merged` keeps a restarted syncer from applying an update a second time.

    name: str
    shard: int | None  # its shard of the data; None after another island has taken it
    peer: str  # the name in its certificate; "" without certificates
    folder: str  # identifies its folder, over all of its processes
    incarnations: list[str]  # identifies its newest processes, the last one last
    # The fingerprint of its data; empty if unknown.
    data: dict[str, str] = dataclasses.field(default_factory=dict)
    # For each fragment, process and sequence number of its newest update in the saved model.
    merged: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    joined: bool = False
    left: bool = False
    expelled: bool = False
    heard_end: bool = False  # whether it has told the syncer that it knows the end of the run
    since: float = 0.0  # time at which the syncer has first heard of it, or was started
    # For each fragment, time of its last part in a merge.
    last_parts: dict[int, float] = dataclasses.field(default_factory=dict)
    last_message: float = 0.0  # time of its last message, on the syncer's clock
    last_step: float = 0.0  # time of the last message with a larger number of steps
    steps: int = 0  # of its process
    steps_before: int = 0  # in the checkpoint with which its process began
    seconds_per_update: float = 0.0  # seconds between its phases of S steps, as it measures them
    loss: float | None = None  # as it reports it
    contributed: int = 0  # updates that were merged
    late: int = 0  # updates in a later merge than theirs
    dropped: int = 0  # updates that were not applied
    # For each fragment, sequence number and reason of its newest dropped update.
    newest_dropped: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        """The newest process."""
        return self.incarnations[-1]

    @property
    def voter(self) -> str:
        """The name that counts in a quorum: of its certificate, or without one its own."""
        return self.peer or self.name

    def saved(self) -> dict[str, int]:
        """Return for each fragment the sequence number of its newest update in the saved model."""
        newest = self.merged.items()
        return {str(p): number for p, (process, number) in newest if process == self.incarnation}

    def last_sequence(self, fragment: int) -> int:
        """Return the largest sequence number of a fragment's merged and dropped updates."""
        process, sequence = self.merged.get(fragment, ("", 0))
        merged = sequence if process == self.incarnation else 0
        dropped, _ = self.newest_dropped.get(fragment, (0, ""))
        return max(merged, dropped)

    def state(self, now: float, heartbeat_seconds: float) -> State:
        """Return the state of the island."""
        if self.expelled:
            return "expelled"
        if self.left:
            return "left"
        if not self.joined or now - self.last_message > SILENT_AFTER * heartbeat_seconds:
            return "silent"
        if self.shard is None:
            return "waiting"
        if not self.steps:
            return "starting"
        limit = max(LEAST_STALL_SECONDS, STALLED_AFTER * self.seconds_per_update)
        return "stalled" if now - self.last_step > limit else "training"

    def saw(self, now: float, steps: int | None = None) -> None:
        """Record a message, and the steps that it reports."""
        self.last_message = now
        if steps is not None and steps > self.steps:
            self.steps, self.last_step = steps, now

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are saved."""
        return {
            "shard": self.shard,
            "peer": self.peer,
            "folder": self.folder,
            "incarnations": list(self.incarnations),
            "data": dict(self.data),
            "merged": {str(p): list(sent) for p, sent in self.merged.items()},
            "contributed": self.contributed,
            "late": self.late,
            "dropped": self.dropped,
            "heard_end": self.heard_end,
            "steps_before": self.steps_before + self.steps,
        }

    @classmethod
    def from_json(cls, name: str, saved: dict[str, Any]) -> "IslandRecord":
        """Restore an island that has not joined yet."""
        merged = {int(p): (process, number) for p, (process, number) in saved["merged"].items()}
        return cls(**{**saved, "name": name, "merged": merged})


class Members:
    """The islands of a run, each with its own shard."""

    # An island keeps its name for the run, and its shard until it is silent for `free_shard_after`
    # seconds and another island asks for a shard.

    def __init__(
        self,
        num_shards: int,
        heartbeat_seconds: float,
        *,
        free_shard_after: float = FREE_SHARD_AFTER,
        per_certificate: int = 1,
        quorum: int = 1,
    ) -> None:
        self._num_shards, self._heartbeat = num_shards, heartbeat_seconds
        self._free_after, self._per_certificate = free_shard_after, per_certificate
        self._quorum = quorum
        self._islands: dict[str, IslandRecord] = {}

    def all_heard_end(self) -> bool:
        """Return whether all islands that joined or have a shard know the end of the run."""
        waiting = (island for island in self if island.joined or island.shard is not None)
        return all(island.heard_end for island in waiting)

    def __iter__(self) -> Iterator[IslandRecord]:
        return iter(self._islands.values())

    def restore(self, saved: Mapping[str, dict[str, Any]], now: float) -> None:
        """Restore islands from the result of `to_json`; none has joined, and each may return."""
        for name, fields in saved.items():
            self._islands[name] = island = IslandRecord.from_json(name, fields)
            island.since = island.last_message = now

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the saved fields of each island."""
        return {name: island.to_json() for name, island in self._islands.items()}

    def update_merged(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Record the merged updates of islands from their newly saved fields."""
        for name, island in self._islands.items():
            if name in saved and saved[name]["folder"] == island.folder:
                now = IslandRecord.from_json(name, saved[name])
                island.merged, island.contributed = now.merged, now.contributed

    def find(self, name: str, peer: str, incarnation: str) -> IslandRecord | None:
        """Return the island that sent a message; None if it has to join first."""
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

    def join(
        self,
        name: str,
        peer: str,
        folder: str,
        incarnation: str,
        shard: int | None,
        now: float,
        data: dict[str, str] | None = None,
    ) -> IslandRecord:
        """Add an island, or the new process of a known one; refuse it if it may not join."""
        # A known island whose shard was taken has the shard None if no shard is free.
        island = self._islands.get(name)
        self._check_data(name, data or {}, now)
        if island is None:
            self._check_certificate(name, peer)
            free = self._find_shard(shard, now)
            if free is None:
                raise RefusedError(self.why_no_shard(shard))
            self._take_shard(free)
            island = self._islands[name] = IslandRecord(
                name, free, peer, folder, [incarnation], since=now
            )
        else:
            self._check_return(island, peer, folder, incarnation, now)
            if island.shard is None and (free := self._find_shard(shard, now)) is not None:
                self._take_shard(free)
                island.shard = free
            if incarnation != island.incarnation:
                island.incarnations.append(incarnation)
                del island.incarnations[:-KNOWN_PROCESSES]
                island.newest_dropped, island.steps = {}, 0
        island.data = data or {}
        island.joined, island.left, island.last_step = True, False, now
        island.saw(now)
        return island

    def reports(self, now: float) -> list[IslandReport]:
        """Return the islands for a table, by shard."""
        return [
            IslandReport(
                island.name,
                "finished"
                if island.heard_end and not island.expelled
                else island.state(now, self._heartbeat),
                island.shard,
                island.steps_before + island.steps,
                island.loss,
                island.contributed,
                island.late,
                island.dropped,
                now - island.last_message if island.joined else None,
                island.voter,
            )
            for island in sorted(self, key=lambda island: (island.shard is None, island.shard or 0))
        ]

    def mark_expelled(self, is_expelled: Callable[[str], bool]) -> bool:
        """Mark the islands of expelled certificates; return whether one has lost its shard."""
        lost = False
        for island in self:
            island.expelled = is_expelled(island.voter)
            if island.expelled and (island.joined or island.shard is not None):
                island.joined, island.shard, lost = False, None, True
        return lost

    def _check_return(
        self, island: IslandRecord, peer: str, folder: str, incarnation: str, now: float
    ) -> None:
        if peer != island.peer:
            raise RefusedError(
                f"island {island.name!r} belongs to the certificate {island.peer!r}, not to "
                f"{peer!r}. Give --name another name."
            )
        if folder != island.folder:
            if island.state(now, self._heartbeat) not in ("silent", "left"):
                raise RefusedError(
                    f"an island called {island.name!r} is training already, in another folder. "
                    "Give --name another name."
                )
            island.folder = folder
        if incarnation in island.incarnations[:-1]:
            raise RefusedError(
                f"this process of island {island.name!r} was replaced by a newer one. Stop it."
            )

    def _check_certificate(self, name: str, peer: str) -> None:
        """Check that a certificate may have one more island, and that a quorum stays possible."""
        joined = sorted(island.name for island in self if peer and island.peer == peer)
        most = self._per_certificate
        if len(joined) >= most:
            raise RefusedError(
                f"the certificate {peer!r} has joined as {', '.join(joined)[:300]}, expected at "
                f"most {most} {'island' if most == 1 else 'islands'} of one certificate. Give "
                f"--name={joined[0]} to return as this island, or start `fedpax syncer` with "
                f"--islands_per_certificate={most + 1}."
            )
        holders = [island for island in self if island.shard is not None]
        voters = {island.voter for island in holders} | {peer or name}
        possible = len(voters) + max(self._num_shards - len(holders) - 1, 0)
        if joined and possible < self._quorum:
            raise RefusedError(
                f"with island {name!r} of the certificate {peer!r}, at most {possible} "
                f"certificates could train, expected at least the quorum of {self._quorum}. Leave "
                "the shard to another certificate, or start a run with a smaller quorum."
            )

    def _check_data(self, name: str, data: dict[str, str], now: float) -> None:
        for island in self:
            keeps = island.shard is not None and now - island.last_message <= self._free_after
            if keeps and island.name != name:
                if other := describe_other_data(name, data, island.name, island.data):
                    raise RefusedError(other)

    def why_no_shard(self, wanted: int | None) -> str:
        """Return the reason for which an island gets no shard, with the remedy."""
        holders = sorted(island.name for island in self if island.shard is not None)
        held = f"shard {wanted} is" if wanted is not None else f"all {self._num_shards} shards are"
        return (
            f"{held} in use by other islands ({', '.join(holders)[:300]}). Wait until one leaves: "
            f"its shard is free after {self._free_after:g} s without a message "
            "(--free_shard_after of `fedpax syncer`). Or start a run with more --islands."
        )

    def _find_shard(self, wanted: int | None, now: float) -> int | None:
        """Return a shard that no island has, else the shard of the longest silent island."""
        count = self._num_shards
        if wanted is not None and wanted >= count:
            raise RefusedError(
                f"--shard={wanted} is no shard of this run, expected 0 to {count - 1}. Leave out "
                "--shard to take a free one."
            )
        heard = {island.shard: island.last_message for island in self if island.shard is not None}
        taken = {k for k, last in heard.items() if now - last <= self._free_after}
        free = [k for k in range(count) if k not in taken and wanted in (None, k)]
        return min(free, key=lambda k: heard.get(k, -math.inf), default=None)

    def _take_shard(self, shard: int) -> None:
        for island in self:
            if island.shard == shard:
                island.shard = None


def note_merged(island: dict[str, Any], fragment: int, incarnation: str, sequence: int) -> None:
    """Record in an entry of `Members.to_json`, in place, that an update is in the saved model."""
    process, number = island["merged"].get(str(fragment), ("", 0))
    newest = max(sequence, number) if process == incarnation else sequence
    island["merged"][str(fragment)] = [incarnation, newest]
    island["contributed"] += 1


# ---- the epochs of a run: which merges of an island are in the history of the syncer's state

KEPT = 64
"""Epochs that the manifest has, which is saved with each merge."""


class Epochs:
    """The processes of a syncer, each with a random name and the merge after which it started."""

    # A syncer that restores an older copy of its state loses merges that islands have. The merges
    # of an island are in the history if the epoch in which it last joined is, and had as many
    # merges before the next one began.

    def __init__(
        self, num_fragments: int, saved: Sequence[tuple[str, int]] = (), merges: int = 0
    ) -> None:
        self._num_fragments = num_fragments
        self._epochs = [(name, start) for name, start in saved][1 - KEPT :]
        self._epochs.append((secrets.token_hex(8), merges))

    @property
    def current(self) -> str:
        """The name of the current epoch."""
        return self._epochs[-1][0]

    def include(self, name: str | None, versions: Sequence[int] | None, merges: int) -> bool:
        """Return whether an island's merges are in this history; None: it has none yet."""
        if name is None or versions is None:
            return True
        newest = max(
            (version - 1) * self._num_fragments + p + 1 if version > 0 else 0
            for p, version in enumerate(versions)
        )
        ends = [*(start for _, start in self._epochs[1:]), merges]
        return any(
            name == known and newest <= end
            for (known, _), end in zip(self._epochs, ends, strict=True)
        )

    def to_json(self) -> list[list[str | int]]:
        """Return the epochs as JSON values."""
        return [list(epoch) for epoch in self._epochs]
