"""Packing: concatenate documents of any length and split them into rows of equal length."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool, Int64, Integer, Num
from numpy.typing import NDArray

from fedpax.checks import check_integers
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_cast
from fedpax.text.tokenizer_json import SEPARATOR

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


def tell_cut(document: AnyDocument, seq_len: int) -> None:
    """Tell the first conversation with an answer that no row holds, once for each length."""
    if seq_len in _told or not isinstance(document, Document):
        return
    if document.is_target[seq_len:].any():
        _told.add(seq_len)
        needed = int(np.flatnonzero(document.is_target)[-1]) + 1
        logging.getLogger(__name__).warning(
            f"a conversation needs rows of {needed:,} tokens, and they have {seq_len:,}: the rest "
            "of its answer is read without what is before it. Set a larger --data.seq_len."
        )


_told: set[int] = set()


def starts_in_rows(pairs: Sequence[int], seq_len: int) -> Int64[np.ndarray, " documents_and_1"]:
    """Return the first pair of each document that is kept in one row, and the number of pairs."""
    starts = [0]
    for number, pair in enumerate(pairs):
        if number:
            starts[-1] += padding(starts[-1], pair, seq_len)
        starts.append(starts[-1] + pair)
    return np.array(starts, np.int64)


def keep_in_rows(
    documents: Iterable[_AnyDocument], seq_len: int, separator: int
) -> list[_AnyDocument | Document]:
    """Pad documents with unscored tokens, so that each that fits in one row is in one row."""
    listed: list[_AnyDocument | Document] = list(documents)
    for document in listed:
        tell_cut(document, seq_len)
    if not all(isinstance(document, Document) for document in listed):
        return listed
    lengths = np.diff(starts_in_rows([len(document) + 1 for document in listed], seq_len)) - 1
    return [
        document.padded(int(length), separator) if isinstance(document, Document) else document
        for document, length in zip(listed, lengths, strict=True)
    ]


Batch = dict[str, Num[np.ndarray, "*rows seq_len"]]
"""Arrays of equal shape: `inputs`, `targets`, `segments`, `positions` and `mask`."""


class TokenPairs(NamedTuple):
    """Pairs of input and target tokens of concatenated documents."""

    inputs: Integer[np.ndarray, "*shape"]  # integers `[...]`, uint8 for bytes
    targets: Integer[np.ndarray, "*shape"]  # of the same dtype and shape
    starts: Bool[np.ndarray, "*shape"]  # bool `[...]`, True at the first pair of each document
    scored: Bool[np.ndarray, "*shape"]  # bool `[...]`, whether the target counts in the loss

    def map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> "TokenPairs":
        """Apply a function that keeps the dtype to each of the arrays."""
        return TokenPairs(*map(function, self))

    def take(self, rows: Int64[np.ndarray, " rows"]) -> "TokenPairs":
        """Select rows of the first axis."""
        return self.map(lambda array: array[rows])


def concatenate(documents: Iterable[AnyDocument], separator: int = SEPARATOR) -> TokenPairs:
    """Concatenate documents, the separator before and after each: `[sum of (tokens + 1)]`."""
    documents = list(documents)
    parts, dtype = [], np.dtype(np.uint8)
    for number, document in enumerate(documents):
        first = separator
        if isinstance(document, Document):
            first = separator if document.first is None else document.first
            document = document.tokens
        dtype = document.dtype if number == 0 else dtype
        parts += [np.array([first], dtype), document]
    tokens = np.concatenate([*parts, np.array([separator], dtype)])
    if not np.can_cast(tokens.dtype, np.int32):
        tokens = checked_cast(tokens, np.int32, "tokens", "Number the vocabulary from 0.")
    lengths = np.array([len(document) + 1 for document in documents], np.int64)
    starts = np.zeros(len(tokens) - 1, np.bool_)
    starts[np.cumsum(lengths) - lengths] = True
    scored = np.ones(len(tokens) - 1, np.bool_)
    for document, end in zip(documents, np.cumsum(lengths), strict=True):
        if isinstance(document, Document):
            scored[end - len(document.is_target) : end] = document.is_target
    return TokenPairs(tokens[:-1], tokens[1:], starts, scored)


def to_batch(pairs: TokenPairs, valid: Bool[np.ndarray, "*rows seq_len"] | None = None) -> Batch:
    """Make a language model's batch from rows of pairs, 0 where `valid` is False."""
    # `positions`: a token's offset from its document's first token in this row.
    column = np.arange(pairs.inputs.shape[-1], dtype=np.int32)
    begins = pairs.starts & (column > 0)  # the document that reaches into the row is segment 1
    batch: Batch = {
        "inputs": pairs.inputs.astype(np.int32, copy=False),
        "targets": pairs.targets.astype(np.int32, copy=False),
        "segments": 1 + np.cumsum(begins, axis=-1, dtype=np.int32),
        "positions": column - np.maximum.accumulate(np.where(begins, column, 0), axis=-1),
        "mask": pairs.scored.astype(np.float32),
    }
    if valid is None:
        return batch
    return {name: array * valid.astype(array.dtype) for name, array in batch.items()}


def pack(documents: Iterable[Tokens], seq_len: int) -> Batch:
    """Pack documents into rows, with padding at the end of the last row.

    Args:
        documents: integer arrays `[tokens]` without separators.
        seq_len: tokens per row.

    Returns:
        A dict of arrays `[rows, seq_len]`: `inputs`, `targets`, `segments` and `positions` (int32),
        and `mask` (float32), 0 at padding. Segments are numbered from 1 in each row; a document
        that is split has one in each of its rows. Attention must not cross segments. A document of
        n tokens gives n + 1 pairs: the separator predicts the first token, and the last token the
        separator.

    Raises:
        TypeError: a document is not integers `[tokens]`, or `seq_len` is not an integer.
        ValueError: `seq_len` is below 1, or a token is negative or beyond int32.

    Example:
        >>> from fedpax.data import encode
        >>> rows = pack([encode("abc"), encode("d")], seq_len=4)
        >>> rows["inputs"].tolist()
        [[255, 97, 98, 99], [255, 100, 0, 0]]
        >>> rows["targets"].tolist()
        [[97, 98, 99, 255], [100, 255, 0, 0]]
        >>> rows["segments"].tolist(), rows["positions"].tolist()
        ([[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 1, 2, 3], [0, 1, 0, 0]])
    """
    arrays = []
    for number, document in enumerate(documents):
        array = np.asarray(document)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ArgumentTypeError(
                f"Document {number} is {array.dtype}{list(array.shape)}, expected an array of "
                "integers [tokens]. Encode a text: fedpax.data.encode(text)."
            )
        if array.size and array.min() < 0:
            raise ArgumentError(
                f"Document {number} has the token {array.min()}, expected tokens from 0. Leave out "
                "the tokens that mark padding."
            )
        arrays.append(array if array.size else array.astype(np.uint8))
    return to_batch(*split_rows(concatenate(arrays), seq_len))


def split_rows(
    pairs: TokenPairs, seq_len: int
) -> tuple[TokenPairs, Bool[np.ndarray, "rows seq_len"]]:
    """Split pairs into rows, padded at the end; return a mask that is False at padding too."""
    check_integers(seq_len=seq_len)
    if seq_len < 1:
        raise ArgumentError(f"seq_len is {seq_len}, expected at least 1.")

    def to_rows(array: NDArray[Any]) -> NDArray[Any]:
        return np.pad(array, (0, -len(array) % seq_len)).reshape(-1, seq_len)

    return pairs.map(to_rows), to_rows(np.ones(len(pairs.inputs), np.bool_))
