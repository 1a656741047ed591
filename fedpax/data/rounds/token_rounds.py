"""Rounds of packed text: an endless stream of language-model batches, a shard for each island.

Each island reads its own documents again and again, in a new order each time, packs them into
rows, and shuffles the rows of a window, so that the rows of a batch come from many documents.
Where an island stands is three integers, and to restore it only the window is read again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import MASK, Cohort
from fedpax.data.populations.partition import (
    Examples,
    Partition,
    check_partition,
    get_field,
    partition_checksum,
    partition_iid,
)
from fedpax.data.rounds.stream import check_sizes, check_state, source_name
from fedpax.data.shuffle import hash_key, shuffled_index
from fedpax.data.text.packing import Batch, TokenPairs, concatenate, to_batch
from fedpax.data.text.tokenizer import BYTE_TOKENIZER, Tokenizer

_ARRAYS, _BYTES = 4, 4  # inputs, targets, segments, positions; each int32


class _Position(NamedTuple):
    """Where an island stands: ``row`` of the window that begins at a pair of a document.

    Documents are counted without end: those of the second epoch follow those of the first.
    """

    document: int
    offset: int
    row: int


class _Window(NamedTuple):
    """Rows in the order in which they are given out, and where the next window begins."""

    rows: TokenPairs
    order: NDArray[np.int64]
    end: _Position


class _Island:
    """The endless rows of one island."""

    def __init__(
        self,
        examples: Examples,
        field: str,
        indices: NDArray[np.int64],
        key: NDArray[np.uint64],
        length: int,
        shuffle_tokens: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._examples = examples
        self._field = field
        self._indices = indices
        self._key = key
        self._length = length
        self._shuffle_tokens = shuffle_tokens
        self._tokenizer = tokenizer
        self._epoch: tuple[int, NDArray[np.int64]] = (-1, indices)
        self._read: dict[int, NDArray[Any]] = {}  # by index
        self._window: _Window | None = None
        self._position = _Position(0, 0, 0)

    @property
    def position(self) -> _Position:
        return self._position

    @position.setter
    def position(self, position: _Position) -> None:
        self._position = position
        self._window = None

    def take(self, count: int) -> list[TokenPairs]:
        """Returns the next ``count`` rows, in pieces."""
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
        """Reads documents for a window: an epoch of them at most, but at least one row."""
        document, offset, _ = self._position
        texts: list[NDArray[Any]] = []
        available = -offset
        while available < self._length or (
            available < self._shuffle_tokens and len(texts) < len(self._indices)
        ):
            index = self._index(document + len(texts))
            texts.append(self._text(index))
            available += len(texts[-1]) + 1
        if sum(map(len, self._read.values())) > self._shuffle_tokens:
            self._read = {index: texts[-1]}  # with which the next window begins
        count = max(1, min(self._shuffle_tokens, available) // self._length)
        stop = offset + count * self._length
        rows = concatenate(texts, self._tokenizer.separator).map(
            lambda x: x[offset:stop].reshape(count, self._length)
        )
        ends = np.cumsum([len(text) + 1 for text in texts])
        whole = int(np.searchsorted(ends, stop, side="right"))  # documents used up
        end = _Position(document + whole, stop - int(ends[whole - 1]) if whole else stop, 0)
        order = shuffled_index(np.arange(count), count, hash_key(self._key, 1, document, offset))
        return _Window(rows, order, end)

    def _text(self, index: int) -> NDArray[Any]:
        """Returns the tokens of an example; a shard that fits in a window is read only once."""
        text = self._read.get(index)
        if text is None:
            text = self._tokenizer.encode(get_field(self._examples[index], self._field))
            self._read[index] = text
        return text

    def _index(self, document: int) -> int:
        """Says which example is the n-th document, counted without end."""
        epoch, place = divmod(document, len(self._indices))
        if self._epoch[0] != epoch:
            size = len(self._indices)
            order = shuffled_index(np.arange(size), size, hash_key(self._key, 0, epoch))
            self._epoch = (epoch, self._indices[order])
        return int(self._epoch[1][place])


class TokenRounds:
    """An endless iterator over rounds of packed text, as ``token_rounds`` makes it.

    Attributes:
        shape: (islands, local_steps, batch, length), the shape of every array of a round.
        items_per_round: how many targets a round has, over all islands.
        settings: what decides the stream; a state is restored only into the same.
    """

    def __init__(self, islands: Sequence[_Island], settings: dict[str, int | str]) -> None:
        self._islands = islands
        self.settings = settings
        self.shape = tuple(
            int(settings[name]) for name in ("islands", "local_steps", "batch", "length")
        )
        self.items_per_round = math.prod(self.shape)

    def __iter__(self) -> "TokenRounds":
        return self

    def __next__(self) -> Cohort:
        """Returns the next round, in arrays of its own."""
        _, steps, batch, _ = self.shape
        before = [island.position for island in self._islands]
        try:
            pieces = [piece for island in self._islands for piece in island.take(steps * batch)]
        except BaseException:  # a damaged file, or Ctrl-C: the islands must stay in step
            for island, position in zip(self._islands, before, strict=True):
                island.position = position
            raise
        pairs = TokenPairs(*(np.concatenate(arrays) for arrays in zip(*pieces, strict=True)))
        return Cohort(
            {
                name: rows.reshape(self.shape)
                for name, rows in _without_mask(to_batch(pairs)).items()
            }
        )

    def get_state(self) -> dict[str, Any]:
        """Returns where the stream stands, after the last round that it gave, for JSON."""
        return {
            "settings": dict(self.settings),
            "islands": [list(island.position) for island in self._islands],
        }

    def set_state(self, state: Any) -> None:
        """Goes to where a stream stood: the next rounds are bitwise those that followed there.

        Args:
            state: what ``get_state`` returned, in this process or another, of a stream that was
                made with the same settings over the same source.

        Raises:
            ValueError: if the state is of another stream, saying what differs.
        """
        positions = check_state(state, self.settings, "islands")
        for island, position in zip(self._islands, positions, strict=True):
            island.position = _Position(*(int(number) for number in position))


def token_round_shapes(*, islands: int, local_steps: int, batch: int, length: int) -> Cohort:
    """Tells the arrays of a round of ``token_rounds`` without reading any text.

    Args:
        islands: how many islands share the documents.
        local_steps: steps of an island in a round.
        batch: rows in a step of an island.
        length: tokens in a row.

    Returns:
        A `Cohort` of `jax.ShapeDtypeStruct`.

    Example:
        >>> shapes = token_round_shapes(islands=2, local_steps=3, batch=1, length=8)
        >>> shapes.batches["inputs"].shape, str(shapes.batches["inputs"].dtype)
        ((2, 3, 1, 8), 'int32')
    """
    shape = (islands, local_steps, batch, length)
    nothing = np.zeros((0, length), np.int32)
    empty = to_batch(TokenPairs(nothing, nothing, nothing.astype(np.bool_)))
    return Cohort(
        {
            name: jax.ShapeDtypeStruct(shape, array.dtype)
            for name, array in _without_mask(empty).items()
        }
    )


def _without_mask(batch: Batch) -> Batch:
    """Drop the mask: every row is full, and a mask would mark padding that there never is."""
    return {name: rows for name, rows in batch.items() if name != MASK}


def token_rounds(
    source: Examples,
    *,
    islands: int,
    local_steps: int,
    batch: int,
    length: int,
    seed: int = 0,
    partition: Partition | None = None,
    shuffle_tokens: int = 2**22,
    field: str = "text",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
) -> TokenRounds:
    """Makes an endless stream of language-model rounds from a source of texts.

    Documents are divided among the islands; by default each island has a random sample of them.
    All methods that are given the same arguments see the same tokens in the same order: data
    parallel training takes the stream of DiLoCo. One island (``islands=1``) has all documents.

    Args:
        source: the documents; a source that ``load`` returned, or a list of dicts.
        islands: how many islands share the documents.
        local_steps: steps of an island in a round.
        batch: rows in a step of an island.
        length: tokens in a row.
        seed: chooses the default partition and all orders.
        partition: the documents of each island, as the functions ``partition_...`` return; by
            default ``partition_iid``. For islands that differ:
            ``partition_by_field(source, "client", islands)``.
        shuffle_tokens: how much of its shard an island reads, and shuffles by rows, together; at
            most an epoch. It takes about 4 bytes a token. With 1, rows follow each other.
        field: the field of an example that holds its text, bytes of UTF-8 or a string.
        tokenizer: what turns texts into tokens.

    Returns:
        An iterator. Each item is a `fedpax.Cohort` whose batches are a dict of int32 arrays
        [islands, local_steps, batch, length]: ``inputs``, ``targets``, ``segments`` and
        ``positions``, as ``fedpax.data.pack`` describes them. Rows are full: there is no mask.

    Raises:
        ValueError: for sizes that are not positive or do not fit the memory, fewer documents
            than islands, or a partition that does not fit.

    Example:
        >>> from fedpax.data import decode
        >>> source = [{"text": "to be"}, {"text": "or not to be"}]
        >>> rounds = token_rounds(source, islands=2, local_steps=3, batch=1, length=8)
        >>> cohort = next(rounds)
        >>> cohort.batches["inputs"].shape
        (2, 3, 1, 8)
        >>> state = rounds.get_state()
        >>> following = next(rounds)
        >>> rounds.set_state(state)
        >>> bool((next(rounds).batches["inputs"] == following.batches["inputs"]).all())
        True
    """
    import grain  # here, as it takes longer to import than everything else

    sizes = {"islands": islands, "local_steps": local_steps, "batch": batch, "length": length}
    check_sizes(_ARRAYS * _BYTES, **sizes)
    check_sizes(1, shuffle_tokens=shuffle_tokens)
    if partition is None:
        partition = partition_iid(len(source), islands, seed=seed)
    partition = check_partition(partition, islands, len(source), "islands")
    settings: dict[str, int | str] = {
        "source": source_name(source),
        "documents": len(source),
        **sizes,
        "seed": seed,
        "partition": partition_checksum(partition),
        "shuffle_tokens": shuffle_tokens,
        "field": field,
        "tokenizer": tokenizer.name,
    }
    examples = grain.MapDataset.source(source)
    return TokenRounds(
        [
            _Island(examples, field, indices, hash_key(seed, k), length, shuffle_tokens, tokenizer)
            for k, indices in enumerate(partition)
        ],
        settings,
    )
