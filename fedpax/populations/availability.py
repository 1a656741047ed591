"""Availability: which clients of a population can take part in a round."""

import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from fedpax.errors import ArgumentError
from fedpax.primitives.casts import host_array
from fedpax.sources.shuffle import hash_key


class DailyAvailability:
    """Clients that are available for a part of each day, such as the night of their time zone.

    An object of this class is the `available` of a `ClientSampler`. Each client has a fixed start
    of its window, uniform over the day.

    Args:
        num_clients: size of the population.
        rounds_per_day: number of rounds in a day, at least 1.
        fraction: the part of the day in which a client is available, above 0 and at most 1.
        seed: random seed of the windows.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> available = DailyAvailability(num_clients=10_000, rounds_per_day=24, fraction=0.25)
        >>> round(available(3).mean().item(), 2)
        0.25
        >>> bool((available(3) == available(27)).all())  # the same hour of the next day
        True
    """

    def __init__(
        self, num_clients: int, *, rounds_per_day: int, fraction: float = 1 / 3, seed: int = 0
    ) -> None:
        if num_clients < 1 or rounds_per_day < 1:
            raise ArgumentError(
                f"num_clients is {num_clients} and rounds_per_day {rounds_per_day}, expected at "
                "least 1 each."
            )
        if not 0 < fraction <= 1:
            raise ArgumentError(
                f"fraction is {fraction}, expected a part of the day above 0 and at most 1. Use "
                "0.5 for half of it."
            )
        self._rounds_per_day, self._fraction = rounds_per_day, fraction
        keys = hash_key(seed, np.arange(num_clients))
        self._start = (keys >> np.uint64(11)) * 2.0**-53
        self.__qualname__ = (
            f"DailyAvailability({num_clients}, {rounds_per_day}, {fraction}, {seed})"
        )

    def __call__(self, round_number: int) -> Bool[np.ndarray, " clients"]:
        """Return which clients are available in a round, booleans `[num_clients]`."""
        time = (round_number % self._rounds_per_day) / self._rounds_per_day
        return (time - self._start) % 1.0 < self._fraction


class RecordedAvailability:
    """Availability that was recorded: a table of rounds and clients.

    An object of this class is the `available` of a `ClientSampler`. After its last row the table
    repeats from the first one.

    Args:
        table: booleans `[rounds, clients]`, or the path of a `.npy` file that holds them.

    Raises:
        ValueError: the table is not booleans `[rounds, clients]`, or a round has no client.
        OSError: the file cannot be read.

    Example:
        >>> available = RecordedAvailability(np.array([[True, False], [True, True]]))
        >>> available(2).tolist()
        [True, False]
    """

    def __init__(self, table: Bool[np.ndarray, "rounds clients"] | str | Path) -> None:
        if isinstance(table, str | Path):
            table = np.load(table, allow_pickle=False)
        table = host_array(table, "table")
        if table.ndim != 2 or table.dtype != np.bool_ or not table.size:
            raise ArgumentError(
                f"table is {table.dtype}{list(table.shape)}, expected booleans [rounds, clients]. "
                "Convert it with .astype(bool)."
            )
        if (empty := np.flatnonzero(~table.any(axis=1))).size:
            raise ArgumentError(
                f"row {empty[0]} of the table has no available client, expected at least one in "
                "each round. Drop the row."
            )
        self._table = table
        self.__qualname__ = f"RecordedAvailability({zlib.crc32(np.packbits(table).tobytes())})"

    def __call__(self, round_number: int) -> Bool[np.ndarray, " clients"]:
        """Return which clients are available in a round, booleans `[clients]`."""
        return self._table[round_number % len(self._table)]
