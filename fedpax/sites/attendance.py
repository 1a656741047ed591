"""The sites that rounds wait for: sites that have not missed several deadlines."""

import math
from collections import Counter

from fedpax.sites.tasks import Task

MOST_MISSED = 3
"""Default number of missed deadlines after which a site is not waited for."""

LATE = "it did not answer in time"
"""The fault of a site that misses the deadline of a task."""


class Attendance:
    """The deadlines that a site has missed, by the kind of the task.

    A missed deadline counts 1, and a round that the site was part of takes 1 back: a site that
    answers every other round is waited for. A late answer is in time if the task ended early,
    because the site was not waited for: such a site is waited for once more.
    """

    def __init__(self) -> None:
        self.missed: Counter[str] = Counter()
        # Token and stage -> kind and deadline, of tasks that have ended before their deadlines.
        self._owed: dict[tuple[str, int], tuple[str, float]] = {}

    def miss(self, task: Task, now: float, *, deadline: float, most: int) -> None:
        """Note that a task has ended without this site's answer; at most `most` misses count."""
        if now >= deadline:
            self.missed[task.kind] = min(self.missed[task.kind] + 1, most)
            return
        self._owed = {place: owed for place, owed in self._owed.items() if now <= owed[1]}
        self._owed[task.token, task.header["stage"]] = task.kind, deadline

    def take_part(self, kind: str) -> None:
        """Note that this site was part of a round or an evaluation."""
        self.missed[kind] = max(0, self.missed[kind] - 1)

    def answer_late(self, token: str, stage: int, now: float) -> None:
        """Note an answer to a task that has ended."""
        kind, deadline = self._owed.pop((token, stage), ("", -math.inf))
        if now <= deadline:
            self.take_part(kind)
