"""RaggedPartition: a partition in two arrays, for populations of millions of participants."""

import abc
from collections.abc import Sequence
from itertools import chain
from typing import overload

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

Indices = Int64[np.ndarray, " examples"]
"""The indices of a participant's examples in a source."""


class ComputedPartition(Sequence[Indices], abc.ABC):
    """A sequence of participants' indices, which are made where the sequence is indexed."""

    @abc.abstractmethod
    def indices_of(self, participant: int) -> Indices:
        """Return the indices of a participant's examples, int64."""

    @overload
    def __getitem__(self, participant: int) -> Indices: ...
    @overload
    def __getitem__(self, participant: slice) -> list[Indices]: ...
    def __getitem__(self, participant: int | slice) -> Indices | list[Indices]:
        """Return the indices of a participant's examples; for a slice, a list of them."""
        position = range(len(self))[participant]
        if isinstance(position, range):
            return [self.indices_of(k) for k in position]
        return self.indices_of(position)


class RaggedPartition(ComputedPartition):
    """The indices of all participants' examples, and where each participant begins.

    It is a sequence with an array of indices for each participant, as a list of arrays is. A list
    takes 110 bytes more for each participant.

    Attributes:
        indices: int64 `[examples]`, the indices of participant 0, then of participant 1, ...
        starts: int64 `[participants + 1]`, the position of each participant's first index, then the
            number of indices.
    """

    def __init__(
        self, indices: Int64[np.ndarray, " examples"], starts: Int64[np.ndarray, " starts"]
    ) -> None:
        self.indices, self.starts = indices, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def indices_of(self, participant: int) -> Indices:
        """Return the indices of a participant's examples, int64."""
        return self.indices[self.starts[participant] : self.starts[participant + 1]]

    def sizes(self) -> Int64[np.ndarray, " participants"]:
        """Return the number of examples of each participant."""
        return np.diff(self.starts)

    def __repr__(self) -> str:
        return f"RaggedPartition({len(self)} participants, {len(self.indices)} examples)"


def as_ragged(parts: Sequence[NDArray[np.int64]] | Sequence[list[int]]) -> RaggedPartition:
    """Concatenate the parts of a partition: arrays, int64 `[examples]` each, or lists."""
    if isinstance(parts, RaggedPartition):
        return parts
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=starts[1:])
    if len(parts) and isinstance(parts[0], list):
        indices = np.fromiter(chain.from_iterable(parts), np.int64, starts[-1])
    else:
        indices = np.concatenate([*parts, np.zeros(0, np.int64)])
    return RaggedPartition(indices, starts)
