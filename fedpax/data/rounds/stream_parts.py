"""FunctionRounds, LazyStream, and the checks of sizes and states that all streams share."""

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Num
from numpy.typing import NDArray

from fedpax.checks import check_integers
from fedpax.clients.cohort import Cohort, CohortStream, IslandStream, fingerprint
from fedpax.data.rounds.documents import Field, read
from fedpax.errors import ArgumentError
from fedpax.sources.source import Examples, get_field
from fedpax.text.conversation import Conversation

SAMPLED_DOCUMENTS, SAMPLED_BYTES = 256, 65_536
"""Documents of a fingerprint, and bytes of each."""

StreamSettings = Mapping[str, int | str]
"""The settings that determine a stream: streams with equal settings give equal cohorts."""


class FunctionRounds:
    """An endless stream whose cohorts are a function of the round's number.

    Args:
        make_cohort: `round number -> Cohort` of NumPy arrays, from 0. It depends on the number
            alone, and every cohort has the same structure, shapes and dtypes.

    Example:
        >>> def make_cohort(round_number):
        ...     random = np.random.default_rng(round_number)
        ...     return Cohort(random.normal(size=(4, 5, 8, 3)))  # clients, steps, batch, features
        >>> stream = FunctionRounds(make_cohort)
        >>> next(stream).batches.shape, stream.get_state()
        ((4, 5, 8, 3), {'round': 1})
    """

    def __init__(self, make_cohort: Callable[[int], Cohort]) -> None:
        self._make_cohort = make_cohort
        self._round = 0

    def __iter__(self) -> "FunctionRounds":
        return self

    def __next__(self) -> Cohort:
        cohort = self._make_cohort(self._round)
        self._round += 1
        return cohort

    def get_state(self) -> dict[str, Any]:
        """Return the number of the next round."""
        return {"round": self._round}

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        if not isinstance(state, Mapping) or state.keys() != {"round"}:
            raise ArgumentError(
                f"The state of FunctionRounds is {state!r:.200}, expected {{'round': number}}, as "
                "get_state returns it. Give the state that this kind of stream has saved."
            )
        self._round = int(state["round"])


class LazyStream:
    """A stream that is opened when it is first used, not when an experiment is only planned.

    Args:
        open_stream: a function that opens the stream; called at most once.

    Example:
        >>> from fedpax.data import token_rounds
        >>> sizes = dict(islands=1, local_steps=1, batch_size=1, seq_len=4)
        >>> stream = LazyStream(lambda: token_rounds([{"text": "to be"}], **sizes))
        >>> next(stream).batches["inputs"].shape
        (1, 1, 1, 4)
    """

    def __init__(self, open_stream: Callable[[], CohortStream]) -> None:
        self._open = functools.cache(open_stream)

    def __iter__(self) -> "LazyStream":
        return self

    def keep_island(self, island: int) -> None:
        """Read only the rows of one island, if the stream can: see `CohortStream`."""
        whole = self._open

        def open_island() -> CohortStream:
            stream = whole()
            if isinstance(stream, IslandStream):
                stream.keep_island(island)
            return stream

        self._open = functools.cache(open_island)

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of the data, which are opened for it: see `IdentifiedStream`."""
        return fingerprint(self._open())

    def __next__(self) -> Cohort:
        return next(self._open())

    def get_state(self) -> dict[str, Any] | bytes:
        """Return the stream's position."""
        return self._open().get_state()

    def set_state(self, state: Any) -> None:
        """Move to a position saved by `get_state`."""
        self._open().set_state(state)


def check_sizes(
    bytes_per_item: int,
    rounds: float = 1,
    remedy: Callable[[int], str] = lambda memory: "reduce one of these sizes.",
    /,
    **sizes: int,
) -> None:
    """Check that a round's sizes are positive, and that it fits the memory of this machine."""
    # A round has `prod(sizes)` items of `bytes_per_item`; so many rounds are in memory at once.
    total: float = rounds * bytes_per_item
    check_integers(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name} is {size}, expected at least 1.")
        total *= size
    # Without sysconf, which is POSIX's, an allocation that is too large fails later.
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    memory = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else total
    if total > memory:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ArgumentError(
            f"One round of {product} takes {total / rounds / 2**30:.1f} GiB"
            f"{', and the next one is read meanwhile' if rounds > 1 else ''}, but this machine has "
            f"{memory / 2**30:.1f} GiB of memory: {remedy(int(memory))}"
        )


def source_name(source: Examples) -> str:
    """Return the name of a prepared data set, or the type of any other source."""
    return getattr(source, "name", type(source).__name__)


def arrays_fingerprint(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a text that identifies arrays in memory: their fields and a checksum."""
    # Of the contents, at most 1,000 evenly spaced examples are read.
    value = 0
    for name, values in sorted(arrays.items()):
        value = zlib.crc32(f"{name}{values.dtype}{values.shape}".encode(), value)
        for example in values[evenly_spaced(len(values))]:
            value = zlib.crc32(np.asarray(example).tobytes(), value)
    return f"arrays {', '.join(sorted(arrays))}: {value}"


def texts_fingerprint(source: Examples, field: Field) -> str:
    """Return a text that identifies the documents of a source: their number and a checksum."""
    # At most 256 evenly spaced documents are read; the length and the first 64 KiB of each count.
    indices = evenly_spaced(len(source), SAMPLED_DOCUMENTS).tolist()
    checksum = hashlib.sha256()
    names = field.fields if isinstance(field, Conversation) else (field,)
    for example in read(source, indices):
        for value in (get_field(example, name) for name in names):
            # NumPy abbreviates long arrays of tokens in a text.
            value = value.tobytes() if isinstance(value, np.ndarray) else value
            text = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
            checksum.update(len(text).to_bytes(8, "little") + text[:SAMPLED_BYTES])
    return f"{len(source)} documents, sample {checksum.hexdigest()[:16]}"


def qualified_name(function: Callable[..., Any]) -> str:
    """Return the module and name of a function, or of a callable object's type."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def evenly_spaced(length: int, max_count: int = 1000) -> NDArray[np.int64]:
    """Return at most `max_count` evenly spaced indices from 0 to `length` - 1."""
    return np.linspace(0, length - 1, min(length, max_count)).astype(np.int64)


def check_state(state: Any, settings: StreamSettings, position: str) -> Any:
    """Check that a state was saved by a stream with equal settings, and return its position."""
    if not isinstance(state, Mapping) or not {"settings", position} <= state.keys():
        raise ArgumentError(
            f"A stream's state is a dict with 'settings' and {position!r}, as get_state returns "
            f"it, not {state!r:.200}."
        )
    saved = state["settings"]
    differences = [
        f"{name} is {settings.get(name)!r} and was {saved.get(name)!r}"
        for name in sorted(settings.keys() | saved.keys())
        if settings.get(name) != saved.get(name)
    ]
    if differences:
        reason = f"The state was saved by a stream with other settings: {', '.join(differences)}."
        raise with_remedies(reason, "Make the stream with the saved settings", "Set these again")
    return state[position]


def check_same_texts(now: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Check that no data set has other documents than at a saved position, by `fingerprint`."""
    # A data set without a saved fingerprint is new in a mixture.
    differences = [
        f"{name} has {text}, and had {saved[name]}"
        for name, text in now.items()
        if saved.get(name, text) != text
    ]
    if differences:
        reason = f"The documents have changed since the state was saved: {', '.join(differences)}."
        raise with_remedies(reason, "Restore the former documents", "Restore the former files")


def with_remedies(reason: str, in_python: str, in_flags: str) -> ArgumentError:
    """Return the error of a state that does not fit, with the remedies in Python and in flags."""
    error = ArgumentError(f"{reason} {in_python}, or start without the state.")
    error.in_flags = (
        f"{reason} {in_flags} to resume, or add --allow_config_change=data to continue the "
        "model with the new data. A run with --data.mixture can gain a data set instead."
    )
    return error


RowMask = Bool[np.ndarray, "islands local_steps batch_size"]
"""True for the rows that a process makes."""


class LocalRows:
    """A global array `[islands, steps, batch, ...]` of which this process has some rows.

    `jax.make_array_from_callback` makes the global array from its slices.

    Args:
        rows: the rows that this process has, `[local rows, ...]`, in the order of the global array.
        mask: which rows of the global array they are.

    Example:
        >>> mask = np.array([[[True, False, True]]])
        >>> array = LocalRows(np.array([[1, 2], [5, 6]]), mask)
        >>> array.shape, array[:, :, 2:3].tolist()
        ((1, 1, 3, 2), [[[[5, 6]]]])
    """

    def __init__(self, rows: Num[np.ndarray, "rows ..."], mask: RowMask) -> None:
        self._rows = rows
        self._places = np.where(mask, np.cumsum(mask).reshape(mask.shape) - 1, -1)
        self.shape = (*mask.shape, *rows.shape[1:])
        self.dtype = rows.dtype

    def __getitem__(self, index: Any) -> Num[np.ndarray, "..."]:
        index = index if isinstance(index, tuple) else (index,)
        places = self._places[index[:3]]
        if np.any(places < 0):
            raise IndexError(
                f"This process has {len(self._rows)} of the {self._places.size} rows of the array "
                f"{list(self.shape)}, but not all in {index}: index only rows of its own devices."
            )
        return self._rows[places][(slice(None),) * places.ndim + index[3:]]


def addressable_rows(
    sharding: Sharding, shape: tuple[int, ...], devices: Iterable[jax.Device] | None = None
) -> RowMask:
    """Return which rows of a round devices hold, bool `[islands, local_steps, batch_size]`.

    Args:
        sharding: the sharding of the cohort's arrays.
        shape: their shape, `(islands, local_steps, batch_size, ...)`.
        devices: the devices. Default None: those of this process.

    Example:
        >>> device = jax.devices()[0]
        >>> addressable_rows(jax.sharding.SingleDeviceSharding(device), (2, 1, 3, 8)).all()
        np.True_
    """
    addressable = sharding.addressable_devices if devices is None else set(devices)
    mask = np.zeros(shape[:3], np.bool_)
    for device, index in sharding.devices_indices_map(shape).items():
        if device in addressable:
            mask[index[:3]] = True
    return mask
