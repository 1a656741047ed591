"""Clients as arrays of consecutive examples, and which of them can take part in a round."""

import abc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import ArrayLike, NDArray

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_cast, host_array
from fedpax.sources.shuffle import hash_key

Indices = Int64[np.ndarray, " examples"]
"""The indices of a participant's examples in a source."""


class ComputedPartition(Sequence[Indices], abc.ABC):
    """Participants' indices, made where the sequence is indexed."""

    @abc.abstractmethod
    def indices_of(self, participant: int) -> Indices:
        """Return the indices of a participant's examples, int64."""

    @overload
    def __getitem__(self, participant: int) -> Indices: ...
    @overload
    def __getitem__(self, participant: slice) -> list[Indices]: ...
    def __getitem__(self, participant: int | slice) -> Indices | list[Indices]:
        """Return the indices of a participant's examples; for a slice, a list of them."""
        position = range(len(self))[participant]
        if isinstance(position, range):
            return [self.indices_of(k) for k in position]
        return self.indices_of(position)


class RaggedPartition(ComputedPartition):
    """The indices of all participants' examples, and where each participant begins.

    Attributes:
        indices: int64 `[examples]`, the indices of participant 0, then of participant 1, ...
        starts: int64 `[participants + 1]`, the position of each participant's first index, then the
            number of indices.
    """

    def __init__(
        self, indices: Int64[np.ndarray, " examples"], starts: Int64[np.ndarray, " starts"]
    ) -> None:
        self.indices, self.starts = indices, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def indices_of(self, participant: int) -> Indices:
        """Return the indices of a participant's examples, int64."""
        return self.indices[self.starts[participant] : self.starts[participant + 1]]

    def sizes(self) -> Int64[np.ndarray, " participants"]:
        """Return the number of examples of each participant."""
        return np.diff(self.starts)

    def __repr__(self) -> str:
        return f"RaggedPartition({len(self)} participants, {len(self.indices)} examples)"


def as_ragged(parts: Sequence[NDArray[np.int64]] | Sequence[list[int]]) -> RaggedPartition:
    """Concatenate the parts of a partition: arrays, int64 `[examples]` each, or lists."""
    if isinstance(parts, RaggedPartition):
        return parts
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=starts[1:])
    if len(parts) and isinstance(parts[0], list):
        indices = np.fromiter(chain.from_iterable(parts), np.int64, starts[-1])
    else:
        indices = np.concatenate([*parts, np.zeros(0, np.int64)])
    return RaggedPartition(indices, starts)


def concatenate_clients(
    clients: Sequence[Mapping[str, ArrayLike]],
) -> tuple[dict[str, NDArray[Any]], list[Indices]]:
    """Concatenate the arrays of clients, for `cohort_rounds`.

    Args:
        clients: for each client a dict of arrays `[examples, ...]`, with equal fields, other axes
            and dtypes.

    Returns:
        The examples, a dict of arrays `[examples, ...]`; and the population, for each client the
        indices of its examples.

    Raises:
        TypeError: a client is not a dict of arrays.
        ValueError: there are no examples, a client has other fields than client 0, the fields of a
            client have different numbers of examples, or shapes or dtypes differ between clients.

    Example:
        >>> clients = [{"x": np.ones((n, 3)), "y": np.arange(n)} for n in (2, 0, 3)]
        >>> examples, population = concatenate_clients(clients)
        >>> examples["x"].shape, [indices.tolist() for indices in population]
        ((5, 3), [[0, 1], [], [2, 3, 4]])
    """
    arrays = [_check_client(k, client) for k, client in enumerate(clients)]
    sizes = [len(next(iter(fields.values()))) for fields in arrays]
    with_examples = [k for k, size in enumerate(sizes) if size]
    if not with_examples:
        raise ArgumentError(
            f"clients is {len(sizes)} clients without examples, expected at least one client with "
            "examples: give a list of dicts of arrays [examples, ...]."
        )
    first = with_examples[0]
    kinds = [{name: (a.shape[1:], a.dtype) for name, a in fields.items()} for fields in arrays]
    for k, fields in enumerate(arrays):
        if fields.keys() != arrays[0].keys():
            raise ArgumentError(
                f"Client {k} has the fields {', '.join(map(repr, fields))}, and client 0 "
                f"{', '.join(map(repr, arrays[0]))}: give all clients the same fields."
            )
        for name in fields if sizes[k] else ():
            if kinds[k][name] != kinds[first][name]:
                (shape, dtype), (other_shape, other_dtype) = kinds[k][name], kinds[first][name]
                raise ArgumentError(
                    f"An example's {name!r} is {dtype}{list(shape)} for client {k} and "
                    f"{other_dtype}{list(other_shape)} for client {first}, expected one shape and "
                    "dtype: pad or convert the arrays."
                )
    examples = {
        name: np.concatenate([arrays[k][name] for k in with_examples]) for name in arrays[0]
    }
    return examples, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def _check_client(client: int, fields: Any) -> dict[str, NDArray[Any]]:
    if not isinstance(fields, Mapping) or not fields:
        raise ArgumentTypeError(
            f"Client {client} is {fields!r:.100}, expected a dict of arrays [examples, ...], such "
            'as {"image": images, "label": labels}.'
        )
    for name, values in fields.items():
        if isinstance(values, str | bytes | Mapping | Iterator):
            raise ArgumentTypeError(
                f"Client {client} has a field {name!r} that is a {type(values).__name__}, expected "
                "an array [examples, ...]. Convert it, for example with np.array(list(values))."
            )
    arrays = {
        name: host_array(values, f"Client {client}, field {name!r}")
        for name, values in fields.items()
    }
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    if len({tuple(shape[:1]) for shape in shapes.values()}) != 1 or [] in shapes.values():
        raise ArgumentError(
            f"Client {client} has fields of shapes {shapes}, expected arrays [examples, ...] with "
            "the same number of examples in each field."
        )
    return arrays


class ContiguousClients(ComputedPartition):
    """The clients of a source that is sorted by client."""

    # Client k has the examples `starts[k]` to `starts[k + 1] - 1`, or the first `max_examples`.
    # Only `starts`, as in `Source.client_starts`, is stored: 2.7 MB for the users of Stack
    # Overflow, where indices would take 1.1 GB.

    def __init__(self, starts: ArrayLike, *, max_examples: int | None = None) -> None:
        array = host_array(starts, "starts")
        ascending = array.ndim == 1 and array.size > 1 and array[0] == 0 and np.all(np.diff(array))
        if array.dtype.kind not in "iu" or not ascending or np.any(array[1:] < array[:-1]):
            raise ArgumentError(
                f"starts is {array.dtype}{list(array.shape)}, expected ascending integers from 0: "
                "the index of each client's first example, then the number of examples. Give "
                "Source.client_starts."
            )
        if max_examples is not None and max_examples < 1:
            raise ArgumentError(
                f"max_examples is {max_examples}, expected at least 1, or None for no limit."
            )
        self._starts = checked_cast(array, np.int64, "starts")
        self._max_examples = max_examples

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def num_examples(self) -> int:
        """The number of examples of all clients, those above `max_examples` included."""
        return int(self._starts[-1])

    def sizes(self, clients: Int64[np.ndarray, " n"] | None = None) -> Int64[np.ndarray, " n"]:
        """Return the number of examples of each client, by default of all clients."""
        starts = self._starts
        sizes = np.diff(starts) if clients is None else starts[clients + 1] - starts[clients]
        return sizes if self._max_examples is None else np.minimum(sizes, self._max_examples)

    def first_examples(self, clients: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the index of the first example of each of some clients."""
        return self._starts[clients]

    def indices_of(self, participant: int) -> Indices:
        """Return the indices of a client's examples, int64."""
        begin, end = self._starts[participant : participant + 2]
        if self._max_examples is not None:
            end = min(end, begin + self._max_examples)
        return np.arange(begin, end)

    def __repr__(self) -> str:
        return f"ContiguousClients({len(self)} clients, {self._starts[-1]} examples)"


class DailyAvailability:
    """Clients that are available for a part of each day, such as the night of their time zone.

    For the `available` of a `ClientSampler`. A client's window starts at a fixed time, uniform over
    the day.

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
        passed = time - self._start  # above -1 and below 1
        passed += passed < 0  # the part of a day since the start; `% 1.0` takes five times as long
        return passed < self._fraction


class RecordedAvailability:
    """Availability that was recorded: a table of rounds and clients.

    For the `available` of a `ClientSampler`; it repeats after its last row.

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
