"""The rounds after which a run evaluates and saves."""


def is_due(round_number: int, rounds: int, *periods: int) -> bool:
    """Return whether an action that runs every few rounds, and after the last, runs now.

    Args:
        round_number: the round.
        rounds: the last round.
        *periods: rounds between two runs of the action; 0: never.

    Example:
        >>> [number for number in range(1, 12) if is_due(number, 11, 5, 4)]
        [4, 5, 8, 10, 11]
    """
    periods = tuple(period for period in periods if period > 0)
    return round_number == rounds or any(round_number % period == 0 for period in periods)


def last_due_before(round_number: int, *periods: int) -> int:
    """Return the last round before a given one after which an action runs, 0 if there is none.

    Args:
        round_number: the round.
        *periods: rounds between two runs of the action; 0: never.

    Example:
        >>> last_due_before(10, 5, 4), last_due_before(4, 5, 4)
        (8, 0)
    """
    before = range(round_number - 1, 0, -1)
    return next((number for number in before if is_due(number, 0, *periods)), 0)
