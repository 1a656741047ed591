"""What the coordinator asks of sites, and what they answer."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpax.sites.downlink import DownlinkArrays
from fedpax.sites.framed_messages import read_message
from fedpax.sites.random_keys import to_numbers

SHARED, ROW, TERM, SHOWN, WORD = "shared", "row", "term", "shown", "word"
"""First words of the names of arrays."""


ROUND, EVALUATION = "round", "evaluate"
"""The kinds of tasks. Each task that is not an evaluation is part of a round."""

ArrayTypes = tuple[tuple[int | None, ...], np.dtype]


class Task(NamedTuple):
    """What the coordinator asks of sites.

    Attributes:
        token: names the task; the stages of a round have one token.
        header: fields for all sites, with `"task"` and `"stage"`.
        packet: arrays for all sites.
        own: for each site that is asked, its fields and arrays.
        expected: shape and dtype of each array of a reply, as `{name: array type}`; a shape's first
            None stands for the number of the site's clients in this task.
        coded: the same for a site that sends encoded words: one whose fields have `"coded"`.
        weights: for each array that is a sum of weights, the most that a client weighs.
        weighted: arrays that are divided by the weights.
    """

    token: str
    header: Mapping[str, Any]
    packet: DownlinkArrays
    own: Mapping[str, tuple[Mapping[str, Any], Mapping[str, np.ndarray]]]
    expected: Mapping[str, ArrayTypes]
    weights: Mapping[str, float] = {}
    weighted: Sequence[str] = ()
    coded: Mapping[str, ArrayTypes] = {}

    @property
    def kind(self) -> str:
        """ROUND or EVALUATION."""
        return EVALUATION if self.header["task"] == EVALUATION else ROUND

    def is_encoded(self, own: Mapping[str, Any]) -> bool:
        """Tell whether a site with these fields encodes its terms, to be checked once decoded."""
        return bool(own.get("coded")) or "up" in self.header


class SiteReply(NamedTuple):
    """The answer of a site to a task."""

    header: Mapping[str, Any]
    content: Mapping[str, np.ndarray] | Path  # arrays, or the file that has them

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays, read when they are needed."""
        return read_message(self.content).arrays if isinstance(self.content, Path) else self.content


def new_token() -> str:
    """Return a token that no other task has."""
    return secrets.token_hex(8)


def numbered(word: str, arrays: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return arrays by name: `word` and a number."""
    return {f"{word} {i}": to_numbers(x) for i, x in enumerate(arrays)}


def in_order(word: str, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the arrays that `numbered` named."""
    number = sum(name.rpartition(" ")[0] == word for name in arrays)
    return [arrays[f"{word} {i}"] for i in range(number)]


def largest_message(task: Task) -> int:
    """Return the bytes of the largest message of a task, either way."""

    def size(types: Iterable[ArrayTypes], rows: int) -> int:
        return sum(
            math.prod(rows if n is None else n for n in shape) * dtype.itemsize
            for shape, dtype in types
        )

    shared = sum(x.nbytes for x in task.packet.whole.values())
    down = [sum(x.nbytes for x in arrays.values()) for _, arrays in task.own.values()]
    rows = [len(fields.get("clients", ())) for fields, _ in task.own.values()]
    up = size([*task.expected.values()], max(rows, default=0)) + size(task.coded.values(), 1)
    return max(shared + max(down, default=0), up)
