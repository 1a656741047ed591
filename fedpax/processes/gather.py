"""Exchange of small values between the processes of a job, and of arrays of process 0."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Num

from fedpax.errors import ConfigurationError

NUM_LENGTH_BYTES = 8
NUM_FIRST_BYTES = 4096


def gather_json(value: Any) -> list[Any]:
    """Return the JSON values of all processes, in the order of the processes. A collective."""
    # Values of up to 4 KiB take one collective, which is compiled once; if one is larger, a second
    # collective has the rest.
    text = json.dumps(value).encode()
    length = len(text).to_bytes(NUM_LENGTH_BYTES, "little")
    firsts = _gather(length + text[:NUM_FIRST_BYTES], NUM_LENGTH_BYTES + NUM_FIRST_BYTES)
    lengths = [int.from_bytes(row[:NUM_LENGTH_BYTES], "little") for row in firsts]
    rests = [b""] * len(firsts)
    if (longest := max(lengths)) > NUM_FIRST_BYTES:
        # A power of two, so that values of similar sizes share a compiled program.
        rests = _gather(text[NUM_FIRST_BYTES:], 1 << (longest - NUM_FIRST_BYTES - 1).bit_length())
    rows = [first[NUM_LENGTH_BYTES:] + rest for first, rest in zip(firsts, rests, strict=True)]
    return [json.loads(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def all_agree(value: bool) -> bool:
    """Return whether a value is true in all processes. A collective."""
    return all(gather_json(value)) if jax.process_count() > 1 else value


def raise_everywhere(error: ConfigurationError | None, folder: Path) -> None:
    """Raise an error of process 0 in all processes, of which it alone has used a folder."""
    if jax.process_count() > 1:
        failed = multihost_utils.broadcast_one_to_all(np.int32(error is not None))
        if failed and error is None:
            error = ConfigurationError(
                f"Process 0 cannot use {folder}; its message names the reason and the remedy."
            )
    if error is not None:
        raise error


def _gather(content: bytes, size: int) -> list[bytes]:
    padded = np.zeros(size, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded).reshape(-1, size)]


# Arrays of process 0 on a mesh of all processes.
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
