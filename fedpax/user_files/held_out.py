"""held_out: which examples a hash of their content keeps for evaluation, equal on every machine."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, UInt64
from numpy.typing import NDArray

from fedpax.errors import ArgumentError
from fedpax.populations.label_skew import (
    partition_by_quantity,
    partition_by_shards,
    partition_dirichlet,
)
from fedpax.populations.partition import partition_iid
from fedpax.sources.shuffle import hash_key
from fedpax.user_files.arrow_numpy import to_numpy
from fedpax.user_files.finding import CLIENT
from fedpax.user_files.formats import LoadOptions
from fedpax.user_files.image_hashes import (
    hash_bytes,
    hash_column,
    hash_images,
    visible,
    without_hashes,
)
from fedpax.user_files.table_source import TableSource

_BLOCK = 1 << 16  # examples that are hashed at once: a column of them stays in the cache


def held_out(table: pa.Table, fraction: float) -> Bool[np.ndarray, " examples"]:
    """Return whether each example is held out, in any order of files, rows and columns."""
    # Equal examples are on the same side, so that none is both trained and evaluated on. Examples
    # with images are chosen by the bytes of their images alone.
    if not fraction:
        return np.zeros(table.num_rows, np.bool_)
    starts = range(0, max(1, table.num_rows), _BLOCK)
    keys = np.concatenate([_key_block(table.slice(k, _BLOCK)) for k in starts])
    # 53 bits, which a float64 holds exactly.
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def _key_block(table: pa.Table) -> UInt64[np.ndarray, " examples"]:
    keys, has_image = hash_images(table)
    if not has_image.all():
        keys = np.where(has_image, keys, _hash_block(without_hashes(table)))
    return keys


def _hash_block(table: pa.Table) -> UInt64[np.ndarray, " examples"]:
    keys = np.zeros(table.num_rows, np.uint64)
    for name in sorted(table.column_names):
        keys = hash_key(keys, hash_bytes(name.encode()), _hash_column(table.column(name)))
    return keys


def part_of_split(
    name: str,
    table: pa.Table,
    options: LoadOptions,
    client: str | None,
    added: Sequence[str] = (),
) -> pa.Table:
    """Return the examples of a split that a share of the examples makes, without `added`."""
    split, by = options.split, options.heldout_by
    if not options.heldout_fraction or split is None:
        return table
    if by == "client" and client is not None:
        by = client
    if by != "example" and by not in table.column_names:
        raise ArgumentError(
            f"heldout_by={by!r} is not a column of {name}, expected 'example', 'client' for files "
            f"with clients, or one of {', '.join(map(repr, visible(table.column_names)))}."
        )
    chosen = {*table.column_names} - {*added} if by == "example" else {by, hash_column(by)}
    columns = [name for name in table.column_names if name in chosen]
    is_held_out = held_out(table.select(columns), options.heldout_fraction)
    return table.filter(pa.array(is_held_out == (split != "train")))


def check_any(name: str, table: pa.Table, options: LoadOptions) -> None:
    """Raise an error for a split without examples."""
    if not table.num_rows:
        raise ArgumentError(
            f"The split {options.split!r} of {name} has no examples with heldout_fraction="
            f"{options.heldout_fraction}, expected at least one. Set another fraction."
        )


def _hash_column(column: Any) -> UInt64[np.ndarray, " examples"]:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.concatenate([np.zeros(0, np.uint64), *map(_hash_texts, column.chunks)])
    values = to_numpy(column)
    mask = np.ma.getmaskarray(values).reshape(len(values), -1).any(axis=1)
    data = np.ma.getdata(values)
    if data.ndim > 1:
        rows = np.ascontiguousarray(data.reshape(len(data), -1))
        keys = np.array([hash_bytes(row.tobytes()) for row in rows], np.uint64)
    elif data.dtype.kind == "O":
        known: dict[Any, int] = {}
        keys = np.zeros(len(data), np.uint64)
        for row, value in enumerate(data):
            content = _content(value)
            if content not in known:
                known[content] = hash_bytes(content)
            keys[row] = known[content]
    elif data.dtype.kind == "f":  # 3.0 in a file of floats and 3 in one of integers are equal
        keys = data.astype(np.float64).view(np.uint64)
    elif data.dtype.kind in "iub":
        whole = data.astype(np.float64)
        keys = whole.view(np.uint64)
        large = np.abs(whole) >= 2.0**53
        keys[large] = data[large].astype(np.int64).view(np.uint64)
    else:
        keys = data.astype(np.int64).view(np.uint64)
    return np.where(mask, np.uint64(hash_bytes(b"missing")), keys)


def _hash_texts(column: Any) -> UInt64[np.ndarray, " examples"]:
    """Hash each distinct text once."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    texts = column.dictionary.cast(pa.large_binary()).to_pylist()
    keys = [hash_bytes(b"missing" if text is None else text) for text in texts]
    keys.append(hash_bytes(b"missing"))
    codes = column.indices.fill_null(len(texts)).to_numpy()
    of_rows: UInt64[np.ndarray, " examples"] = np.array(keys, np.uint64)[codes]
    return of_rows


def _content(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.astype("<f8" if value.dtype.kind == "f" else "<i8").tobytes()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return json.dumps(value, sort_keys=True, default=str).encode()


# Clients made by a partition, for files that have none or whose clients it replaces.
_CLIENTS = 100
_FORMS = (
    "iid:CLIENTS, dirichlet:ALPHA:CLIENTS, shards:SHARDS:CLIENTS and quantity:ALPHA:CLIENTS, each "
    "with :SEED or without"
)


class _Kind(NamedTuple):
    """A kind of partition."""

    by_label: bool
    parameter: Callable[[str], Any] | None
    divide: Callable[[NDArray[np.int64], int, Any, int], Any]


_KINDS = {
    "iid": _Kind(False, None, lambda labels, n, _, seed: partition_iid(len(labels), n, seed=seed)),
    "dirichlet": _Kind(
        True,
        float,
        lambda labels, n, a, seed: partition_dirichlet(labels, n, alpha=a, seed=seed),
    ),
    "shards": _Kind(
        True,
        int,
        lambda labels, n, k, seed: partition_by_shards(
            labels, n, shards_per_participant=k, seed=seed
        ),
    ),
    "quantity": _Kind(
        False,
        float,
        lambda labels, n, a, seed: partition_by_quantity(len(labels), n, alpha=a, seed=seed),
    ),
}


class _Division(NamedTuple):
    """A partition with its parameter."""

    kind: _Kind
    num_clients: int
    parameter: Any
    seed: int

    def of(self, labels: NDArray[np.int64]) -> Any:
        """Return the indices of each client's examples."""
        return self.kind.divide(labels, self.num_clients, self.parameter, self.seed)


def check_partition(columns: Sequence[str], options: LoadOptions) -> _Division:
    """Parse the partition, and check that it fits the columns of the files."""
    partition, label = options.partition or "", options.label
    name, *numbers = partition.split(":")
    kind = _KINDS.get(name)
    try:
        if kind is None:
            raise ValueError
        parameter = None if kind.parameter is None else kind.parameter(numbers.pop(0))
        num_clients = int(numbers.pop(0)) if numbers else _CLIENTS
        seed = int(numbers.pop(0)) if numbers else 0
        if numbers or seed < 0:
            raise ValueError
    except (ValueError, IndexError):
        raise ArgumentError(
            f"partition={partition!r}, expected one of {_FORMS}. Set for example "
            "partition='dirichlet:0.3:100'."
        ) from None
    if options.client is not None or CLIENT in columns:
        raise ArgumentError(
            f"partition={partition!r} makes clients, but the files have them in the column "
            f"{options.client or CLIENT!r}. Leave partition out, or the column and client=."
        )
    if kind.by_label and label not in columns:
        raise ArgumentError(
            f"partition={partition!r} divides examples by label, but label={label!r} is not a "
            f"column. Set label to one of {', '.join(map(repr, columns))}."
        )
    return _Division(kind, num_clients, parameter, seed)


def add_partition(table: pa.Table, options: LoadOptions) -> pa.Table:
    """Add the column of clients that a partition makes: the numbers from 0."""
    division = check_partition(visible(table.column_names), options)
    labels = np.zeros(table.num_rows, np.int64)
    if division.kind.by_label:
        labels = _numbered(table.column(options.label))
    owner = np.empty(table.num_rows, np.int64)
    for number, indices in enumerate(division.of(labels)):
        owner[indices] = number
    return table.append_column(CLIENT, pa.array(owner))


def partition_prepared(source: TableSource, options: LoadOptions) -> TableSource:
    """Add the clients of a partition to a prepared folder's source, as a column."""
    # The examples keep their order. The partition replaces the clients that `prepare` named by
    # files; a client that the files have remains a column.
    table = source.stored.drop_columns([CLIENT]) if source.client == CLIENT else source.stored
    table = add_partition(table, options._replace(label=source.label))
    return TableSource(source.name, source.folder, table, client=CLIENT, label=source.label)


def _numbered(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return a number for each label, in the order of the labels' texts."""
    encoded = column.dictionary_encode().unify_dictionaries()
    distinct = encoded.chunk(0).dictionary if encoded.num_chunks else pa.array([], column.type)
    values = np.ma.getdata(to_numpy(distinct)).astype(str)
    texts, number = np.unique(np.append(values, "missing"), return_inverse=True)
    del texts
    codes = [pc.fill_null(chunk.indices, len(values)).to_numpy() for chunk in encoded.chunks]
    numbered: NDArray[np.int64] = number[np.concatenate([np.zeros(0, np.int64), *codes])]
    return numbered
