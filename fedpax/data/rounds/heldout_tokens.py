"""Rows of text to evaluate on: `HeldoutRows`, and `heldout_token_batches` in one process."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int64

from fedpax.data.rounds.documents import Field, encode_named
from fedpax.data.rounds.stream_parts import check_sizes, texts_fingerprint
from fedpax.errors import ArgumentError
from fedpax.processes.communication import gather_json
from fedpax.sources.source import Examples, as_examples
from fedpax.text.conversation import Conversation
from fedpax.text.packing import (
    AnyDocument,
    Batch,
    Document,
    TokenPairs,
    concatenate,
    starts_in_rows,
    tell_cut,
    to_batch,
)
from fedpax.text.tokenizer import BYTE_TOKENIZER, Tokenizer

_DOCUMENTS_AT_ONCE = 256  # that a tokenizer encodes on several cores


class HeldoutRows:
    """The packed rows of a split of text, in the source's order, tokenized when they are read."""

    # The first use counts the tokens of each document; later, only documents of the rows that are
    # read are tokenized. With `divide`, all processes must use the rows first at the same point.

    def __init__(
        self,
        source: Examples,
        *,
        seq_len: int,
        max_tokens: int | None = None,
        field: Field = "text",
        tokenizer: Tokenizer = BYTE_TOKENIZER,
        divide: bool = False,
    ) -> None:
        check_sizes(1, seq_len=seq_len)
        source = as_examples(source)
        if not len(source):
            raise ArgumentError("The source has no examples to evaluate on: load another split.")
        if max_tokens is not None and max_tokens < seq_len:
            raise ArgumentError(
                f"max_tokens is {max_tokens}, expected at least one row of seq_len={seq_len}, or "
                "None for the whole split."
            )
        self.seq_len = seq_len
        self._source, self._field, self._tokenizer = source, field, tokenizer
        self._max_tokens, self._divide = max_tokens, divide
        self._is_scored = isinstance(field, Conversation)
        # Consecutive rows share a document.
        self._encode = functools.lru_cache(maxsize=1)(self._encode_document)
        self._encode(0)  # so that a wrong field raises now

    def _encode_document(self, number: int) -> AnyDocument:
        return self._encode_all([number])[0]

    def _encode_all(self, numbers: Sequence[int]) -> Sequence[AnyDocument]:
        examples = [self._source[number] for number in numbers]
        return encode_named(self._tokenizer, self._source, numbers, examples, self._field)

    @functools.cached_property
    def _starts(self) -> Int64[np.ndarray, " documents_and_1"]:
        """Position of each document's first pair among all pairs of the split, and their number."""
        total = len(self._source)
        shares, process = (jax.process_count(), jax.process_index()) if self._divide else (1, 0)
        documents = range(total * process // shares, total * (process + 1) // shares)
        pairs: list[int] = []
        for first in range(documents.start, documents.stop, _DOCUMENTS_AT_ONCE):
            numbers = range(first, min(first + _DOCUMENTS_AT_ONCE, documents.stop))
            for document in self._encode_all(numbers):
                tell_cut(document, self.seq_len)
                pairs.append(len(document) + 1)
        if shares > 1:
            pairs = [number for share in gather_json(pairs) for number in share]
        if self._is_scored:
            return starts_in_rows(pairs, self.seq_len)
        return np.cumsum([0, *pairs], dtype=np.int64)

    def _padded(self, number: int) -> AnyDocument:
        """Return a document, padded to the place where the next one starts."""
        document = self._encode(number)
        if not isinstance(document, Document):
            return document
        length = int(self._starts[number + 1] - self._starts[number]) - 1
        return document.padded(length, self._tokenizer.separator)

    @functools.cached_property
    def _chosen(self) -> Int64[np.ndarray, " rows"]:
        """The rows to evaluate on, among all rows of the split."""
        total = int(self._starts[-1])
        rows = -(-total // self.seq_len)
        if self._max_tokens is None or self._max_tokens >= rows * self.seq_len:
            return np.arange(rows)
        count = self._max_tokens // self.seq_len
        return np.linspace(0, rows - 1, count).round().astype(np.int64)

    def fingerprint(self) -> str:
        """Return the number of documents and a checksum of a sample."""
        return texts_fingerprint(self._source, self._field)

    def __len__(self) -> int:
        return len(self._chosen)

    @functools.cached_property
    def num_targets(self) -> Int64[np.ndarray, " rows"]:
        """The number of targets of each row that count in the loss."""
        if self._is_scored:
            masks = (self.read(np.array([row]))["mask"] for row in range(len(self)))
            return np.array([mask.sum() for mask in masks], np.int64)
        # The rest of the split's last row is padding.
        return np.minimum(self.seq_len, self._starts[-1] - self.seq_len * self._chosen)

    def read(self, rows: Int64[np.ndarray, " n"]) -> Batch:
        """Tokenize rows as `fedpax.data.pack` does; row -1 is padding."""
        shape = (len(rows), self.seq_len)
        pairs = TokenPairs(*(np.zeros(shape, dtype) for dtype in ("i4", "i4", "?", "?")))
        valid = np.zeros(shape, np.bool_)
        for place in np.argsort(rows, kind="stable"):
            if rows[place] < 0:
                continue
            first = int(self._chosen[rows[place]]) * self.seq_len
            begin, end = np.searchsorted(self._starts, [first, first + self.seq_len])
            begin -= self._starts[begin] > first  # the document that reaches into the row
            documents = map(self._padded, range(begin, min(end, len(self._source))))
            document_pairs = concatenate(documents, self._tokenizer.separator)
            offset = first - int(self._starts[begin])
            count = min(self.seq_len, len(document_pairs.inputs) - offset)
            valid[place, :count] = True
            for array, values in zip(pairs, document_pairs, strict=True):
                array[place, :count] = values[offset : offset + count]
        return to_batch(pairs, valid)


def heldout_token_batches(
    source: Examples,
    *,
    batch_size: int,
    seq_len: int,
    max_tokens: int | None = None,
    field: Field = "text",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
) -> list[Batch]:
    """Pack a split of text into batches, in the source's order.

    The last batch is completed with padding, whose mask is 0. To average over the split, weight
    each batch by the sum of its mask.

    Args:
        source: the documents: a source from `load`, a list of dicts, a dict of columns, or a data
            frame.
        batch_size: rows per batch.
        seq_len: tokens per row.
        max_tokens: use only this many tokens, in rows evenly spaced over the split. Default
            None: all.
        field: the field with the text, a string or UTF-8 bytes; or a `Conversation`.
        tokenizer: the tokenizer.

    Returns:
        Dicts of arrays `[batch_size, seq_len]`, as `fedpax.data.pack` returns them.

    Raises:
        KeyError: the examples have no such field.
        TypeError: `source` is something else, such as a generator.
        ValueError: a size is below 1, the source has no examples, or `max_tokens` is below
            `seq_len`.

    Example:
        >>> source = [{"text": "to be"}, {"text": "or not to be"}]
        >>> batches = heldout_token_batches(source, batch_size=2, seq_len=8)
        >>> len(batches), batches[0]["inputs"].shape
        (2, (2, 8))
        >>> int(sum(batch["mask"].sum() for batch in batches))  # 5 + 1 + 12 + 1 targets
        19
    """
    check_sizes(1, batch_size=batch_size)
    rows = HeldoutRows(
        source, seq_len=seq_len, max_tokens=max_tokens, field=field, tokenizer=tokenizer
    )
    numbers = np.pad(np.arange(len(rows)), (0, -len(rows) % batch_size), constant_values=-1)
    return [rows.read(part) for part in numbers.reshape(-1, batch_size)]
