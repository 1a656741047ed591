"""Packing: documents of any length laid end to end and cut into rows of one length.

A document of n tokens gives n + 1 pairs (input, target): the separator predicts its first token,
each token the next, and the last one the separator. Laid end to end, the targets are then the
inputs one step on, so nothing is lost where rows are cut, and every token is a target just once.
Rows are full but for the last; grain's packing, which does the same in Python for each row, is
much slower than the few operations on whole arrays here.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpax.data.text.tokens import SEPARATOR

Batch = dict[str, NDArray[Any]]
"""Arrays of one shape but for the last axes: inputs, targets, segments, positions and mask."""


class Pairs(NamedTuple):
    """Documents end to end: what a model reads, what it is to predict, where documents begin.

    Attributes:
        inputs: integers [...], uint8 for bytes.
        targets: the same type and shape.
        starts: bool [...], true at the first pair of each document.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]
    starts: NDArray[np.bool_]

    def map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> "Pairs":
        """Applies a function that keeps the type to each of the arrays."""
        return Pairs(function(self.inputs), function(self.targets), function(self.starts))

    def take(self, rows: NDArray[np.int64]) -> "Pairs":
        """Picks rows of the first axis."""
        return self.map(lambda array: array[rows])


def join(documents: Iterable[NDArray[Any]], separator: int = SEPARATOR) -> Pairs:
    """Lays documents end to end.

    Args:
        documents: each integers [tokens] of one type, without separators.
        separator: the token before and after every document.

    Returns:
        The pairs, each array [sum of (tokens + 1)].

    Example:
        >>> pairs = join([np.array([1, 2], np.uint8), np.array([3], np.uint8)])
        >>> pairs.inputs.tolist(), pairs.targets.tolist(), pairs.starts.astype(int).tolist()
        ([255, 1, 2, 255, 3], [1, 2, 255, 3, 255], [1, 0, 0, 1, 0])
    """
    documents = list(documents)
    between = np.array([separator], documents[0].dtype if documents else np.uint8)
    tokens = np.concatenate(
        [*chain.from_iterable((between, document) for document in documents), between]
    )
    lengths = np.array([len(document) + 1 for document in documents], np.int64)
    starts = np.zeros(len(tokens) - 1, np.bool_)
    starts[np.cumsum(lengths) - lengths] = True
    return Pairs(tokens[:-1], tokens[1:], starts)


def to_batch(pairs: Pairs, present: NDArray[np.bool_] | None = None) -> Batch:
    """Turns rows of pairs into what a language model trains on.

    Args:
        pairs: arrays [..., length].
        present: bool [..., length], false at padding; everything is present by default.

    Returns:
        Arrays [..., length]. ``inputs``, ``targets``: int32 tokens. ``segments``: int32, 1 for
        the first document in a row, 2 for the next, 0 for padding. ``positions``: int32, how far
        a token is from where its document begins in this row. ``mask``: float32, 1 where the
        target counts in the loss and 0 at padding. At padding all five are 0.
    """
    column = np.arange(pairs.inputs.shape[-1], dtype=np.int32)
    begins = pairs.starts & (column > 0)  # a row's first document is 1, begun here or earlier
    batch: Batch = {
        "inputs": pairs.inputs.astype(np.int32),
        "targets": pairs.targets.astype(np.int32),
        "segments": 1 + np.cumsum(begins, axis=-1, dtype=np.int32),
        "positions": column - np.maximum.accumulate(np.where(begins, column, 0), axis=-1),
        "mask": np.ones(pairs.inputs.shape, np.float32),
    }
    if present is None:
        return batch
    return {name: array * present.astype(array.dtype) for name, array in batch.items()}


def pack(documents: Iterable[NDArray[np.uint8]], length: int) -> Batch:
    """Packs a finite number of documents into rows, padding the last one.

    Args:
        documents: each uint8 [tokens], without separators, as ``encode`` gives them.
        length: tokens in a row.

    Returns:
        Arrays [rows, length]: ``inputs``, ``targets``, ``segments``, ``positions`` (int32) and
        ``mask`` (float32). Attention must stay within a segment of a row: segment ids begin
        again at 1 in each row, so a document that was cut is a segment in each of its rows.

    Raises:
        ValueError: if ``length`` is not positive.

    Example:
        >>> from fedpax.data import encode
        >>> rows = pack([encode("abc"), encode("d")], length=4)
        >>> rows["inputs"].tolist()
        [[255, 97, 98, 99], [255, 100, 0, 0]]
        >>> rows["targets"].tolist()
        [[97, 98, 99, 255], [100, 255, 0, 0]]
        >>> rows["segments"].tolist(), rows["positions"].tolist()
        ([[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 1, 2, 3], [0, 1, 0, 0]])
    """
    return to_batch(*cut(join(documents), length))


def cut(pairs: Pairs, length: int) -> tuple[Pairs, NDArray[np.bool_]]:
    """Cuts pairs into rows, padding the last one.

    Args:
        pairs: arrays [tokens].
        length: tokens in a row.

    Returns:
        The pairs, arrays [rows, length], and which of them are present, bool [rows, length].

    Raises:
        ValueError: if ``length`` is not positive.
    """
    if length < 1:
        raise ValueError(f"length is {length}, but a row must have at least one token.")

    def to_rows(array: NDArray[Any]) -> NDArray[Any]:
        return np.pad(array, (0, -len(array) % length)).reshape(-1, length)

    return pairs.map(to_rows), to_rows(np.ones(len(pairs.inputs), np.bool_))
