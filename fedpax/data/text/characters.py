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
"""Numbers beside those of the characters: padding, unknown character, begin and end of a text."""


def character_rows(
    texts: Sequence[bytes], seq_len: int, characters: bytes = SHAKESPEARE_CHARACTERS
) -> tuple[UInt8[np.ndarray, "rows seq_len+1"], Int64[np.ndarray, " texts"]]:
    """Encode texts as rows of numbers; a row has characters of one text.

    A character is a number: 0 is padding, 1 to V are the V characters in their order, V + 1 is any
    other byte, V + 2 the begin and V + 3 the end of a text. Begin, characters and end of a text are
    split into rows of `seq_len` + 1 numbers, the last one padded: `character_batch` makes inputs
    and targets of them. The first number of a row is therefore no target.

    Args:
        texts: the texts, bytes.
        seq_len: targets per row.
        characters: the vocabulary, at most 252 different bytes.

    Returns:
        The rows of all texts in their order, and each text's number of rows.

    Raises:
        ValueError: a character occurs twice, there are more than 252, or `seq_len` is below 1.

    Example:
        >>> rows, counts = character_rows([b"to be", b"o?"], seq_len=3, characters=b"bcet")
        >>> rows.tolist(), counts.tolist()  # 6: begin, 5: other, 7: end
        ([[6, 4, 5, 5], [1, 3, 7, 0], [6, 5, 5, 7]], [2, 1])

    Reference:
        Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, appendix C; the rows are
        those of the authors' code, TensorFlow Federated, research/optimization/shakespeare.
    """
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
    """Make a language model's batch of rows. It is a `preprocess` of `cohort_rounds`.

    Args:
        fields: `rows`, from `character_rows`.

    Returns:
        `inputs` and `targets`, int32 `[rows, seq_len]`; `mask`, bool, False at padding.

    Example:
        >>> rows, _ = character_rows([b"to"], seq_len=4, characters=b"ot")
        >>> batch = character_batch({"rows": rows})
        >>> batch["inputs"].tolist(), batch["targets"].tolist(), batch["mask"].sum().item()
        ([[4, 2, 1, 5]], [[2, 1, 5, 0]], 3)
    """
    rows = fields["rows"].astype(np.int32)
    targets = rows[:, 1:]
    return {"inputs": rows[:, :-1], "targets": targets, "mask": targets != 0}
