"""Index the first example of each client in a data set that is sorted by client."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

_FILE = "client_starts.npz"

Starts = Int64[np.ndarray, " clients_and_1"]
"""Index of each client's first example, and at the end the number of examples."""


def write_client_starts(folder: Path, starts: Mapping[str, Sequence[int]]) -> None:
    """Write the index of each client's first example, ascending, for each split."""
    arrays: dict[str, Any] = {
        split: np.array(indices, np.int64) for split, indices in starts.items()
    }
    np.savez(folder / _FILE, **arrays)


def read_client_starts(folder: Path, parts: Sequence[tuple[str, int, int]]) -> Starts | None:
    """Read where each client's examples begin in parts of splits, counted over all parts."""
    # A client whose examples are in two parts, or in two splits, is two clients. None if the data
    # set has no such file.
    path = folder / _FILE
    if not path.exists():
        return None
    pieces, total = [np.zeros(1, np.int64)], 0
    with np.load(path) as splits:
        for split, begin, end in parts:
            starts = splits[split]
            inside = starts[(starts > begin) & (starts < end)]
            pieces.append(np.append(inside, end) - begin + total)
            total += end - begin
    return np.concatenate(pieces)
