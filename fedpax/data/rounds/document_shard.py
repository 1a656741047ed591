"""Shard: one part of a data set's documents, read as an endless sequence of packed rows."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from fedpax.data.rounds.documents import Field, encode_named, read
from fedpax.populations.partition import Indices
from fedpax.sources.shuffle import hash_key, shuffled_index
from fedpax.sources.source import Examples
from fedpax.text.packing import AnyDocument, Document, TokenPairs, concatenate, padding, tell_cut
from fedpax.text.tokenizer import Tokenizer

_CHUNK = 256  # documents whose order is computed at once
_MOST_AHEAD = 128  # documents that are read and tokenized at once


class ShardPosition(NamedTuple):
    """A shard's position: the next row of a window, and the pair at which the window starts."""

    document: int = 0  # the window's first document; numbers continue over epochs
    offset: int = 0  # the window's first pair within that document
    row: int = 0


class DocumentOrder:
    """The order in which one of several shards reads its documents, computed and not stored."""

    # Document n is dealt to shard n mod `num_shards`, which has a new order in every epoch. `key`,
    # equal for all shards, selects the orders.

    def __init__(
        self, documents: Indices | int, shard: int, num_shards: int, key: UInt64[np.ndarray, ""]
    ) -> None:
        self._indices = None if isinstance(documents, int) else documents
        self._total = documents if isinstance(documents, int) else len(documents)
        self._shard = shard
        self._num_shards = num_shards
        self._key = key
        self._chunks: dict[int, list[int]] = {}  # the two that were computed last

    def __len__(self) -> int:
        return -(-(self._total - self._shard) // self._num_shards)

    def __getitem__(self, document: int) -> int:
        chunk, place = divmod(document, _CHUNK)
        if chunk not in self._chunks:
            if len(self._chunks) == 2:
                del self._chunks[next(iter(self._chunks))]
            numbers = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
            self._chunks[chunk] = self._order(numbers).tolist()
        return self._chunks[chunk][place]

    def _order(self, numbers: Int64[np.ndarray, " documents"]) -> Int64[np.ndarray, " documents"]:
        epoch, place = np.divmod(numbers, len(self))
        in_shard = shuffled_index(place, len(self), hash_key(self._key, 1, self._shard, epoch))
        dealt = self._shard + in_shard * self._num_shards
        order = shuffled_index(dealt, self._total, hash_key(self._key, 0))
        return order if self._indices is None else self._indices[order]


class _Window(NamedTuple):
    """The rows of a window, their order, and the position of the next window."""

    rows: TokenPairs
    order: Int64[np.ndarray, " rows"]
    end: ShardPosition


class Shard:
    """The endless sequence of rows of one shard."""

    def __init__(
        self,
        source: Examples,
        order: DocumentOrder,
        key: UInt64[np.ndarray, ""],
        *,
        field: Field,
        tokenizer: Tokenizer,
        seq_len: int,
        window_tokens: int,
    ) -> None:
        self._source = source
        self._order = order
        self._key = key
        self._field = field
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._window_tokens = window_tokens
        self._cache: dict[int, AnyDocument] = {}  # tokens by example
        self._cached_tokens = 0
        self._mean_tokens = float(window_tokens)  # of a document, so the first read is of one
        self._ahead = 0  # documents before this number were read
        self._window: _Window | None = None
        self._position = ShardPosition()

    @property
    def position(self) -> ShardPosition:
        """The position of the next row."""
        return self._position

    @position.setter
    def position(self, position: ShardPosition) -> None:
        self._position = position
        self._window = None

    def take(self, count: int) -> list[TokenPairs]:
        """Return the next `count` rows, as a list of parts `[rows, seq_len]`."""
        pieces = []
        while count:
            window = self._window = self._window or self._next_window()
            row = self._position.row
            chosen = window.order[row : row + count]
            pieces.append(window.rows.take(chosen))
            count -= len(chosen)
            if row + len(chosen) < len(window.order):
                self._position = self._position._replace(row=row + len(chosen))
            else:
                self.position = window.end
        return pieces

    def _next_window(self) -> _Window:
        """Read the documents of a window: at most one epoch, and at least one row."""
        document, offset, _ = self._position
        documents: list[AnyDocument] = []
        available = -offset
        while available < self._seq_len or (
            available < self._window_tokens and len(documents) < len(self._order)
        ):
            wanted = max(self._seq_len, self._window_tokens) - available
            following = self._tokens(document + len(documents), wanted)
            if documents and isinstance(last := documents[-1], Document):
                empty = padding(available, len(following) + 1, self._seq_len)
                documents[-1] = last.padded(len(last) + empty, self._tokenizer.separator)
                available += empty
            tell_cut(following, self._seq_len)
            documents.append(following)
            available += len(following) + 1
        count = max(1, min(self._window_tokens, available) // self._seq_len)
        stop = offset + count * self._seq_len
        rows = concatenate(documents, self._tokenizer.separator).map(
            lambda x: x[offset:stop].reshape(count, self._seq_len)
        )
        ends = np.cumsum([len(tokens) + 1 for tokens in documents])
        finished = int(np.searchsorted(ends, stop, side="right"))  # documents read to their end
        next_offset = stop - int(ends[finished - 1]) if finished else stop
        end = ShardPosition(document + finished, next_offset, 0)
        self._forget_before(end.document)
        order = shuffled_index(np.arange(count), count, hash_key(self._key, document, offset))
        return _Window(rows, order, end)

    def _tokens(self, document: int, wanted: int) -> AnyDocument:
        """Return a document's tokens, and read ahead until about `wanted` tokens are there."""
        example = self._order[document]
        if example not in self._cache:
            count = min(int(wanted / self._mean_tokens) + 1, len(self._order), _MOST_AHEAD)
            following = (self._order[document + k] for k in range(count))
            missing = [e for e in dict.fromkeys(following) if e not in self._cache]
            examples = read(self._source, missing)
            tokens = encode_named(self._tokenizer, self._source, missing, examples, self._field)
            self._cache.update(zip(missing, tokens, strict=True))
            added = sum(map(len, tokens))
            self._cached_tokens += added
            self._mean_tokens = max(1.0, added / len(tokens))
            self._ahead = document + count
        return self._cache[example]

    def _forget_before(self, document: int) -> None:
        """Forget documents that were read to their end, unless an epoch fits in a window."""
        # A shard that fits in a window is then read only once.
        if self._cached_tokens <= self._window_tokens:
            return
        kept = {self._order[number] for number in range(document, max(self._ahead, document + 1))}
        self._cache = {example: self._cache[example] for example in kept & self._cache.keys()}
        self._cached_tokens = sum(map(len, self._cache.values()))
