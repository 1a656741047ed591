"""Text as tokens: its UTF-8 bytes, and one byte that no text has between documents.

The vocabulary is exactly 256, so that an embedding divides evenly among devices. The separator is
0xFF: UTF-8 never uses it (RFC 3629, section 1), so nothing in a text can be taken for it, whereas
byte 0 is a valid character that real text sometimes holds.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

VOCABULARY = 256
"""How many tokens there are: one for each byte."""

SEPARATOR = 0xFF
"""The token before and after every document."""


def encode(text: str | bytes) -> NDArray[np.uint8]:
    """Turns a text into tokens, one for each byte of its UTF-8 form.

    Args:
        text: a string, or bytes that are UTF-8.

    Returns:
        uint8 [bytes], read-only; without separators.

    Raises:
        TypeError: if ``text`` is neither.
        ValueError: if the bytes hold the separator, so that they are not UTF-8.

    Example:
        >>> encode("né").tolist()
        [110, 195, 169]
    """
    if isinstance(text, str):
        text = text.encode()
    if not isinstance(text, bytes):
        raise TypeError(
            f"A text must be str or bytes, not {type(text).__name__} ({text!r:.60}): name the "
            "field of the examples that holds the text."
        )
    if (where := text.find(SEPARATOR)) >= 0:
        raise ValueError(
            f"Byte {where} of a text is 0xFF, which UTF-8 never uses and which separates documents "
            "here: decode the text from its own encoding first."
        )
    return np.frombuffer(text, np.uint8)


def decode(tokens: ArrayLike) -> str:
    """Turns tokens back into text.

    Args:
        tokens: integers from 0 to 255, of any shape; separators are left out.

    Returns:
        The text. Bytes that are not UTF-8, as where a row of tokens begins within a character,
        become U+FFFD.

    Raises:
        ValueError: if a token is no byte.

    Example:
        >>> decode([SEPARATOR, 110, 195, 169, SEPARATOR])
        'né'
    """
    array = np.asarray(tokens)
    if array.size and (array.min() < 0 or array.max() >= VOCABULARY):
        raise ValueError(
            f"Tokens must be bytes, from 0 to {VOCABULARY - 1}, but lie between {array.min()} and "
            f"{array.max()}: the model's vocabulary must be {VOCABULARY}."
        )
    flat = array.astype(np.uint8).ravel()
    return flat[flat != SEPARATOR].tobytes().decode(errors="replace")
