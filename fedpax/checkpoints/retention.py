"""A rule for the checkpoints that a run keeps."""

import dataclasses
from collections.abc import Sequence

import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class Retention(ocp.checkpoint_managers.PreservationPolicy):
    """A rule that says which checkpoints are kept when a new one is saved.

    Attributes:
        newest: number of the newest checkpoints that are kept.
        every: checkpoints of rounds that are a multiple of it are kept too. Default 0: none.
        scheduled: for each of these numbers, the newest checkpoint of a round that is a multiple of
            it is kept too, however many are saved after it: a roll back returns to it, or an export
            reads it. 0 and the default (): none.
        best: rounds whose checkpoints are kept too; the training changes the set.

    Example:
        >>> Retention(newest=2, scheduled=(4,)).keeps([4, 8, 9, 10, 11])
        [False, True, False, True, True]
        >>> Retention(newest=1, every=4).keeps([4, 8, 9, 10, 11])
        [True, True, False, False, True]
    """

    newest: int
    every: int = 0
    scheduled: tuple[int, ...] = ()
    best: set[int] = dataclasses.field(default_factory=set, hash=False)

    def keeps(self, rounds: Sequence[int]) -> list[bool]:
        """Return for each checkpoint whether it is kept.

        Args:
            rounds: the rounds of all checkpoints, in increasing order.
        """
        kept = {*rounds[-self.newest :], *self.best}
        if self.every:
            kept.update(number for number in rounds if number % self.every == 0)
        for period in filter(None, self.scheduled):
            kept.update([number for number in rounds if number % period == 0][-1:])
        return [number in kept for number in rounds]

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Return for each checkpoint whether it is kept; Orbax calls this.

        Args:
            checkpoints: all checkpoints, in increasing order of their rounds.
            context: not used.
        """
        return self.keeps([checkpoint.step for checkpoint in checkpoints])
