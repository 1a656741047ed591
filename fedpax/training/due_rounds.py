"""The rounds after which to evaluate or to save."""


def is_due(round_number: int, rounds: int, *periods: int) -> bool:
    """Return whether to evaluate, or to save, after a round.

    Example:
        >>> [number for number in range(1, 12) if is_due(number, 11, 5, 4)]
        [4, 5, 8, 10, 11]
    """
    periods = tuple(period for period in periods if period > 0)
    return round_number == rounds or any(round_number % period == 0 for period in periods)


def last_due_before(round_number: int, *periods: int) -> int:
    """Return the last round before a given one that is a multiple of a period; 0 without.

    Example:
        >>> last_due_before(10, 5, 4), last_due_before(4, 5, 4)
        (8, 0)
    """
    before = range(round_number - 1, 0, -1)
    return next((number for number in before if is_due(number, 0, *periods)), 0)
