"""Partitions at random and by a field, and the checks that all partitions share."""

import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from fedpax.checks import check_integers
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.populations.assignment import to_partition
from fedpax.populations.client_arrays import Indices, RaggedPartition, as_ragged
from fedpax.primitives.casts import checked_cast, host_array
from fedpax.sources.shuffle import hash_key, shuffled_index
from fedpax.sources.source import Columns, Examples, Source, as_examples, column_values, get_field

Partition = Sequence[Indices]
"""For each participant the indices of its examples."""

CHECKSUM_PARTS = 2**16
"""The number of parts whose bytes are in memory at a time for a checksum."""

_CHECKED = {(np.ndarray, np.dtype(np.int64), 1)}  # the kind of parts that can be checked at once
_COLUMN = "source"  # the name of a column that is given alone, in messages


def partition_iid(num_examples: int, num_participants: int, *, seed: int = 0) -> RaggedPartition:
    """Partition shuffled examples evenly: each participant has a random sample of them.

    Returns:
        For each participant the sorted indices of its examples, int64. Their numbers differ by at
        most one.

    Raises:
        ValueError: there are fewer examples than participants.

    Example:
        >>> [len(indices) for indices in partition_iid(10, 4)]
        [3, 3, 2, 2]
    """
    check_count(num_examples, "examples", num_participants)
    order, key = np.empty(num_examples, np.int64), hash_key(seed)
    for begin in range(0, num_examples, 2**16):  # in parts, for little memory
        index = np.arange(begin, min(begin + 2**16, num_examples))
        order[index] = shuffled_index(index, num_examples, key)
    # Participant k has the examples at the positions k, k + num_participants, ... of the order.
    return to_partition(order, np.arange(num_examples) % num_participants, num_participants)


def partition_by_field(
    source: Examples,
    field: str,
    num_participants: int,
    *,
    size: Callable[[Mapping[str, Any]], int] | None = None,
) -> RaggedPartition:
    """Partition examples so that all examples with the same value of a field stay together.

    Groups are assigned from the largest to the smallest, each to the participant with least so far.

    Args:
        source: the examples, as `partition_natural` takes them.
        field: the name of the field, such as `"client"` or `"label"`.
        num_participants: the number of participants.
        size: a function that returns an example's size, such as its number of bytes. Default None:
            every example has size 1.

    Returns:
        For each participant the sorted indices of its examples, int64.

    Raises:
        KeyError: the examples have no such field.
        ValueError: there are fewer groups than participants, or the field holds arrays.

    Example:
        >>> source = [{"author": name} for name in ("b", "a", "b", "c", "b", "a")]
        >>> [indices.tolist() for indices in partition_by_field(source, "author", 2)]
        [[0, 2, 4], [1, 3, 5]]
    """
    groups = _groups(source, field, size)
    check_count(len(groups.names), f"values of the field {field!r}", num_participants)
    owner = np.empty(len(groups.names), np.int64)
    number = np.bincount(groups.of_example).tolist()
    sizes = groups.sizes.tolist()
    # A heap of (size, examples, participant). Of groups of one size, the first one comes first.
    loads = [(0, 0, k) for k in range(num_participants)]
    for group in np.argsort(-groups.sizes, kind="stable").tolist():
        load, examples, least = loads[0]
        owner[group] = least
        heapq.heapreplace(loads, (load + sizes[group], examples + number[group], least))
    positions = np.arange(len(groups.of_example))
    return to_partition(positions, owner[groups.of_example], num_participants)


class NaturalPartition(RaggedPartition):
    """A partition by the values of a field, as `partition_natural` returns it."""

    def __init__(self, parts: RaggedPartition, names: Sequence[Any]) -> None:
        super().__init__(parts.indices, parts.starts)
        self.names = list(names)


def partition_natural(source: Examples | Any, field: str | None = None) -> NaturalPartition:
    """Partition examples by the values of a field: one participant for each writer, user, ...

    From a source that `load` returned, only this field is decoded.

    Args:
        source: the examples: records (a source from `load`, or a list of dicts), a dict of columns,
            or a data frame or table of pandas, Polars or pyarrow. Or the column alone: an array or
            a list.
        field: the name of the field, such as `"client"`. Default None: `source` is the column.

    Returns:
        For each participant the sorted indices of its examples, int64. Participants are sorted by
        value, and `names` has the values.

    Raises:
        KeyError: the examples have no such field.
        TypeError: `source` is something else, such as a generator.
        ValueError: there are no examples, the field holds arrays, a value is None, NaN or missing,
            or values of different types are equal in Python, such as 1 and True.

    Example:
        >>> authors = ["b", "a", "b", "c", "b", "a"]
        >>> parts = partition_natural({"author": authors}, "author")
        >>> [indices.tolist() for indices in parts], parts.names
        ([[1, 5], [0, 2, 4], [3]], ['a', 'b', 'c'])
    """
    if field is None:
        source, field = Columns({_COLUMN: _as_column(source)}, "source"), _COLUMN
    groups = _groups(source, field, None)
    check_count(len(groups.names), f"values of the field {field!r}", 1)
    key = groups.names.__getitem__
    if len(set(map(type, groups.names))) > 1:
        # By type first: numbers and texts cannot be compared.
        key = [(type(name).__name__, name) for name in groups.names].__getitem__
    order = sorted(range(len(groups.names)), key=key)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    positions = np.arange(len(groups.of_example))
    parts = to_partition(positions, rank[groups.of_example], len(order))
    return NaturalPartition(parts, [groups.names[group] for group in order])


def _as_column(source: Any) -> Any:
    """Return the values of a column that was given without the other fields."""
    column = column_values(source) if not hasattr(source, "columns") else source
    is_list = isinstance(column, list | tuple) and not any(hasattr(v, "keys") for v in column[:1])
    if is_list or (isinstance(column, np.ndarray) and column.dtype.names is None):
        return column
    as_examples(source)
    raise ArgumentTypeError(
        f"partition_natural() got a {type(source).__name__} and no field, expected the name of the "
        "field whose values are the participants. Pass it, for example "
        "partition_natural(source, 'client')."
    )


def check_sized(partition: Any, name: str) -> None:
    """Check that a partition is a sequence, which has a length and an order."""
    if isinstance(partition, Mapping) or not hasattr(partition, "__len__"):
        remedy = f"list({name}{'.values()' if isinstance(partition, Mapping) else ''})"
        raise ArgumentTypeError(
            f"{name} is a {type(partition).__name__}, expected a list with the indices of each "
            "participant's examples, as the partition_... functions return it, or a sequence that "
            f"generates them. Pass {remedy}."
        )


def check_partition(
    partition: Partition, num_participants: int, num_examples: int, placement: str
) -> RaggedPartition:
    """Check that a partition fits a source and a number of participants; return int64 arrays."""
    check_sized(partition, "partition")
    if len(partition) != num_participants:
        raise ArgumentError(
            f"The partition has {len(partition)} parts, expected {num_participants}, one for each "
            f"of the {placement}: make the partition for {num_participants} participants."
        )
    parts = check_parts(partition, num_examples, placement)
    if (empty := np.flatnonzero(parts.sizes() == 0)).size:
        raise ArgumentError(
            f"The partition leaves {placement} {empty[0]} without examples: use fewer {placement} "
            "or another partition."
        )
    together = np.sort(parts.indices)
    repeated = together[1:][together[1:] == together[:-1]]
    if repeated.size:
        raise ArgumentError(
            f"The partition assigns example {repeated[0]} twice, expected one participant for each "
            "example: remove the duplicate."
        )
    return parts


def check_parts(partition: Partition, num_examples: int, participants: str) -> RaggedPartition:
    """Check that all participants' indices are integers within the source; return them as int64."""
    is_ragged = isinstance(partition, RaggedPartition)
    if is_ragged or {(type(p), getattr(p, "dtype", 0), np.ndim(p)) for p in partition} <= _CHECKED:
        parts = as_ragged(partition)
        if not parts.indices.size or (
            parts.indices.min() >= 0 and parts.indices.max() < num_examples
        ):
            return parts
    return as_ragged(
        [
            check_indices(indices, num_examples, f"{participants} {k}")
            for k, indices in enumerate(partition)
        ]
    )


def check_indices(indices: ArrayLike, num_examples: int, participant: str) -> Indices:
    """Check that a participant's indices are integers within the source; return them as int64."""
    array = host_array(indices, f"The part of {participant}")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"The part of {participant} is {array.dtype}{list(array.shape)}, expected the indices "
            "of its examples, integers [examples]."
        )
    outside = array[(array < 0) | (array >= num_examples)]
    if outside.size:
        raise ArgumentError(
            f"The part of {participant} has index {outside[0]}, but the source has examples 0 to "
            f"{num_examples - 1}: make the partition for this source and split."
        )
    return array.astype(np.int64, copy=False)


def partition_checksum(partition: Partition) -> int:
    """Return a checksum of a partition, by which a stream's state identifies it."""
    # Of the bytes of each part, with a bar after each; of many parts in one call.
    if not isinstance(partition, RaggedPartition):
        partition = as_ragged([np.asarray(part, np.int64).ravel() for part in partition])
    value = 0
    for begin in range(0, len(partition), CHECKSUM_PARTS):
        starts = partition.starts[begin : begin + CHECKSUM_PARTS + 1]
        indices = partition.indices[starts[0] : starts[-1]].astype("<i8", copy=False)
        bars = 8 * (starts[1:] - starts[0]) + np.arange(len(starts) - 1)
        is_index = np.ones(8 * len(indices) + len(bars), np.bool_)
        is_index[bars] = False
        text = np.full(len(is_index), ord("|"), np.uint8)
        text[is_index] = np.ascontiguousarray(indices).view(np.uint8)
        value = zlib.crc32(text.data, value)
    return value


def index_labels(
    labels: ArrayLike | Iterable[int], name: str = "labels"
) -> tuple[Int64[np.ndarray, " classes"], Int64[np.ndarray, " examples"]]:
    """Map labels to indices of the distinct labels; return these, ascending, and the indices."""
    if isinstance(labels, Iterator):  # such as the column of a data set
        labels = list(labels)
    array = host_array(labels, name)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name} has dtype {array.dtype} and shape {list(array.shape)}, expected one integer "
            "for each example. Convert strings with np.unique(labels, return_inverse=True)[1], "
            "one-hot rows with labels.argmax(-1), objects and whole floats with "
            "labels.astype(np.int64)."
        )
    classes, class_index = np.unique(array, return_inverse=True)
    remedy = "Number the labels with np.unique(labels, return_inverse=True)[1]."
    return checked_cast(classes, np.int64, name, remedy), class_index.astype(np.int64)


def check_count(count: int, noun: str, num_participants: int, min_examples: int = 1) -> None:
    """Check that there are enough examples for all participants."""
    check_integers(num_examples=count, num_participants=num_participants, min_examples=min_examples)
    if num_participants < 1:
        raise ArgumentError(f"num_participants is {num_participants}, expected at least 1.")
    if min_examples < 1:
        raise ArgumentError(f"min_examples is {min_examples}, expected at least 1.")
    if count < num_participants * min_examples:
        raise ArgumentError(
            f"{count} {noun} are too few for {num_participants} participants with at least "
            f"{min_examples} each: use {count // min_examples} participants or fewer, or a larger "
            "split."
        )


class _Groups(NamedTuple):
    """The groups of examples with equal values of a field."""

    names: list[Any]  # the value of each group, in the order of the groups' first examples
    of_example: Int64[np.ndarray, " examples"]
    sizes: Float64[np.ndarray, " groups"]


def _groups(
    source: Examples, field: str, size: Callable[[Mapping[str, Any]], int] | None
) -> _Groups:
    values, sizes = _values(source, field, size)
    names = [
        value if type(value) in (str, int, bytes) else _group_name(value, field, index)
        for index, value in enumerate(values)
    ]
    if len(set(map(type, names))) > 1:
        _check_kinds(names, field)
    groups = {name: group for group, name in enumerate(dict.fromkeys(names))}
    of_example = np.fromiter(map(groups.__getitem__, names), np.int64, len(names))
    return _Groups(list(groups), of_example, np.bincount(of_example, sizes))


def _check_kinds(names: Sequence[Any], field: str) -> None:
    """Raise for values of different types that are equal in Python, such as 1 and True."""
    first: dict[Any, Any] = {}
    for index, name in enumerate(names):
        known = first.setdefault(name, name)
        if type(known) is not type(name):
            raise ArgumentError(
                f"The field {field!r} has the value {known!r} and, for example {index}, {name!r}, "
                "which are equal in Python, expected values of one type: one group would have the "
                "examples of both. Convert the values, for example by str."
            )


def _group_name(value: Any, field: str, index: int) -> Any:
    """Return the value of a field of an example as a hashable value, checked."""
    if value is np.ma.masked or value is None:
        raise ArgumentError(
            f"The field {field!r} is missing in example {index}, expected a value that names "
            "its group: fill in the missing values, or leave these examples out."
        )
    if isinstance(value, np.generic | np.ndarray | list):
        if np.size(value) != 1:
            raise ArgumentError(
                f"The field {field!r} holds arrays of shape {list(np.shape(value))}, expected "
                "one value that examples share, such as a client's name: name another field."
            )
        value = np.asarray(value).item()
    if isinstance(value, float) and value != value:
        raise ArgumentError(
            f"The field {field!r} is {value} for example {index}, expected a value that names "
            "its group: fill in the missing values, or leave these examples out."
        )
    return value


def _values(
    source: Examples, field: str, size: Callable[[Mapping[str, Any]], int] | None
) -> tuple[Iterable[Any], list[int] | None]:
    """Return each example's value of a field, and its size; None: 1 each."""
    source = as_examples(source)
    if size is None and isinstance(source, Source | Columns):
        get_field(source[0], field)
        column: Any = source.columns[field] if isinstance(source, Columns) else source.column(field)
        # Python's integers and texts take a tenth of the time of NumPy's.
        is_plain = type(column) is np.ndarray and column.dtype.kind in "iuUS"
        return column.tolist() if is_plain and column.ndim == 1 else column, None
    examples = (source[index] for index in range(len(source)))
    pairs = [
        (get_field(example, field), 1 if size is None else size(example)) for example in examples
    ]
    return [value for value, _ in pairs], [size for _, size in pairs]
