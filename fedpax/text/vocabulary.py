"""Vocabulary: what a tokenizer's file says, and whether its tokens give back every text."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Every byte of UTF-8 but the null character, and characters that normalizers change.
_EVERY_BYTE = "".join(
    chr(code)
    for code in (*range(1, 0x100), *range(0x100, 0x110000, 0x3C1))
    if not 0xD800 <= code < 0xE000
)
_TEXTS = ("Two  words", " space \n\tline\n", "caf\u00e9 cafe\u0301 \ufb01 \uff21", _EVERY_BYTE)

SPACE = "\u2581"
"""The character by which SentencePiece, and a pre-tokenizer Metaspace, write a space."""


class Vocabulary(NamedTuple):
    """The tokens of a file, and functions between texts and tokens."""

    size: int  # the largest token + 1
    # Encodes several texts, on several cores, and adds no token and no character.
    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]  # returns the text of tokens below `size`
    # Returns the number of a token by its name; None if there is no such token.
    token: Callable[[str], int | None]
    # Returns the name of a token by its number; None if there is no such token.
    name: Callable[[int], str | None]
    # Tokens that stand for no text, by name, such as the one that ends a document.
    special: Mapping[str, int]
    end: int | None  # the token that ends a document, if the file itself says so


def changed_text(vocabulary: Vocabulary, texts: Sequence[str] = _TEXTS) -> tuple[str, str] | None:
    """Return a short text that its tokens do not give back, and what they give; None if all do."""
    for text in texts:
        try:
            decoded = vocabulary.decode(vocabulary.encode([text])[0])
        except Exception as error:  # a character without a token, where none stands for it
            decoded = str(error)
        if decoded != text:
            return text[:20], decoded[:80]
    return None
