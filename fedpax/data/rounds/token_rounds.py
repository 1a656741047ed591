"""token_rounds: an endless stream of packed text."""

import zlib

import jax
import numpy as np
from jaxtyping import UInt64

from fedpax.clients.cohort import Cohort
from fedpax.data.rounds.documents import Field, encode_examples
from fedpax.data.rounds.mixture import Mixture
from fedpax.data.rounds.stream_parts import RowMask, check_sizes, source_name
from fedpax.data.rounds.token_stream import IN_MIXTURE, DataSet, TokenRounds, without_mask
from fedpax.errors import ArgumentError
from fedpax.populations.partition import (
    Partition,
    check_partition,
    partition_checksum,
)
from fedpax.sources.shuffle import hash_key
from fedpax.sources.source import Examples, as_examples
from fedpax.text.packing import TokenPairs, to_batch
from fedpax.text.tokenizer import BYTE_TOKENIZER, Tokenizer

_ARRAYS, _BYTES = 4, 4  # inputs, targets, segments, positions; each int32


def token_round_shapes(
    *,
    islands: int,
    local_steps: int,
    batch_size: int,
    seq_len: int,
    with_mask: bool = False,
) -> Cohort:
    """Return the shapes and dtypes of a round of `token_rounds`, without reading any text.

    The result is a `Cohort` of `jax.ShapeDtypeStruct`. `with_mask` adds the mask of a
    `Conversation`; other arguments are as in `token_rounds`.

    Example:
        >>> shapes = token_round_shapes(islands=2, local_steps=3, batch_size=1, seq_len=8)
        >>> shapes.batches["inputs"].shape, str(shapes.batches["inputs"].dtype)
        ((2, 3, 1, 8), 'int32')
    """
    shape = (islands, local_steps, batch_size, seq_len)
    nothing = np.zeros((0, seq_len), np.int32)
    flags = nothing.astype(np.bool_)
    empty = to_batch(TokenPairs(nothing, nothing, flags, flags))
    return Cohort(
        {
            name: jax.ShapeDtypeStruct(shape, array.dtype)
            for name, array in (empty if with_mask else without_mask(empty)).items()
        }
    )


def token_rounds(
    source: Examples | Mixture,
    *,
    islands: int,
    local_steps: int,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    partition: Partition | None = None,
    shuffle_tokens: int = 2**22,
    num_shards: int | None = None,
    field: Field = "text",
    tokenizer: Tokenizer = BYTE_TOKENIZER,
    rows: RowMask | None = None,
) -> TokenRounds:
    """Make an endless stream of language-model rounds from texts.

    Row n of the run, counted step by step and within a step island by island, depends on the seed,
    the sources, `seq_len`, `shuffle_tokens`, `num_shards` and n alone: methods with equal
    `num_shards` train on the same tokens.

    Args:
        source: the documents: a source from `load`, a list of dicts, a `grain.MapDataset` of dicts,
            a dict of columns, a data frame, or a `Mixture` of several.
        islands: the number of islands.
        local_steps: steps per island and round.
        batch_size: rows per step and island.
        seq_len: tokens per row.
        seed: the random seed of all orders.
        partition: the indices of each island's documents, as the `partition_...` functions return
            them. Rows are then counted by island. Default None: islands share all documents.
        shuffle_tokens: the window within which rows of a data set (or an island's part) are
            shuffled, in tokens, of 4 to 13 bytes each. With 1, rows of a shard are not shuffled.
        num_shards: parts of a data set (or of an island's part) that are read separately. A smaller
            divisor is used where shards would have fewer than 64 documents. Default None: the
            number of rows in a step (of an island, with a partition), or in the state that is
            restored.
        field: the field with the text, a string or UTF-8 bytes; or a `Conversation`.
        tokenizer: the tokenizer.
        rows: the rows that this process needs, bool `[islands, local_steps, batch_size]`, from
            `addressable_rows`. Default None: all.

    Returns:
        An iterator over `fedpax.Cohort`. Its batches are a dict of int32 arrays `[islands,
        local_steps, batch_size, seq_len]`: `inputs`, `targets`, `segments` and `positions`, as
        `fedpax.data.pack` describes them, without padding. With a `Conversation` there is also
        `mask`, float32, 1 for targets in answers. If `rows` leaves some out, arrays are
        `fedpax.data.LocalRows`, of the same shape.

    Raises:
        KeyError: the examples have no such field.
        TypeError: the field is not a text, or `source` is something else.
        ValueError: a size is below 1 or does not fit the memory, there are no documents, the
            partition does not fit the source or comes with a mixture, or `rows` has another shape,
            another dtype or no row.

    Example:
        >>> from fedpax.data import decode
        >>> source = [{"text": "to be"}, {"text": "or not to be"}]
        >>> rounds = token_rounds(source, islands=2, local_steps=3, batch_size=1, seq_len=8)
        >>> cohort = next(rounds)
        >>> cohort.batches["inputs"].shape
        (2, 3, 1, 8)
    """
    shape = (islands, local_steps, batch_size, seq_len)
    names = ("islands", "local_steps", "batch_size", "seq_len")
    check_sizes(0, **dict(zip(names, shape, strict=True)))
    rows = np.ones(shape[:3], np.bool_) if rows is None else rows
    if rows.shape != shape[:3] or rows.dtype != np.bool_ or not rows.any():
        raise ArgumentError(
            f"rows is {rows.dtype}{list(rows.shape)} with {np.count_nonzero(rows)} rows, expected "
            f"bool{list(shape[:3])} with at least one: make it by addressable_rows."
        )
    check_sizes(_ARRAYS * _BYTES, rows=int(rows.sum()), seq_len=seq_len)
    check_sizes(0, shuffle_tokens=shuffle_tokens)
    if num_shards is not None:
        check_sizes(0, num_shards=num_shards)
    settings: dict[str, int | str] = {
        "seed": seed,
        "seq_len": seq_len,
        "shuffle_tokens": shuffle_tokens,
        "tokenizer": tokenizer.name,
    }
    if isinstance(source, Mixture):
        if partition is not None:
            raise ArgumentError(
                "partition divides one source, but source is a Mixture: leave partition out."
            )
        mixture = source
        data_sets = [
            DataSet(name, part, mixture.fields.get(name, field), len(part), _named_key(seed, name))
            for name, part in mixture.sources.items()
        ]
        for data_set in data_sets:
            settings[IN_MIXTURE + data_set.name] = (
                f"{source_name(data_set.source)}, {data_set.documents} documents, "
                f"field {str(data_set.field)!r}"
            )
    else:
        source = as_examples(source)
        name = source_name(source)
        if not len(source):
            raise ArgumentError(f"{name} has no documents: load another split.")
        mixture = Mixture({name: source}, {name: 1.0})
        settings |= {"source": name, "num_documents": len(source), "field": str(field)}
        if partition is None:
            data_sets = [DataSet(name, source, field, len(source), hash_key(seed))]
        else:
            partition = check_partition(partition, islands, len(source), "islands")
            settings |= {"islands": islands, "partition": partition_checksum(partition)}
            data_sets = [
                DataSet(f"island {k}", source, field, indices, hash_key(seed, k))
                for k, indices in enumerate(partition)
            ]
    for data_set in data_sets[: len(mixture.sources)]:  # the islands have one source
        # A wrong field raises before the training.
        encode_examples(tokenizer, [data_set.source[0]], data_set.field)
    return TokenRounds(
        mixture,
        data_sets,
        shape,
        rows,
        by_island=partition is not None,
        seed=seed,
        shuffle_tokens=shuffle_tokens,
        num_shards=num_shards,
        tokenizer=tokenizer,
        settings=settings,
    )


def _named_key(seed: int, name: str) -> UInt64[np.ndarray, ""]:
    """Return a key by name, so that a data set's order does not depend on other data sets."""
    return hash_key(seed, zlib.crc32(name.encode()))
