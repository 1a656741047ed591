"""A limit of the joins of each certificate: a join waits for a merge, and writes to the disk."""

JOINS_AT_ONCE = 20
SECONDS_PER_JOIN = 0.1


class JoinLimit:
    """Counts joins, so that one certificate leaves other certificates time to merge."""

    # Each island may join JOINS_AT_ONCE times at once, and then every SECONDS_PER_JOIN. An island
    # that waits for a shard asks half as often.

    def __init__(self, islands_per_certificate: int = 1) -> None:
        self._seconds = SECONDS_PER_JOIN / islands_per_certificate
        self._most = JOINS_AT_ONCE * SECONDS_PER_JOIN + self._seconds / 2  # against rounding
        self._until: dict[str, float] = {}  # by certificate: when its joins so far are paid off

    def count(self, peer: str, now: float) -> bool:
        """Count a join of a certificate; False if it comes too early, and is not counted."""
        if not peer:  # no certificates: all peers are on this machine
            return True
        until = max(self._until.get(peer, now), now) + self._seconds
        if until - now > self._most:
            return False
        self._until[peer] = until
        return True
