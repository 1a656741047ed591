"""Byte tokens: the UTF-8 bytes of a text, with one more byte value as separator of documents.

The vocabulary size is 256, so that an embedding table divides evenly among devices. The separator
is 0xFF: UTF-8 never uses it (RFC 3629, section 1), so no text contains it. (Byte 0 is a valid
character that real text sometimes contains.)
"""

import numpy as np
from jaxtyping import UInt8
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_cast

VOCAB_SIZE = 256
"""The number of tokens: one for each byte value."""

SEPARATOR = 0xFF
"""The token before and after every document."""


def encode(text: str | bytes) -> UInt8[np.ndarray, " bytes"]:
    """Encode a text as byte tokens.

    Args:
        text: a string, or UTF-8 bytes.

    Returns:
        uint8 `[bytes]`, read-only and without separators.

    Raises:
        TypeError: `text` is neither a string nor bytes.
        ValueError: the bytes contain the separator 0xFF and are therefore not UTF-8, or the string
            has half of a surrogate pair.

    Example:
        >>> encode("né").tolist()
        [110, 195, 169]
    """
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"A text ({text[:60]!r}) has half of a surrogate pair at {error.start}, expected "
                "Unicode: read it again from its own encoding, or remove the character."
            ) from error
    if not isinstance(text, bytes):
        raise ArgumentTypeError(
            f"A text is of type {type(text).__name__} ({text!r:.60}), expected str or bytes: leave "
            "out such examples, or name the field of the examples that holds the text."
        )
    if (where := text.find(SEPARATOR)) >= 0:
        raise ArgumentError(
            f"Byte {where} of a text is 0xFF, so it is not UTF-8: decode it from its own encoding "
            "first."
        )
    return np.frombuffer(text, np.uint8)


def decode(tokens: ArrayLike) -> str:
    """Decode byte tokens to text.

    Args:
        tokens: integers from 0 to 255, of any shape; separators are skipped.

    Returns:
        The text. Bytes that are not valid UTF-8, such as the rest of a character at the start of a
        row, become U+FFFD.

    Raises:
        ValueError: a token is not a byte value.

    Example:
        >>> decode([SEPARATOR, 110, 195, 169, SEPARATOR])
        'né'
    """
    array = np.asarray(tokens)
    if array.size and (array.min() < 0 or array.max() >= VOCAB_SIZE):
        raise ArgumentError(
            f"tokens has values from {array.min()} to {array.max()}, expected bytes from 0 to "
            f"{VOCAB_SIZE - 1}: use a model with vocab_size={VOCAB_SIZE}."
        )
    flat = checked_cast(array, np.uint8, "tokens", "Decode integers.").ravel()
    return flat[flat != SEPARATOR].tobytes().decode(errors="replace")
