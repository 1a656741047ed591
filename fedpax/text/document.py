"""Document: tokens of which only some are targets of the loss, and its padding to whole rows."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool, Int64, Integer

Tokens: TypeAlias = Integer[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """Tokens of which only some are targets of the loss, such as the answers of a conversation."""

    tokens: Tokens
    # For each token, and for the one behind the document, whether it is a target of the loss.
    is_target: Bool[np.ndarray, " tokens_and_1"]
    first: int | None = None  # the token before the document. None: the separator.

    def __len__(self) -> int:
        return len(self.tokens)

    def padded(self, length: int, separator: int) -> "Document":
        """Return the document with separators at its end, which are no targets."""
        count = length - len(self)
        end = np.full(count, separator, self.tokens.dtype)
        return dataclasses.replace(
            self,
            tokens=np.concatenate([self.tokens, end]),
            is_target=np.pad(self.is_target, (0, count)),
        )


AnyDocument: TypeAlias = Tokens | Document
"""Tokens without separators, all of them targets; or a `Document`."""
_AnyDocument = TypeVar("_AnyDocument", bound=AnyDocument)


def padding(used: int, pairs: int, seq_len: int) -> int:
    """Return the pairs to leave empty, so that a document that fits in one row is in one row."""
    room = -used % seq_len
    return room if pairs > room else 0


def starts_in_rows(pairs: Sequence[int], seq_len: int) -> Int64[np.ndarray, " documents_and_1"]:
    """Return the first pair of each document that is kept in one row, and the number of pairs."""
    starts = [0]
    for number, own in enumerate(pairs):
        if number:
            starts[-1] += padding(starts[-1], own, seq_len)
        starts.append(starts[-1] + own)
    return np.array(starts, np.int64)


def keep_in_rows(
    documents: Iterable[_AnyDocument], seq_len: int, separator: int
) -> list[_AnyDocument | Document]:
    """Pad documents with unscored tokens, so that each that fits in one row is in one row."""
    listed: list[_AnyDocument | Document] = list(documents)
    if not all(isinstance(document, Document) for document in listed):
        return listed
    lengths = np.diff(starts_in_rows([len(document) + 1 for document in listed], seq_len)) - 1
    return [
        document.padded(int(length), separator) if isinstance(document, Document) else document
        for document, length in zip(listed, lengths, strict=True)
    ]
