"""Partitions: which examples of a source each participant holds.

A partition is a list with one array of indices for each participant; the streams take any. Those
here give every example to just one participant, and every participant at least one: alike
(``partition_iid``), or as a field of the examples says (``partition_by_field``,
``partition_natural``). ``fedpax.data.populations.label_skew`` has those that make participants
differ by chance.
"""

import heapq
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpax.data.shuffle import fold, shuffled
from fedpax.data.sources.source import Source

Partition = Sequence[NDArray[np.int64]]
"""For each participant the indices of its examples, int64 [examples of the participant]."""

Examples = Sequence[Mapping[str, Any]]
"""A source: a length, and a dict of an example's fields at each index."""


def partition_iid(examples: int, participants: int, *, seed: int = 0) -> list[NDArray[np.int64]]:
    """Deals shuffled examples out like cards: every participant's are a sample of the whole.

    Args:
        examples: how many examples there are.
        participants: how many participants share them.
        seed: chooses the shuffle.

    Returns:
        For each participant sorted indices, int64; their numbers differ by at most one.

    Raises:
        ValueError: if there are fewer examples than participants.

    Example:
        >>> [len(indices) for indices in partition_iid(10, 4)]
        [3, 3, 2, 2]
    """
    check_count(examples, "examples", participants)
    order = shuffled(np.arange(examples), examples, fold(seed))
    return [np.sort(order[k::participants]) for k in range(participants)]


def partition_by_field(
    source: Examples,
    field: str,
    participants: int,
    *,
    size: Callable[[Mapping[str, Any]], int] | None = None,
) -> list[NDArray[np.int64]]:
    """Keeps together the examples that agree in a field, so that participants differ.

    The groups are given out from the largest to the smallest, each to the participant that has
    least so far, so that participants get about as much each. The source is read through once.

    Args:
        source: the examples.
        field: the name of the field, such as ``"client"`` or ``"label"``.
        participants: how many participants share the groups.
        size: what an example counts; by default 1. For text, its bytes.

    Returns:
        For each participant sorted indices, int64.

    Raises:
        KeyError: if the examples have no such field.
        ValueError: if there are fewer groups than participants.

    Example:
        >>> source = [{"author": name} for name in ("b", "a", "b", "c", "b", "a")]
        >>> [indices.tolist() for indices in partition_by_field(source, "author", 2)]
        [[0, 2, 4], [1, 3, 5]]
    """
    groups, sizes = _groups(source, field, size)
    check_count(len(groups), f"values of the field {field!r}", participants)
    held: list[list[int]] = [[] for _ in range(participants)]
    loads = [(0, 0, k) for k in range(participants)]  # a heap of (size, examples, participant)
    for value in sorted(groups, key=lambda value: (-sizes[value], groups[value][0])):
        load, _, least = loads[0]
        held[least] += groups[value]
        heapq.heapreplace(loads, (load + sizes[value], len(held[least]), least))
    return [np.sort(np.array(indices, np.int64)) for indices in held]


def partition_natural(source: Examples, field: str) -> tuple[list[NDArray[np.int64]], list[Any]]:
    """Makes every value of a field a participant, such as each writer, speaker or user.

    The source is read through once; of what ``load`` returned only the field is decoded.

    Args:
        source: the examples.
        field: the name of the field, such as ``"client"``.

    Returns:
        For each participant sorted indices, int64; and for each its value, in ascending order.

    Raises:
        KeyError: if the examples have no such field.
        ValueError: if there are no examples, or the field holds arrays.

    Example:
        >>> source = [{"author": name} for name in ("b", "a", "b", "c", "b", "a")]
        >>> parts, names = partition_natural(source, "author")
        >>> [indices.tolist() for indices in parts], names
        ([[1, 5], [0, 2, 4], [3]], ['a', 'b', 'c'])
    """
    groups, _ = _groups(source, field, None)
    check_count(len(groups), f"values of the field {field!r}", 1)
    # By type first, as values of different types, such as None among strings, have no order.
    names = sorted(groups, key=lambda name: (type(name).__name__, name))
    return [np.array(groups[name], np.int64) for name in names], names


def check_partition(
    partition: Partition, participants: int, examples: int, placement: str
) -> list[NDArray[np.int64]]:
    """Refuses a partition that a stream cannot draw from.

    Args:
        partition: what to check.
        participants: how many participants it must have.
        examples: how many examples the source has.
        placement: what the participants are called, for the messages.

    Returns:
        The partition, as int64 arrays.

    Raises:
        ValueError: if a participant has nothing, an index is none of the source's, or two
            participants (or one, twice) have the same example.
    """
    if len(partition) != participants:
        raise ValueError(
            f"The partition has {len(partition)} parts, but there are {participants} {placement}: "
            "make it with as many."
        )
    indices = [
        check_indices(held, examples, f"{placement} {k}") for k, held in enumerate(partition)
    ]
    for k, held in enumerate(indices):
        if not held.size:
            raise ValueError(
                f"The partition leaves {placement} {k} without examples: use fewer {placement} "
                "or another partition."
            )
    together = np.sort(np.concatenate(indices))
    twice = together[1:][together[1:] == together[:-1]]
    if twice.size:
        raise ValueError(
            f"The partition gives example {twice[0]} out twice: each must have one holder."
        )
    return indices


def check_indices(held: ArrayLike, examples: int, holder: str) -> NDArray[np.int64]:
    """Refuses indices that are none of a source's.

    Args:
        held: a participant's indices, integers [examples of the participant]; if there are none,
            of any type.
        examples: how many examples the source has.
        holder: what the participant is called, for the messages.

    Returns:
        The indices, int64.

    Raises:
        ValueError: if they are not integers, or an index is none of the source's.
    """
    indices = np.asarray(held)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(
            f"The part of {holder} is {indices.dtype}{list(indices.shape)}, expected integers "
            "[examples], the indices of what it holds."
        )
    outside = indices[(indices < 0) | (indices >= examples)]
    if outside.size:
        raise ValueError(
            f"The part of {holder} names example {outside[0]}, but the source has examples 0 to "
            f"{examples - 1}: make the partition for this source and split."
        )
    return indices.astype(np.int64, copy=False)


def checksum(partition: Partition) -> int:
    """Returns a number that tells partitions apart, so that a stream's state can name its own."""
    value = 0
    for held in partition:
        value = zlib.crc32(np.asarray(held, "<i8").tobytes() + b"|", value)
    return value


def field_of(example: Mapping[str, Any], field: str) -> Any:
    """Returns a field of an example, or says which fields there are."""
    try:
        return example[field]
    except KeyError:
        raise KeyError(
            f"The examples have no field {field!r}, but {', '.join(map(repr, example))}: name one."
        ) from None


def number_labels(
    labels: ArrayLike, name: str = "labels"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers labels from 0 without gaps.

    Args:
        labels: integers [examples].
        name: what they are called, for the message.

    Returns:
        The labels that occur, ascending, int64 [classes]; and for each example its label's place
        among them, int64 [examples].

    Raises:
        ValueError: if they are not integers [examples].

    Example:
        >>> classes, numbers = number_labels([7, 3, 7])
        >>> classes.tolist(), numbers.tolist()
        ([3, 7], [1, 0, 1])
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one integer for each example, but are {array.dtype} of the shape "
            f"{array.shape}: number names by np.unique(labels, return_inverse=True)[1], and "
            "one-hot rows by labels.argmax(-1)."
        )
    classes, numbers = np.unique(array, return_inverse=True)
    return classes.astype(np.int64), numbers.astype(np.int64)


def check_count(available: int, what: str, participants: int, least: int = 1) -> None:
    """Refuses to share examples among more participants than they suffice for."""
    if participants < 1:
        raise ValueError(f"There must be at least one participant, not {participants}.")
    if least < 1:
        raise ValueError(f"min_examples is {least}, but every participant must have at least 1.")
    if available < participants * least:
        raise ValueError(
            f"{available} {what} cannot be shared among {participants} participants, as each must "
            f"have at least {least}: use {available // least} participants or fewer, or a larger "
            "split."
        )


def _groups(
    source: Examples, field: str, size: Callable[[Mapping[str, Any]], int] | None
) -> tuple[dict[Any, list[int]], dict[Any, int]]:
    """The examples that have each value of a field, and their sizes together."""
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index, (value, counts) in enumerate(_values(source, field, size)):
        if isinstance(value, np.generic | np.ndarray):
            if value.size != 1:
                raise ValueError(
                    f"The field {field!r} holds arrays, as of the shape {value.shape}, but must "
                    "hold one value that an example shares with others: name another field."
                )
            value = value.item()
        groups.setdefault(value, []).append(index)
        sizes[value] = sizes.get(value, 0) + counts
    return groups, sizes


def _values(
    source: Examples, field: str, size: Callable[[Mapping[str, Any]], int] | None
) -> Iterator[tuple[Any, int]]:
    """Each example's value of a field, and what it counts."""
    if size is None and isinstance(source, Source):
        field_of(source[0], field)
        yield from ((value, 1) for value in source.column(field))
        return
    for index in range(len(source)):
        example = source[index]
        yield field_of(example, field), 1 if size is None else size(example)
