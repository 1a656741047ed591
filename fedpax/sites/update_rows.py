"""What a stage's server part reads of each client, such as the updates of a median: `[n, ...]`."""

import mmap
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.transforms.client_stages import Value

LARGEST_IN_MEMORY = 1 << 26
"""Bytes of the values of all clients from which they are in a file."""

SECONDS_BETWEEN_DROPS = 0.02


class UpdateRows:
    """Collects the rows of clients, in memory or in files that are mapped without a copy."""

    def __init__(self, values: Sequence[Value], size: int, folder: Path) -> None:
        self._values, self._size = values, size
        self._files = {
            i: tempfile.TemporaryFile(dir=folder)
            for i, value in enumerate(values)
            if size * value.nbytes >= LARGEST_IN_MEMORY
        }
        self._rows: list[list[np.ndarray]] = [[] for _ in values]
        self._places: list[int] = []

    def __enter__(self) -> "UpdateRows":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()  # what is mapped stays

    def add(self, places: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Add the rows of some clients, whose places in the cohort are given."""
        self._places += places
        for i, (rows, array) in enumerate(zip(self._rows, arrays, strict=True)):
            if (file := self._files.get(i)) is None:
                rows.append(array)
                continue
            for place, row in zip(places, np.ascontiguousarray(array), strict=True):
                file.seek(place * row.nbytes)
                file.write(row.reshape(-1).view(np.uint8))  # bfloat16 is not a buffer

    def finish(self) -> tuple[list[jax.Array], list[int]]:
        """Return the rows of each value, and the places of their clients, all with a file."""
        in_memory = [
            jnp.zeros((0, *value.shape), value.dtype) if not rows else jnp.concatenate(rows)
            for value, rows in zip(self._values, self._rows, strict=True)
        ]
        if not self._files or not self._places:
            return in_memory, self._places
        places = jnp.asarray(self._places, int)
        return [
            self._map(i)
            if i in self._files
            else jnp.zeros((self._size, *rows.shape[1:]), rows.dtype).at[places].set(rows)
            for i, rows in enumerate(in_memory)
        ], list(range(self._size))

    def _map(self, number: int) -> jax.Array:
        value, file = self._values[number], self._files[number]
        shape = self._size, *value.shape
        file.truncate(self._size * value.nbytes)  # zeros for clients without an answer
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
        rows = np.frombuffer(mapped, value.dtype).reshape(shape)
        dropping = threading.Thread(target=_drop_pages, args=(weakref.ref(mapped),), daemon=True)
        dropping.start()
        return jax.device_put(rows, may_alias=True)


def _drop_pages(mapped: "weakref.ref[mmap.mmap]") -> None:
    """Drop the pages of a mapped file from this process's memory while it is in use."""
    while (pages := mapped()) is not None:
        pages.madvise(mmap.MADV_DONTNEED)
        del pages
        time.sleep(SECONDS_BETWEEN_DROPS)
