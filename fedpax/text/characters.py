"""Texts as rows of characters from a fixed vocabulary, to predict the next character."""

import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from fedpax.errors import ArgumentError

SHAKESPEARE_CHARACTERS = bytes(
    sorted((string.ascii_letters + string.digits + "\n\r !\"#$%&'()*,-./:;?@[]_").encode())
)
"""The 86 characters of Shakespeare's plays in the experiments of FedOpt."""

NUM_SPECIAL = 4
"""Numbers beside the characters' numbers: padding, unknown character, begin and end of a text."""


def character_rows(
    texts: Sequence[bytes], seq_len: int, characters: bytes = SHAKESPEARE_CHARACTERS
) -> tuple[UInt8[np.ndarray, "rows seq_len+1"], Int64[np.ndarray, " texts"]]:
    """Encode texts as rows of `seq_len` + 1 numbers; return them, and the rows of each text."""
    # A character is a number: 0 is padding, 1 to V are the V characters in their order, V + 1 is
    # any other byte, V + 2 the begin and V + 3 the end of a text. Begin, characters and end of a
    # text are split into rows of `seq_len` + 1 numbers, the last one padded: `character_batch`
    # makes inputs and targets of them. The first number of a row is therefore no target.
    # Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, appendix C; the rows
    # follow the authors' code, TensorFlow Federated, research/optimization/shakespeare.
    if seq_len < 1:
        raise ArgumentError(f"seq_len is {seq_len}, expected at least 1.")
    size = len(characters)
    if len(set(characters)) < size or size + NUM_SPECIAL > 256:
        raise ArgumentError(
            f"characters has {size} bytes, {len(set(characters))} of them different, expected at "
            f"most {256 - NUM_SPECIAL} different bytes: remove the others."
        )
    numbers = np.full(256, size + 1, np.uint8)
    numbers[list(characters)] = np.arange(1, size + 1)
    length = seq_len + 1
    counts = np.array([-(-(len(text) + 2) // length) for text in texts], np.int64)
    rows = np.zeros(counts.sum() * length, np.uint8)
    for text, start in zip(texts, length * (np.cumsum(counts) - counts), strict=True):
        end = start + 1 + len(text)
        rows[start], rows[end] = size + 2, size + 3
        rows[start + 1 : end] = numbers[np.frombuffer(text, np.uint8)]
    return rows.reshape(-1, length), counts


def character_batch(fields: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Make a language model's batch of `character_rows`: a `preprocess` of `cohort_rounds`."""
    rows = fields["rows"].astype(np.int32)
    targets = rows[:, 1:]
    return {"inputs": rows[:, :-1], "targets": targets, "mask": targets != 0}
