"""Exchange of small values between the processes of a job."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

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
