"""Arrays of process 0 on a mesh of all processes."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Num


class Broadcast:
    """Brings an array in the memory of process 0's host to the devices of all processes."""

    # `lay_out` divides the array among the devices of process 0, and copies nothing in the other
    # processes. `read`, inside a compiled program, gathers it on every device with one all-reduce,
    # or an all-gather in a job of one process. Neither waits for the devices.

    def __init__(self, mesh: Mesh, like: Any) -> None:
        devices = mesh.devices.ravel()
        self._sources = np.array([i for i, d in enumerate(devices) if d.process_index == 0])
        self._like = like
        self._chunk = max(-(-like.size // len(self._sources)), 1)
        self._shape = (len(devices), self._chunk)
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._replicated = NamedSharding(mesh, PartitionSpec())

    def lay_out(self, array: np.ndarray | None) -> jax.Array:
        """Divide the array among the devices of process 0: `[devices, chunk]`, 0 elsewhere."""
        chunks = {} if array is None else self._divide(array)

        def row(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            (device,) = range(*index[0].indices(self._shape[0]))
            chunk = chunks.get(device)
            return np.zeros((1, self._chunk), self._like.dtype) if chunk is None else chunk

        return jax.make_array_from_callback(self._shape, self._sharding, row)

    def _divide(self, array: np.ndarray) -> dict[int, np.ndarray]:
        """Return the row of each device of process 0, `[1, chunk]`."""
        flat = np.asarray(array, self._like.dtype).ravel()
        missing = len(self._sources) * self._chunk - flat.size
        padded = np.pad(flat, (0, missing)) if missing else flat
        rows = padded.reshape(-1, 1, self._chunk)
        return dict(zip(self._sources.tolist(), rows, strict=True))

    def read(self, rows: jax.Array) -> Num[jax.Array, "..."]:
        """Gather the array on every device; may be traced."""
        chunks = jax.lax.with_sharding_constraint(rows[self._sources], self._replicated)
        return chunks.ravel()[: self._like.size].reshape(self._like.shape)
