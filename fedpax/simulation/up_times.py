"""Times at which participants are up, for a simulation that looks at one of them at a time."""

from bisect import bisect_right

import numpy as np

from fedpax.simulation.trace import Trace

TRIES = 32
"""Number of draws of an idle client before all idle clients are looked at."""


class UpTimes:
    """Times at which each participant of a trace is up.

    They are lists, because reading single entries of an array is slower.
    """

    def __init__(self, trace: Trace) -> None:
        self.has_failures = trace.downtimes.shape[1] > 0
        self._failures = trace.downtimes[..., 0].tolist()
        self._returns = trace.downtimes[..., 1].tolist()

    def next_up(self, client: int, now: float) -> float:
        """Return `now` if the client is up, or else when it returns."""
        after = bisect_right(self._failures[client], now)
        return max(now, self._returns[client][after - 1]) if after else now

    def next_failure(self, client: int, now: float) -> float:
        """Return when a client that is up fails next; infinity for never."""
        failures = self._failures[client]
        after = bisect_right(failures, now)
        return failures[after] if after < len(failures) else np.inf

    def next_event(self, client: int, now: float, duration: float) -> tuple[float, bool]:
        """Return when work that begins now ends and True, or when the client returns and False."""
        up = self.next_up(client, now)
        if up > now:
            return up, False
        end, failure = now + duration, self.next_failure(client, now)
        return (self.next_up(client, failure), False) if failure < end else (end, True)

    def draw(self, idle: list[int], now: float, uniforms: list[float]) -> int:
        """Draw the place in `idle` of a client that is up; -1 if there is none."""
        if not self.has_failures:
            return int(uniforms.pop() * len(idle))
        for _ in range(TRIES):
            place = int(uniforms.pop() * len(idle))
            if self.next_up(idle[place], now) <= now:
                return place
        up = [k for k, client in enumerate(idle) if self.next_up(client, now) <= now]
        return up[int(uniforms.pop() * len(up))] if up else -1
