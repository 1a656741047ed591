"""The inner steps that an island can have taken, by which the steps that it claims are limited."""


class StepCredit:
    """The inner steps that an island can have taken and not yet sent, fragment by fragment."""

    # An island takes at most M phases of S steps after a merge that it has received, and then
    # waits. So with each merge of the run, M S steps are added to the credit of each fragment; an
    # update takes its steps from it. No island that keeps to the protocol exceeds its credit,
    # however fast it is: it starts with one merge more than it needs. The credit stays below P + 2
    # merges, because each fragment is sent at least once in P merges that the island receives. It
    # starts full if the island can have unsent steps from earlier (`returns`), as after a restart
    # of the syncer.

    def __init__(
        self, num_fragments: int, steps_per_merge: int, merges: int, *, returns: bool
    ) -> None:
        self._per_merge, self._most = steps_per_merge, (num_fragments + 2) * steps_per_merge
        self._left = [self._most if returns else 2 * steps_per_merge] * num_fragments
        self._merges = [merges] * num_fragments

    def add_merge(self) -> None:
        """Add a merge to each fragment: an island that hears of a dropped update trains on too."""
        self._left = [min(left + self._per_merge, self._most) for left in self._left]

    def take(self, fragment: int, steps: int, merges: int) -> int:
        """Take the steps that an update claims; return how many count: at least 1."""
        earned = (merges - self._merges[fragment]) * self._per_merge
        left = min(self._left[fragment] + earned, self._most)
        counted = max(min(steps, left), 1)
        self._left[fragment], self._merges[fragment] = max(left - counted, 0), merges
        return counted


class StepCredits(dict[str, StepCredit]):
    """The credit of each island, by name."""

    def __init__(self, num_fragments: int, steps_per_merge: int) -> None:
        super().__init__()
        self._sizes = num_fragments, steps_per_merge

    def add(self, island: str, merges: int, *, returns: bool) -> None:
        """Begin the credit of an island."""
        self[island] = StepCredit(*self._sizes, merges, returns=returns)
