"""The islands of a syncer: their identities, merged updates and states."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from fedpax.sites.transport import RefusedError

State = Literal["starting", "training", "stalled", "silent", "left", "finished"]

SILENT_AFTER = 1.75
"""An island is silent after this many heartbeats without a message."""

STALLED_AFTER = 10.0
"""An island that sends heartbeats is stalled after this many times its usual seconds per update."""

LEAST_STALL_SECONDS = 30.0

KNOWN_PROCESSES = 16
"""Processes of an island that the syncer knows. The manifest, saved with each merge, has them."""


@dataclasses.dataclass
class Island:
    """An island, as the syncer knows it.

    `to_json` returns the fields that are saved with the model, so that a restarted syncer applies
    no update a second time. The other fields describe the current processes.

    Attributes:
        name: its name.
        shard: its shard of the data.
        peer: the name in its certificate; "" without certificates.
        folder: identifies its folder, over all of its processes.
        incarnations: identifies its newest processes, the last one last.
        merged: for each fragment, process and sequence number of its newest update in the saved
            model.
        joined: whether its newest process has joined this syncer process.
        left: whether it has told the syncer that it leaves.
        heard_end: whether it has told the syncer that it knows the end of the run.
        last_message: time of its last message, on the syncer's clock.
        last_step: time of the last message with a larger number of steps.
        steps: inner steps of its process.
        seconds_per_update: seconds between its phases of S steps, as it measures them.
        loss: its training loss, as it reports it.
        contributed: number of updates that were merged.
        late: number of updates that arrived after their merge and are part of a later one.
        dropped: number of updates that were not applied.
        newest_dropped: for each fragment, sequence number and reason of its newest dropped update.
    """

    name: str
    shard: int
    peer: str
    folder: str
    incarnations: list[str]
    merged: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    joined: bool = False
    left: bool = False
    heard_end: bool = False
    last_message: float = 0.0
    last_step: float = 0.0
    steps: int = 0
    seconds_per_update: float = 0.0
    loss: float | None = None
    contributed: int = 0
    late: int = 0
    dropped: int = 0
    newest_dropped: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        """The newest process."""
        return self.incarnations[-1]

    def last_sequence(self, fragment: int) -> int:
        """Return the largest sequence number of a fragment's merged and dropped updates."""
        process, sequence = self.merged.get(fragment, ("", 0))
        merged = sequence if process == self.incarnation else 0
        dropped, _ = self.newest_dropped.get(fragment, (0, ""))
        return max(merged, dropped)

    def state(self, now: float, heartbeat_seconds: float) -> State:
        """Return the state of the island.

        Args:
            now: the time on the syncer's clock.
            heartbeat_seconds: seconds between its heartbeats.
        """
        if self.left:
            return "left"
        if not self.joined or now - self.last_message > SILENT_AFTER * heartbeat_seconds:
            return "silent"
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
            "merged": {str(p): list(sent) for p, sent in self.merged.items()},
            "contributed": self.contributed,
            "late": self.late,
            "dropped": self.dropped,
            "heard_end": self.heard_end,
        }

    @classmethod
    def from_json(cls, name: str, saved: dict[str, Any]) -> "Island":
        """Restore an island that has not joined yet."""
        merged = {int(p): (process, number) for p, (process, number) in saved["merged"].items()}
        return cls(**{**saved, "name": name, "merged": merged})


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


class Members:
    """The islands of a run, each with a shard of its own.

    Args:
        num_shards: number of shards, and the largest number of islands.
        heartbeat_seconds: seconds between an island's heartbeats.
    """

    def __init__(self, num_shards: int, heartbeat_seconds: float) -> None:
        self._num_shards, self._heartbeat = num_shards, heartbeat_seconds
        self._islands: dict[str, Island] = {}

    def __iter__(self) -> Iterator[Island]:
        return iter(self._islands.values())

    def restore(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Restore islands, none of which has joined, from the result of `to_json`."""
        for name, island in saved.items():
            self._islands[name] = Island.from_json(name, island)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the saved fields of each island."""
        return {name: island.to_json() for name, island in self._islands.items()}

    def update_merged(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Record the merged updates of islands from their newly saved fields."""
        for name, island in self._islands.items():
            if name in saved and saved[name]["folder"] == island.folder:
                now = Island.from_json(name, saved[name])
                island.merged, island.contributed = now.merged, now.contributed

    def find(self, name: str, peer: str, incarnation: str) -> Island | None:
        """Return the island that sent a message.

        Args:
            name: its name.
            peer: the name in its certificate.
            incarnation: its process.

        Returns:
            The island; None if it has to join first.

        Raises:
            RefusedError: another process or another site has joined under this name.
        """
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
    ) -> Island:
        """Add an island, or the new process of a known one.

        Args:
            name: its name.
            peer: the name in its certificate.
            folder: identifies its folder.
            incarnation: its process.
            shard: the shard that it asks for; None: any free one.
            now: the time on the syncer's clock.

        Returns:
            The island.

        Raises:
            RefusedError: the name or all shards are taken, or the process was replaced.
        """
        island = self._islands.get(name)
        if island is None:
            shard = self._free_shard(shard, now)
            island = self._islands[name] = Island(name, shard, peer, folder, [incarnation])
        else:
            self._check_return(island, peer, folder, incarnation, now)
            if incarnation != island.incarnation:
                island.incarnations.append(incarnation)
                del island.incarnations[:-KNOWN_PROCESSES]
                island.newest_dropped, island.steps = {}, 0
        island.joined, island.left, island.last_step = True, False, now
        island.saw(now)
        return island

    def reports(self, now: float) -> list[IslandReport]:
        """Return the islands for a table, by shard."""
        return [
            IslandReport(
                island.name,
                "finished" if island.heard_end else island.state(now, self._heartbeat),
                island.shard,
                island.steps,
                island.loss,
                island.contributed,
                island.late,
                island.dropped,
                now - island.last_message if island.joined else math.inf,
            )
            for island in sorted(self, key=lambda island: island.shard)
        ]

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

    def _free_shard(self, wanted: int | None, now: float) -> int:
        count = self._num_shards
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


def note_merged(island: dict[str, Any], fragment: int, incarnation: str, sequence: int) -> None:
    """Record in the saved fields of an island that an update is in the saved model.

    Args:
        island: an entry of `Members.to_json`; changed in place.
        fragment: the update's fragment.
        incarnation: the process that sent it.
        sequence: its sequence number.
    """
    process, number = island["merged"].get(str(fragment), ("", 0))
    newest = max(sequence, number) if process == incarnation else sequence
    island["merged"][str(fragment)] = [incarnation, newest]
    island["contributed"] += 1
