"""Clients made by a partition, for files that have none or whose clients it replaces."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedpax.errors import ArgumentError
from fedpax.populations.label_skew import partition_by_shards, partition_dirichlet
from fedpax.populations.partition import partition_iid
from fedpax.populations.quantity_skew import partition_by_quantity
from fedpax.user_files.columns import to_numpy
from fedpax.user_files.finding import CLIENT
from fedpax.user_files.load_options import LoadOptions
from fedpax.user_files.table_source import TableSource

_CLIENTS = 100
_FORMS = "iid:CLIENTS, dirichlet:ALPHA:CLIENTS, shards:SHARDS:CLIENTS and quantity:ALPHA:CLIENTS"


class _Kind(NamedTuple):
    """A kind of partition: whether it needs labels, the type of its parameter, and its function."""

    by_label: bool
    parameter: Callable[[str], Any] | None
    divide: Callable[[NDArray[np.int64], int, Any], Any]


_KINDS = {
    "iid": _Kind(False, None, lambda labels, n, _: partition_iid(len(labels), n)),
    "dirichlet": _Kind(True, float, lambda labels, n, a: partition_dirichlet(labels, n, alpha=a)),
    "shards": _Kind(
        True, int, lambda labels, n, k: partition_by_shards(labels, n, shards_per_participant=k)
    ),
    "quantity": _Kind(
        False, float, lambda labels, n, a: partition_by_quantity(len(labels), n, alpha=a)
    ),
}


class _Division(NamedTuple):
    """A partition with its parameter."""

    kind: _Kind
    num_clients: int
    parameter: Any


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
        if numbers:
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
    return _Division(kind, num_clients, parameter)


def add_partition(table: pa.Table, options: LoadOptions) -> pa.Table:
    """Add the column of clients that a partition makes: the numbers from 0."""
    kind, num_clients, parameter = check_partition(table.column_names, options)
    labels = np.zeros(table.num_rows, np.int64)
    if kind.by_label:
        labels = _numbered(table.column(options.label))
    owner = np.empty(table.num_rows, np.int64)
    for number, indices in enumerate(kind.divide(labels, num_clients, parameter)):
        owner[indices] = number
    return table.append_column(CLIENT, pa.array(owner))


def partition_prepared(source: TableSource, options: LoadOptions) -> TableSource:
    """Add the clients of a partition to a prepared folder's source, as a column.

    The examples keep their order. The partition replaces the clients that `prepare` named by
    files; a client that the files have remains a column.
    """
    table = source.table.drop_columns([CLIENT]) if source.client == CLIENT else source.table
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
