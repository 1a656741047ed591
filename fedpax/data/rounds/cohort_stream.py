"""The stream of `cohort_rounds`, and how it lays out a round."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import MASK, Cohort, check_distinct_clients
from fedpax.clients.row_blocks import home_devices
from fedpax.data.rounds.device_order import balanced_order
from fedpax.data.rounds.labeled_examples import (
    Arrays,
    Preprocess,
    apply_preprocess,
    combine_masks,
    pack_images,
    preprocess_images,
    scale_on_devices,
    scale_pixels,
)
from fedpax.data.rounds.stream_parts import arrays_fingerprint, check_state, evenly_spaced
from fedpax.errors import ArgumentError
from fedpax.populations.client_arrays import ContiguousClients, RaggedPartition
from fedpax.populations.client_sampler import ClientSampler
from fedpax.populations.partition import Partition, check_indices
from fedpax.primitives.casts import checked_cast
from fedpax.sources.reused_memory import ColumnReader, ReusedMemory, aligned_zeros
from fedpax.sources.shuffle import hash_key, shuffled_in

Read = Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]]
"""A function that reads the examples of given indices, arrays `[examples, ...]`."""


PadTo: TypeAlias = Literal["population", "round"]
"""Whose largest client determines the axis of steps of a round."""

_SHORTER = 4
"""The next shorter axis of steps has this part of the steps."""

MOSTLY_PADDING = 8
"""If less than this part of a round's steps is valid, padding is not read but left in new memory,
which the system clears. With less padding, it costs less to write to used memory."""


class _Located(NamedTuple):
    """Where the examples of sampled clients are."""

    # The first example of each client, and the number of its examples, int64 `[sampled]`.
    first: NDArray[np.int64]
    sizes: NDArray[np.int64]
    indices: NDArray[np.int64] | None  # the index of each example. None: the examples' own numbers


class CohortRounds:
    """An endless iterator over the rounds of a population; made by `cohort_rounds`.

    Attributes:
        max_steps: the largest size of the batches' second axis.
        pad_to: as for `cohort_rounds`.
        items_per_round: the average number of examples in a round, local epochs included.
        num_clients: the size of the population: `client_ids` are below it.
        chunk_size: as for `cohort_rounds`.
        item_unit: `"examples"`, the unit of `items_per_round`.
        shapes: a round's `Cohort` of `jax.ShapeDtypeStruct`.
        settings: the settings that a stream must have to restore a state of this one. Populations,
            arrays and weights are identified by checksums, data sets and functions by name.
    """

    item_unit = "examples"

    def __init__(
        self,
        read: Read,
        population: Partition,
        sampler: ClientSampler,
        max_steps: int,
        preprocess: Preprocess,
        example: Arrays,
        items_per_round: int,
        settings: dict[str, int | str],
        *,
        num_devices: int,
        chunk_size: int,
        pad_to: PadTo = "population",
    ) -> None:
        self.max_steps = max_steps
        self.pad_to = pad_to
        self.items_per_round = items_per_round
        self.num_clients = sampler.num_clients
        self.settings = settings
        self._read = read
        self._population = population
        self._sampler = sampler
        self._scales_images = preprocess is preprocess_images
        self._preprocess = pack_images if self._scales_images else preprocess
        self._scaled = ReusedMemory()
        self._num_devices, self.chunk_size = num_devices, chunk_size
        self._round = 0
        shape = sampler.cohort_size, max_steps, int(settings["batch_size"])
        fields: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((*shape, *values.shape[1:]), values.dtype)
            for name, values in {MASK: np.ones(1, np.bool_), **example}.items()
        }
        per_client: Any = jax.ShapeDtypeStruct((sampler.cohort_size,), np.int32)
        self.shapes = Cohort(fields, per_client, per_client, per_client)

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def fingerprint(self) -> dict[str, str]:
        """Return the size of the data and a checksum of a sample, by name."""
        number = int(self.settings["num_examples"])
        sample = arrays_fingerprint(self._read(evenly_spaced(number, 256)))
        clients = f"{len(self._population)} clients {self.settings['population']}"
        return {str(self.settings["source"]): f"{number} examples, {sample}, {clients}"}

    def __next__(self) -> Cohort:
        return self._next()

    def next_packed(self) -> Cohort:
        """Return the next cohort, with images of integers as uint8; its arrays can be read-only."""
        return self._next(packed=True)

    def unpack(self, cohort: Cohort) -> Cohort:
        """Complete a cohort of `next_packed` that is on the devices."""
        image = cohort.batches["image"] if self._scales_images else None
        if image is None or image.dtype != np.uint8:
            return cohort
        return cohort._replace(batches={**cohort.batches, "image": scale_on_devices(image)})

    def _next(self, *, packed: bool = False) -> Cohort:
        client_ids, located = self._order(self._round)
        length = self.max_steps
        if self.pad_to == "round":
            longest = int(self._num_steps(located.sizes).max(initial=0))
            length = min(x for x in shorter_lengths(length) if x >= longest)
        cohort = self._read_rows(self._round, client_ids, located, length, packed=packed)
        self._round += 1
        return cohort

    def client_ids(self, round_number: int) -> NDArray[np.int64]:
        """Return the clients of a round in the order of a cohort's rows; -1 is an empty slot."""
        return self._order(round_number)[0]

    def num_steps(self, client_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the numbers of steps of clients, int64 `[n]`."""
        return self._num_steps(self._locate(np.asarray(client_ids, np.int64)).sizes)

    def read_clients(
        self, round_number: int, client_ids: NDArray[np.integer], length: int | None = None
    ) -> Cohort:
        """Read some clients of a round alone: the same batches that the round has.

        Of `client_ids`, integers `[n]`, -1 is an empty slot. `length` sizes the axis of steps.
        Default None: `max_steps`.
        """
        ids = np.asarray(client_ids, np.int64)
        steps = length or self.max_steps
        return self._read_rows(round_number, ids, self._locate(ids), steps)

    def _locate(self, client_ids: NDArray[np.int64]) -> _Located:
        """Locate the examples of clients; an empty slot has none."""
        first, sizes = np.zeros_like(client_ids), np.zeros_like(client_ids)
        present = client_ids >= 0
        number = int(self.settings["num_examples"])
        located = _locate_examples(self._population, client_ids[present], number)
        first[present], sizes[present] = located.first, located.sizes
        return located._replace(first=first, sizes=sizes)

    def _num_steps(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        batch_size, epochs = int(self.settings["batch_size"]), int(self.settings["local_epochs"])
        return client_steps(sizes, batch_size, epochs, self.max_steps)

    def _order(self, round_number: int) -> tuple[NDArray[np.int64], _Located]:
        """Sample the clients of a round, and locate the examples of each of its rows."""
        sampled = self._sample(round_number)
        absent = self._sampler.cohort_size - len(sampled)
        client_ids = np.concatenate([sampled, np.full(absent, -1, np.int64)])
        first, sizes, indices = self._locate(client_ids)
        num_steps = self._num_steps(sizes)
        devices = self._num_devices
        homes = home_devices(client_ids, self._sampler.num_clients, devices)
        order = balanced_order(num_steps, devices, chunk_size=self.chunk_size, homes=homes)
        return client_ids[order], _Located(first[order], sizes[order], indices)

    def _read_rows(
        self,
        round_number: int,
        client_ids: NDArray[np.int64],
        located: _Located,
        length: int,
        *,
        packed: bool = False,
    ) -> Cohort:
        batch_size, local_epochs, seed = (
            int(self.settings[name]) for name in ("batch_size", "local_epochs", "seed")
        )
        sizes = located.sizes
        num_steps = self._num_steps(sizes)

        epoch_slots = -(-sizes // batch_size) * batch_size
        row_slots = num_steps * batch_size
        num_epochs = min(local_epochs, self.max_steps)
        begin = np.arange(num_epochs) * epoch_slots[:, None]
        counts = np.minimum(sizes[:, None], row_slots[:, None] - begin).clip(0).ravel()
        sequence = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        place = np.arange(len(sequence))
        place -= np.repeat(ends - counts, counts)
        # The keys do not depend on the row: a client has the same batches on any number of devices.
        keys = hash_key(seed, round_number, client_ids[:, None], np.arange(num_epochs))
        offset = shuffled_in(sequence, place, np.repeat(sizes, num_epochs), keys.ravel())
        offset += np.repeat(np.repeat(located.first, num_epochs), counts)
        chosen = offset if located.indices is None else located.indices.take(offset)

        # If nearly all steps are padding, only the others are read.
        padded = (len(client_ids), length)
        is_step = np.arange(length) < num_steps[:, None]
        steps = np.flatnonzero(is_step)
        if MOSTLY_PADDING * len(steps) >= math.prod(padded) or not len(steps):
            steps = np.arange(math.prod(padded))
            first = np.arange(len(client_ids)) * (length * batch_size)
        else:
            first = np.cumsum(row_slots) - row_slots
        if len(chosen) == len(steps) * batch_size:
            mask, indices = np.ones(len(chosen), np.bool_), chosen
        else:
            at = place + np.repeat((first[:, None] + begin).ravel(), counts)
            mask = np.zeros(len(steps) * batch_size, np.bool_)
            mask[at] = True
            # Padding repeats an example that is read anyway, the same one in any order of clients.
            # Or it is zeros, which `ColumnReader` can leave in used memory.
            indices = np.full(mask.shape, chosen.min() if len(chosen) else 0)
            indices[at] = chosen
        batches = self._read_steps(indices, mask, steps, is_step, packed=packed)
        return Cohort(
            batches,
            num_examples=checked_cast(np.minimum(sizes, row_slots), np.int32, "num_examples"),
            num_steps=checked_cast(num_steps, np.int32, "num_steps"),
            client_ids=checked_cast(client_ids, np.int32, "client_ids", "Sample fewer clients."),
        )

    def _read_steps(
        self,
        indices: NDArray[np.int64],
        mask: NDArray[np.bool_],
        steps: NDArray[np.int64],
        is_step: NDArray[np.bool_],
        *,
        packed: bool,
    ) -> dict[str, NDArray[Any]]:
        """Read the examples of the steps, and fill all other steps of the batches with zeros."""
        padded, batch_size = is_step.shape, int(self.settings["batch_size"])
        reads_all = len(steps) == is_step.size
        # A `preprocess` of the user can fail at zeros, or write to the arrays that it is given.
        is_known = self._preprocess is dict or self._scales_images
        if isinstance(self._read, ColumnReader) and is_known and reads_all:
            padding = np.repeat(~is_step, batch_size, axis=1)
            fields = self._read(indices, padding, read_only=packed)
        else:
            fields = self._read(indices)
        fields = apply_preprocess(self._preprocess, fields, indices.size)
        if self._scales_images and not packed:
            fields["image"] = scale_pixels(fields["image"], self._scaled)
        fields[MASK] = combine_masks(mask, fields.get(MASK))
        batches: dict[str, NDArray[Any]] = {}
        for name, values in fields.items():
            read = values.reshape(len(steps), batch_size, *values.shape[1:])
            if not reads_all:
                read, values = aligned_zeros((math.prod(padded), *read.shape[1:]), read.dtype), read
                read[steps] = values
            batches[name] = read.reshape(*padded, *read.shape[1:])
        self._check_shapes(batches)
        return batches

    def _sample(self, round_number: int) -> NDArray[np.int64]:
        """Sample the clients of a round, and check what a subclass of `ClientSampler` returns."""
        sampled = np.asarray(self._sampler.sample(round_number))
        cohort_size, num_clients = self._sampler.cohort_size, self._sampler.num_clients
        if (
            sampled.ndim != 1
            or len(sampled) > cohort_size
            or (sampled.size and (sampled.dtype.kind not in "iu" or sampled.min() < 0))
            or sampled.max(initial=0) >= num_clients
        ):
            raise ArgumentError(
                f"{type(self._sampler).__name__}.sample({round_number}) returned {sampled.dtype}"
                f"{list(sampled.shape)}, expected the clients of the round: at most cohort_size="
                f"{cohort_size} integers from 0 to {num_clients - 1}. Return fewer clients, or "
                "make the sampler with a larger cohort_size."
            )
        if not self._sampler.repeats:
            name = f"{type(self._sampler).__name__}.sample({round_number})"
            check_distinct_clients(
                f"{name} returned a cohort that",
                sampled,
                remedy="For a method without states of clients, set `repeats = True` in the class.",
            )
        return sampled.astype(np.int64)

    def _check_shapes(self, batches: Arrays) -> None:
        """Check that a round has the fields, shapes and dtypes of every other round."""
        size = batches[MASK].shape[1:3]
        expected = {n: ((*size, *x.shape[3:]), x.dtype) for n, x in self.shapes.batches.items()}
        actual = {name: (x.shape[1:], x.dtype) for name, x in batches.items()}
        if self._scales_images and batches["image"].dtype == np.uint8:  # until `unpack`
            actual["image"] = (actual["image"][0], np.dtype(np.float32))
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise ArgumentError(
                    f"preprocess returned the field {name!r} with another shape or dtype than for "
                    f"the first example: {actual.get(name)}, expected {expected.get(name)} for "
                    f"{' x '.join(map(str, size))} examples. Pad "
                    "or resize the field, so that all rounds are equal."
                )

    def get_state(self) -> dict[str, Any]:
        """Return the stream's position after the last round, as JSON values."""
        return {"settings": dict(self.settings), "round": self._round}

    def set_state(self, state: Any) -> None:
        """Move to a saved position of a stream with equal settings over the same source."""
        # With equal `num_devices` and `chunk_size` the rounds are bitwise equal, else in another
        # order.
        self._round = int(check_state(state, self.settings, "round"))


def shorter_lengths(longest: int) -> list[int]:
    """Return the lengths of padded axes: the longest, a 4th of it, and so on."""
    lengths = [longest]
    while (shorter := -(-lengths[-1] // _SHORTER)) < lengths[-1]:
        lengths.append(shorter)
    return lengths


def _locate_examples(
    population: Partition, sampled: NDArray[np.int64], num_examples: int
) -> _Located:
    """Locate the examples of sampled clients; contiguous ones without a list of their indices."""
    if isinstance(population, RaggedPartition):  # its indices have been checked
        first = population.starts[sampled]
        return _Located(first, population.starts[sampled + 1] - first, population.indices)
    if isinstance(population, ContiguousClients) and population.num_examples <= num_examples:
        return _Located(population.first_examples(sampled), population.sizes(sampled), None)
    parts = [check_indices(population[k], num_examples, f"client {k}") for k in sampled]
    sizes = np.array([len(part) for part in parts], np.int64)
    return _Located(
        np.cumsum(sizes) - sizes, sizes, np.concatenate([*parts, np.zeros(0, np.int64)])
    )


def client_steps(
    sizes: Sequence[int] | NDArray[np.int64],
    batch_size: int,
    local_epochs: int,
    max_steps: int | None,
) -> NDArray[np.int64]:
    """Return the steps of clients with given numbers of examples."""
    steps = local_epochs * (-(-np.asarray(sizes, np.int64) // batch_size))
    return steps if max_steps is None else np.minimum(steps, max_steps)
