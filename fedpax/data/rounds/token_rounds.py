"""token_rounds: an endless stream of packed text, one shard of the documents per island.

Each island iterates over its own documents, in a new random order in every epoch, packs them into
rows, and shuffles the rows within a window, so that the rows of a batch come from many documents.
An island's position is three integers; restoring it reads only the current window again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int64, UInt64

from fedpax.clients.cohort import MASK, Cohort
from fedpax.data.populations.partition import (
    Examples,
    Indices,
    Partition,
    check_partition,
    get_field,
    partition_checksum,
    partition_iid,
)
from fedpax.data.rounds.stream import check_sizes, check_state, source_name
from fedpax.data.shuffle import hash_key, shuffled_index
from fedpax.data.text.packing import Batch, TokenPairs, Tokens, concatenate, to_batch
from fedpax.data.text.tokenizer import BYTE_TOKENIZER, Tokenizer

_ARRAYS, _BYTES = 4, 4  # inputs, targets, segments, positions; each int32


class _Position(NamedTuple):
    """An island's position: the next row of a window, and the pair at which the window starts.

    Attributes:
        document: the window's first document; numbers continue over epochs.
        offset: the window's first pair within that document.
        row: the next row of the window.
    """

    document: int
    offset: int
    row: int


class _Window(NamedTuple):
    """The rows of a window, their order, and the position of the next window."""

    rows: TokenPairs
    order: Int64[np.ndarray, " rows"]
    end: _Position


class _Island:
    """The endless sequence of rows of one island."""

    def __init__(
        self,
        examples: Examples,
        field: str,
        indices: Indices,
        key: UInt64[np.ndarray, ""],
        seq_len: int,
        shuffle_tokens: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._examples = examples
        self._field = field
        self._indices = indices
        self._key = key
        self._seq_len = seq_len
        self._shuffle_tokens = shuffle_tokens
        self._tokenizer = tokenizer
        self._epoch: tuple[int, Indices] = (-1, indices)
        self._cache: dict[int, Tokens] = {}  # tokens by example
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
        """Return the next `count` rows, as a list of parts."""
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
        documents: list[Tokens] = []
        available = -offset
        while available < self._seq_len or (
            available < self._shuffle_tokens and len(documents) < len(self._indices)
        ):
            index = self._example_index(document + len(documents))
            documents.append(self._tokens(index))
            available += len(documents[-1]) + 1
        if sum(map(len, self._cache.values())) > self._shuffle_tokens:
            self._cache = {index: documents[-1]}  # the next window starts within this document
        count = max(1, min(self._shuffle_tokens, available) // self._seq_len)
        stop = offset + count * self._seq_len
        rows = concatenate(documents, self._tokenizer.separator).map(
            lambda x: x[offset:stop].reshape(count, self._seq_len)
        )
        ends = np.cumsum([len(tokens) + 1 for tokens in documents])
        finished = int(np.searchsorted(ends, stop, side="right"))  # documents read to their end
        next_offset = stop - int(ends[finished - 1]) if finished else stop
        end = _Position(document + finished, next_offset, 0)
        order = shuffled_index(np.arange(count), count, hash_key(self._key, 1, document, offset))
        return _Window(rows, order, end)

    def _tokens(self, index: int) -> Tokens:
        """Return the tokens of an example; a shard that fits in a window is read only once."""
        tokens = self._cache.get(index)
        if tokens is None:
            tokens = self._tokenizer.encode(get_field(self._examples[index], self._field))
            self._cache[index] = tokens
        return tokens

    def _example_index(self, document: int) -> int:
        """Return the example that is the n-th document, counted over all epochs."""
        epoch, position = divmod(document, len(self._indices))
        if self._epoch[0] != epoch:
            size = len(self._indices)
            order = shuffled_index(np.arange(size), size, hash_key(self._key, 0, epoch))
            self._epoch = (epoch, self._indices[order])
        return int(self._epoch[1][position])


class TokenRounds:
    """An endless iterator over rounds of packed text; made by `token_rounds`.

    Attributes:
        shape: `(islands, local_steps, batch_size, seq_len)`, the shape of every array of a round.
        items_per_round: the number of target tokens in a round, over all islands.
        item_unit: `"tokens"`, the unit of `items_per_round`.
        settings: the settings that determine the stream. A state can only be restored into a stream
            with equal settings.
    """

    item_unit = "tokens"

    def __init__(self, islands: Sequence[_Island], settings: dict[str, int | str]) -> None:
        self._islands = islands
        self.settings = settings
        self.shape = tuple(
            int(settings[name]) for name in ("islands", "local_steps", "batch_size", "seq_len")
        )
        self.items_per_round = math.prod(self.shape)

    def __iter__(self) -> "TokenRounds":
        return self

    def __next__(self) -> Cohort:
        """Return the cohort of the next round, in new arrays."""
        _, steps, batch_size, _ = self.shape
        before = [island.position for island in self._islands]
        try:
            parts = [part for island in self._islands for part in island.take(steps * batch_size)]
        except BaseException:  # a damaged file, or Ctrl-C: all islands must be at the same round
            for island, position in zip(self._islands, before, strict=True):
                island.position = position
            raise
        pairs = TokenPairs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        return Cohort(
            {
                name: rows.reshape(self.shape)
                for name, rows in _without_mask(to_batch(pairs)).items()
            }
        )

    def get_state(self) -> dict[str, Any]:
        """Return the stream's position after the last round, as JSON values."""
        return {
            "settings": dict(self.settings),
            "islands": [list(island.position) for island in self._islands],
        }

    def set_state(self, state: Any) -> None:
        """Move to a saved position; the following rounds are bitwise those of the saved stream.

        Args:
            state: a state from `get_state`, of this process or another, of a stream with the same
                settings over the same source.

        Raises:
            ValueError: the state was saved by another stream; the message lists the differences.
        """
        positions = check_state(state, self.settings, "islands")
        for island, position in zip(self._islands, positions, strict=True):
            island.position = _Position(*(int(number) for number in position))


def token_round_shapes(*, islands: int, local_steps: int, batch_size: int, seq_len: int) -> Cohort:
    """Return the shapes and dtypes of a round of `token_rounds`, without reading any text.

    Args:
        islands: the number of islands.
        local_steps: steps per island and round.
        batch_size: rows per step and island.
        seq_len: tokens per row.

    Returns:
        A `Cohort` of `jax.ShapeDtypeStruct`.

    Example:
        >>> shapes = token_round_shapes(islands=2, local_steps=3, batch_size=1, seq_len=8)
        >>> shapes.batches["inputs"].shape, str(shapes.batches["inputs"].dtype)
        ((2, 3, 1, 8), 'int32')
    """
    shape = (islands, local_steps, batch_size, seq_len)
    nothing = np.zeros((0, seq_len), np.int32)
    empty = to_batch(TokenPairs(nothing, nothing, nothing.astype(np.bool_)))
    return Cohort(
        {
            name: jax.ShapeDtypeStruct(shape, array.dtype)
            for name, array in _without_mask(empty).items()
        }
    )


def _without_mask(batch: Batch) -> Batch:
    """Drop the mask: all rows of a round are full."""
    return {name: rows for name, rows in batch.items() if name != MASK}


def token_rounds(
    source: Examples,
    *,
    islands: int,
    local_steps: int,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    partition: Partition | None = None,
    shuffle_tokens: int = 2**22,
    field: str = "text",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
) -> TokenRounds:
    """Make an endless stream of language-model rounds from a source of texts.

    Documents are divided among the islands; by default each island has a random sample of them.
    Streams with equal arguments yield the same tokens in the same order, so DiLoCo can be compared
    with data-parallel training. A single island (`islands=1`) has all documents.

    Args:
        source: the documents: a source from `load`, or a list of dicts.
        islands: the number of islands.
        local_steps: steps per island and round.
        batch_size: rows per step and island.
        seq_len: tokens per row.
        seed: the random seed of the default partition and of all orders.
        partition: the indices of each island's documents, as the `partition_...` functions return
            them. Default None: `partition_iid`. For islands with different data use
            `partition_by_field(source, "client", islands)`.
        shuffle_tokens: the window within which an island shuffles its rows, in tokens; at most one
            epoch. It takes about 4 bytes of memory per token. With 1, rows are not shuffled.
        field: the field of an example with its text, a string or UTF-8 bytes.
        tokenizer: the tokenizer.

    Returns:
        An iterator over `fedpax.Cohort`. Its batches are a dict of int32 arrays `[islands,
        local_steps, batch_size, seq_len]`: `inputs`, `targets`, `segments` and `positions`, as
        `fedpax.data.pack` describes them. All rows are full, so there is no mask.

    Raises:
        KeyError: at the first round, the examples have no such field.
        ValueError: a size is below 1 or does not fit the memory, there are fewer documents than
            islands, or the partition does not fit the source.

    Example:
        >>> from fedpax.data import decode
        >>> source = [{"text": "to be"}, {"text": "or not to be"}]
        >>> rounds = token_rounds(source, islands=2, local_steps=3, batch_size=1, seq_len=8)
        >>> cohort = next(rounds)
        >>> cohort.batches["inputs"].shape
        (2, 3, 1, 8)
        >>> state = rounds.get_state()
        >>> following = next(rounds)
        >>> rounds.set_state(state)
        >>> bool((next(rounds).batches["inputs"] == following.batches["inputs"]).all())
        True
    """
    import grain  # here because it is slow to import

    sizes = {
        "islands": islands,
        "local_steps": local_steps,
        "batch_size": batch_size,
        "seq_len": seq_len,
    }
    check_sizes(_ARRAYS * _BYTES, **sizes)
    check_sizes(1, shuffle_tokens=shuffle_tokens)
    if partition is None:
        partition = partition_iid(len(source), islands, seed=seed)
    partition = check_partition(partition, islands, len(source), "islands")
    settings: dict[str, int | str] = {
        "source": source_name(source),
        "num_documents": len(source),
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
            _Island(examples, field, indices, hash_key(seed, k), seq_len, shuffle_tokens, tokenizer)
            for k, indices in enumerate(partition)
        ],
        settings,
    )
