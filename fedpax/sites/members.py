"""The islands of a syncer: who they are, what they have sent, and whether they are alive."""

import dataclasses
from typing import Any, Literal

State = Literal["starting", "training", "stalled", "silent", "left"]

SILENT_AFTER = 1.75
"""An island is silent after this many heartbeats without a message."""

STALLED_AFTER = 10.0
"""An island that sends heartbeats is stalled after this many times its usual seconds per update."""

LEAST_STALL_SECONDS = 30.0


@dataclasses.dataclass
class Island:
    """An island, as the syncer knows it.

    The first group of fields is saved with the model, so that a syncer that restarts applies no
    update a second time. The other fields describe the present.

    Attributes:
        name: its name.
        shard: its shard of the data.
        peer: the name in its certificate; "" without certificates.
        folder: identifies the folder that it trains in, over all its processes.
        incarnations: identifies each of its processes, the newest last.
        merged: for each fragment, process and sequence number of its newest update in the saved
            model.
        joined: whether its newest process has joined this syncer process.
        left: whether it has said goodbye.
        last_message: when its last message came, on the syncer's clock.
        last_step: when its number of steps last grew.
        steps: inner steps of its process.
        seconds_per_update: seconds between its updates, as it measures them.
        loss: its training loss, as it reports it.
        contributed: updates that were merged.
        late: updates that came after their merge; they are part of a later one.
        dropped: updates that were not applied.
        dropped_sequences: for each fragment, the sequence number of the newest dropped update.
    """

    name: str
    shard: int
    peer: str
    folder: str
    incarnations: list[str]
    merged: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    joined: bool = False
    left: bool = False
    last_message: float = 0.0
    last_step: float = 0.0
    steps: int = 0
    seconds_per_update: float = 0.0
    loss: float | None = None
    contributed: int = 0
    late: int = 0
    dropped: int = 0
    dropped_sequences: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        """The newest process."""
        return self.incarnations[-1]

    def last_sequence(self, fragment: int) -> int:
        """Return the newest sequence number of a fragment that needs no other treatment."""
        process, sequence = self.merged.get(fragment, ("", 0))
        merged = sequence if process == self.incarnation else 0
        return max(merged, self.dropped_sequences.get(fragment, 0))

    def state(self, now: float, heartbeat_seconds: float) -> State:
        """Return what the island does now.

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
            "incarnations": self.incarnations,
            "merged": {str(p): list(sent) for p, sent in self.merged.items()},
            "contributed": self.contributed,
            "late": self.late,
            "dropped": self.dropped,
        }

    @classmethod
    def from_json(cls, name: str, saved: dict[str, Any]) -> "Island":
        """Restore an island that has not joined yet."""
        merged = {int(p): (process, number) for p, (process, number) in saved["merged"].items()}
        return cls(**{**saved, "name": name, "merged": merged})
