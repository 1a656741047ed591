"""OwnExamples: the training batches and held-out examples of all clients, in parts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import Cohort
from fedpax.data import CohortRounds
from fedpax.data.rounds.client_stream import shorter_lengths
from fedpax.training.exchanged_bytes import tree_bytes

MOST_BYTES = 2**28
"""The bytes of a part, models included. All examples stay in memory if they have fewer."""

Part = tuple[Cohort, dict[str, chex.Array]]
"""Training batches, and held-out examples `[clients, examples, ...]` with a mask."""


class _Clients(NamedTuple):
    """Clients of similar sizes."""

    ids: NDArray[np.int64]  # -1: absent
    num_steps: int  # of the training batches, padding included
    num_heldout: int  # padding included


class OwnExamples:
    """All clients in parts of similar sizes: a small client is not padded to the largest.

    Args:
        rounds: rounds of the clients, of which round 0 is read.
        heldout: the indices of each client's held-out examples.
        read: reads held-out examples.
        model: the shapes of a client's own model; the models of a part are in memory together.
        multiple: a part has a multiple of this number of clients, absent ones included.
        with_batches: whether to read training batches. Default True; False: held-out examples.
    """

    def __init__(
        self,
        rounds: CohortRounds,
        heldout: Sequence[NDArray[np.int64]],
        read: Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]],
        model: chex.ArrayTree,
        multiple: int,
        *,
        with_batches: bool = True,
    ) -> None:
        self._with_batches = with_batches
        self._rounds, self._heldout, self._read = rounds, heldout, read
        shapes = jax.tree.leaves(rounds.shapes.batches)
        self._batch_size = shapes[0].shape[2]
        self._example_bytes = sum(
            int(np.prod(x.shape[3:], dtype=np.int64)) * x.dtype.itemsize for x in shapes
        )
        self._plan = list(self._divide(multiple, tree_bytes(model)))
        self._kept: list[Part] | None = None

    def __iter__(self) -> Iterator[Part]:
        if self._kept is None:
            parts = map(self._read_part, self._plan)
            if sum(len(part.ids) * self._client_bytes(part) for part in self._plan) > MOST_BYTES:
                return parts
            self._kept = list(parts)
        return iter(self._kept)

    def _divide(self, multiple: int, model_bytes: int) -> Iterator[_Clients]:
        """Group clients by the shortest lengths that hold their examples."""
        ids = np.arange(len(self._heldout))
        num_steps = self._rounds.num_steps(ids) if self._with_batches else np.zeros_like(ids)
        num_heldout = np.array([len(part) for part in self._heldout])
        steps, examples = (
            shorter_lengths(max(1, int(x.max(initial=0)))) for x in (num_steps, num_heldout)
        )
        lengths = list(itertools.zip_longest(steps, examples, fillvalue=1))
        fits = [(num_steps <= s) & (num_heldout <= h) for s, h in lengths[1:]]
        level = np.sum(fits, axis=0, dtype=np.int64) * np.ones(len(num_steps), np.int64)
        for number, length in enumerate(lengths):
            ids = np.flatnonzero(level == number)
            part = _Clients(ids, *length)
            client_bytes = self._client_bytes(part) + model_bytes
            size = min(max(1, MOST_BYTES // client_bytes), max(1, len(ids)))
            size = -(-size // multiple) * multiple
            for begin in range(0, len(ids), size):
                some = ids[begin : begin + size]
                yield part._replace(ids=np.pad(some, (0, size - len(some)), constant_values=-1))

    def _client_bytes(self, part: _Clients) -> int:
        num_training = part.num_steps * self._batch_size if self._with_batches else 0
        return (num_training + part.num_heldout) * self._example_bytes

    def _read_part(self, part: _Clients) -> Part:
        cohort = Cohort({}, client_ids=part.ids.astype(np.int32))
        if self._with_batches:
            cohort = self._rounds.read_clients(0, part.ids, part.num_steps)
        none = np.zeros(0, np.int64)
        own = [none if k < 0 else self._heldout[k] for k in part.ids]
        mask = np.arange(part.num_heldout) < np.array([len(x) for x in own])[:, None]
        rows = np.zeros(mask.shape, np.int64)
        rows[mask] = np.concatenate(own)
        read = self._read(rows.ravel())
        heldout = {name: x.reshape(*rows.shape, *x.shape[1:]) for name, x in read.items()}
        return cohort, {**heldout, "mask": mask.astype(np.float32)}
