"""Partitions: which examples of a source each participant holds.

A partition is a list with one array of indices for each participant. The streams take any; here
are the two that need nothing but the source. Each puts every example with just one participant.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.data.shuffle import fold, shuffled

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
    _check_count(examples, "examples", participants)
    order = shuffled(np.arange(examples), examples, fold(seed))
    return [np.sort(order[k::participants]) for k in range(participants)]


def partition_by_field(
    source: Examples,
    field: str,
    participants: int,
    *,
    size: Callable[[Mapping[str, Any]], int] = lambda example: 1,
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
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index in range(len(source)):
        example = source[index]
        value = field_of(example, field)
        if isinstance(value, np.generic | np.ndarray):
            value = value.item()
        groups.setdefault(value, []).append(index)
        sizes[value] = sizes.get(value, 0) + size(example)
    _check_count(len(groups), f"values of the field {field!r}", participants)
    held: list[list[int]] = [[] for _ in range(participants)]
    load = [0] * participants
    for value in sorted(groups, key=lambda value: (-sizes[value], groups[value][0])):
        least = min(range(participants), key=lambda k: (load[k], len(held[k])))
        held[least] += groups[value]
        load[least] += sizes[value]
    return [np.sort(np.array(indices, np.int64)) for indices in held]


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
    indices = [np.asarray(held, np.int64) for held in partition]
    if len(indices) != participants:
        raise ValueError(
            f"The partition has {len(indices)} parts, but there are {participants} {placement}: "
            "make it with as many."
        )
    for k, held in enumerate(indices):
        if not held.size:
            raise ValueError(
                f"The partition leaves {placement} {k} without examples: use fewer {placement} "
                "or another partition."
            )
    together = np.sort(np.concatenate(indices))
    if together[0] < 0 or together[-1] >= examples:
        raise ValueError(
            f"The partition names example {together[0] if together[0] < 0 else together[-1]}, but "
            f"the source has examples 0 to {examples - 1}: make it for this source and split."
        )
    twice = together[1:][together[1:] == together[:-1]]
    if twice.size:
        raise ValueError(
            f"The partition gives example {twice[0]} out twice: each must have one holder."
        )
    return indices


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


def _check_count(available: int, what: str, participants: int) -> None:
    if participants < 1:
        raise ValueError(f"There must be at least one participant, not {participants}.")
    if available < participants:
        raise ValueError(
            f"{available} {what} cannot be shared among {participants} participants, as each must "
            f"have at least one: use {available} participants or fewer, or a larger split."
        )
