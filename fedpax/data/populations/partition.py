"""Partitions at random and by a field, and the checks that all partitions share.

A partition is a list with one array of example indices for each participant. The functions here
assign every example to exactly one participant and give every participant at least one example: at
random (`partition_iid`), or by the values of a field (`partition_by_field`, `partition_natural`).
See `label_skew` and `quantity_skew` for random partitions whose participants differ.
"""

import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import ArrayLike

from fedpax.data.examples import Columns, as_examples, column_values
from fedpax.data.shuffle import hash_key, shuffled_index
from fedpax.data.sources.source import Source
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import check_integers, checked_cast, host_array

Indices = Int64[np.ndarray, " examples"]
"""The indices of a participant's examples in a source."""

Partition = Sequence[Indices]
"""For each participant the indices of its examples."""

Examples = Sequence[Mapping[str, Any]]
"""A source of examples: a sequence of dicts, each with an example's fields."""

_COLUMN = "source"  # the name of a column that is given alone, in messages


def partition_iid(num_examples: int, num_participants: int, *, seed: int = 0) -> list[Indices]:
    """Partition shuffled examples evenly: each participant has a random sample of them.

    Args:
        num_examples: the number of examples.
        num_participants: the number of participants.
        seed: the random seed.

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
    order = shuffled_index(np.arange(num_examples), num_examples, hash_key(seed))
    return [np.sort(order[k::num_participants]) for k in range(num_participants)]


def partition_by_field(
    source: Examples,
    field: str,
    num_participants: int,
    *,
    size: Callable[[Mapping[str, Any]], int] | None = None,
) -> list[Indices]:
    """Partition examples so that all examples with the same value of a field stay together.

    Groups of equal values are assigned from the largest to the smallest, each to the participant
    that has least so far, so participants have nearly equal amounts. The source is read once.

    Args:
        source: the examples: records, columns, a data frame or a table, as `partition_natural`
            takes them.
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
    groups, sizes = _groups(source, field, size)
    check_count(len(groups), f"values of the field {field!r}", num_participants)
    parts: list[list[int]] = [[] for _ in range(num_participants)]
    loads = [(0, 0, k) for k in range(num_participants)]  # a heap of (size, examples, participant)
    for value in sorted(groups, key=lambda value: (-sizes[value], groups[value][0])):
        load, _, least = loads[0]
        parts[least] += groups[value]
        heapq.heapreplace(loads, (load + sizes[value], len(parts[least]), least))
    return [np.sort(np.array(indices, np.int64)) for indices in parts]


class NaturalPartition(list[Indices]):
    """A partition by the values of a field, as `partition_natural` returns it."""

    def __init__(self, parts: Iterable[Indices], names: Sequence[Any]) -> None:
        super().__init__(parts)
        self.names = list(names)


def partition_natural(source: Examples | Any, field: str | None = None) -> NaturalPartition:
    """Partition examples by the values of a field: one participant for each writer, user, ...

    The source is read once. From a source that `load` returned, only this field is decoded.

    Args:
        source: the examples: records (a source from `load`, or a list of dicts), a dict of columns,
            or a data frame or table of pandas, Polars or pyarrow. Or the column alone: an array or
            a list with the field's value of each example.
        field: the name of the field, such as `"client"`. Default None: `source` is the column.

    Returns:
        For each participant the sorted indices of its examples, int64. Participants are sorted by
        value, and the attribute `names` has the values.

    Raises:
        KeyError: the examples have no such field.
        TypeError: `source` is something else, such as a generator.
        ValueError: there are no examples, the field holds arrays, or a value is NaN.

    Example:
        >>> authors = ["b", "a", "b", "c", "b", "a"]
        >>> parts = partition_natural({"author": authors}, "author")
        >>> [indices.tolist() for indices in parts], parts.names
        ([[1, 5], [0, 2, 4], [3]], ['a', 'b', 'c'])
        >>> partition_natural(authors).names
        ['a', 'b', 'c']
    """
    if field is None:
        source, field = Columns({_COLUMN: _as_column(source)}, "source"), _COLUMN
    groups, _ = _groups(source, field, None)
    check_count(len(groups), f"values of the field {field!r}", 1)
    # By type first: values of different types, such as None and strings, cannot be compared.
    names = sorted(groups, key=lambda name: (type(name).__name__, name))
    return NaturalPartition([np.array(groups[name], np.int64) for name in names], names)


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
) -> list[Indices]:
    """Check that a partition fits a source and a number of participants; return int64 arrays."""
    check_sized(partition, "partition")
    if len(partition) != num_participants:
        raise ArgumentError(
            f"The partition has {len(partition)} parts, expected {num_participants}, one for each "
            f"of the {placement}: make the partition for {num_participants} participants."
        )
    parts = [
        check_indices(indices, num_examples, f"{placement} {k}")
        for k, indices in enumerate(partition)
    ]
    for k, indices in enumerate(parts):
        if not indices.size:
            raise ArgumentError(
                f"The partition leaves {placement} {k} without examples: use fewer {placement} "
                "or another partition."
            )
    together = np.sort(np.concatenate(parts))
    repeated = together[1:][together[1:] == together[:-1]]
    if repeated.size:
        raise ArgumentError(
            f"The partition assigns example {repeated[0]} twice, expected one participant for each "
            "example: remove the duplicate."
        )
    return parts


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
    value = 0
    for indices in partition:
        value = zlib.crc32(np.asarray(indices, "<i8").tobytes() + b"|", value)
    return value


def get_field(example: Mapping[str, Any], field: str) -> Any:
    """Return a field of an example, or raise an error that lists the existing fields."""
    try:
        return example[field]
    except KeyError:
        raise KeyError(
            f"The examples have no field {field!r}, but {', '.join(map(repr, example))}: name one "
            "of these."
        ) from None


def index_labels(
    labels: ArrayLike, name: str = "labels"
) -> tuple[Int64[np.ndarray, " classes"], Int64[np.ndarray, " examples"]]:
    """Map labels to indices of the distinct labels; return these, ascending, and the indices."""
    array = host_array(labels, name)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name} has dtype {array.dtype} and shape {list(array.shape)}, expected one integer "
            "for each example. Convert strings with np.unique(labels, return_inverse=True)[1], "
            "one-hot rows with labels.argmax(-1), objects and whole floats with "
            "labels.astype(np.int64), a generator with list(labels)."
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


def _groups(
    source: Examples, field: str, size: Callable[[Mapping[str, Any]], int] | None
) -> tuple[dict[Any, list[int]], dict[Any, int]]:
    """Return, for each value of a field, the indices of its examples and their total size."""
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index, (value, example_size) in enumerate(_values(source, field, size)):
        if value is np.ma.masked:
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
        groups.setdefault(value, []).append(index)
        sizes[value] = sizes.get(value, 0) + example_size
    return groups, sizes


def _values(
    source: Examples, field: str, size: Callable[[Mapping[str, Any]], int] | None
) -> Iterator[tuple[Any, int]]:
    """Yield each example's value of a field, and its size."""
    source = as_examples(source)
    if size is None and isinstance(source, Source | Columns):
        get_field(source[0], field)
        yield from ((value, 1) for value in source.column(field))
        return
    for index in range(len(source)):
        example = source[index]
        yield get_field(example, field), 1 if size is None else size(example)
