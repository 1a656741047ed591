"""What the streams of rounds share: deferred opening, the checks of sizes and of saved states."""

import functools
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort_stream import CohortStream
from fedpax.data.populations.partition import Examples

Settings = Mapping[str, int | str]
"""Everything that decides what a stream gives, so that two with the same give the same."""


class Deferred:
    """A stream that is opened when it is first used, and not when it is made.

    Args:
        open_stream: opens it; called once.

    Example:
        >>> from fedpax.data import token_rounds
        >>> sizes = dict(islands=1, local_steps=1, batch=1, length=4)
        >>> stream = Deferred(lambda: token_rounds([{"text": "to be"}], **sizes))
        >>> next(stream).batches["inputs"].shape
        (1, 1, 1, 4)
    """

    def __init__(self, open_stream: Callable[[], CohortStream]) -> None:
        self._open = functools.cache(open_stream)

    def __iter__(self) -> "Deferred":
        return self

    def __next__(self) -> Any:
        """Returns the batches of the next round."""
        return next(self._open())

    def get_state(self) -> dict[str, Any]:
        """Returns where the stream stands."""
        return self._open().get_state()

    def set_state(self, state: Any) -> None:
        """Goes to where the stream stood when it returned the state."""
        self._open().set_state(state)


def check_sizes(bytes_each: int, **sizes: int) -> None:
    """Refuses sizes of a round that are not positive or that this machine's memory cannot hold.

    Args:
        bytes_each: bytes for each of the product of ``sizes``.
        **sizes: the round's sizes by name.

    Raises:
        ValueError: naming the size, or all of them and the memory that they take.
    """
    total = bytes_each
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, but must be at least 1.")
        total *= size
    # sysconf is POSIX's; where it is missing an allocation will fail by itself.
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    memory = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else total
    if total > memory:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"One round of {product} takes {total / 2**30:.1f} GiB, but this machine has "
            f"{memory / 2**30:.1f} GiB of memory: make one of them smaller."
        )


def source_name(source: Examples) -> str:
    """What a state calls its source: the name of a prepared data set, or else the type."""
    return getattr(source, "name", type(source).__name__)


def arrays_name(arrays: Mapping[str, NDArray[Any]]) -> str:
    """What a state calls arrays in memory: their fields, and a checksum.

    Args:
        arrays: arrays [examples, ...] by field.

    Returns:
        The same for the same fields, shapes, dtypes and contents; of the contents, those of a
        thousand examples at most, evenly spaced, so that large arrays cost no more.

    Example:
        >>> arrays_name({"label": np.arange(3)}) == arrays_name({"label": np.arange(3)[::-1]})
        False
    """
    value = 0
    for name, values in sorted(arrays.items()):
        value = zlib.crc32(f"{name}{values.dtype}{values.shape}".encode(), value)
        for one in values[evenly(len(values))]:
            value = zlib.crc32(np.asarray(one).tobytes(), value)
    return f"arrays {', '.join(sorted(arrays))}: {value}"


def function_name(function: Callable[..., Any]) -> str:
    """What a state calls a function: where it was defined; of an object, its type."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


def evenly(count: int, most: int = 1000) -> NDArray[np.int64]:
    """Numbers from 0 to ``count`` - 1, evenly spaced: all, or ``most`` where there are more."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def check_state(state: Any, settings: Settings, positions: str) -> Any:
    """Refuses a state that another stream has saved.

    Args:
        state: what ``get_state`` of a stream returned, perhaps through JSON.
        settings: the settings of the stream that is to be restored.
        positions: the key under which the state says where the stream stood.

    Returns:
        What the state has under ``positions``.

    Raises:
        ValueError: saying what differs.
    """
    if not isinstance(state, Mapping) or not {"settings", positions} <= state.keys():
        raise ValueError(
            f"A stream's state is a dict with 'settings' and {positions!r}, as get_state gives it, "
            f"not {state!r:.200}."
        )
    saved = state["settings"]
    differences = [
        f"{name} is {settings.get(name)!r} and was {saved.get(name)!r}"
        for name in sorted(settings.keys() | saved.keys())
        if settings.get(name) != saved.get(name)
    ]
    if differences:
        raise ValueError(
            f"The state was saved by another stream: {', '.join(differences)}. Make the stream "
            "with the settings that it had, or begin without the state."
        )
    return state[positions]
