"""Rounds of cohorts: each round other clients of a population, each with as much as it has.

What a round holds depends on the settings and the round's number alone, so a state is that number.
Only the examples of the cohort are read, so a population can be larger than memory.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import Cohort
from fedpax.data.populations.client_sampler import ClientSampler
from fedpax.data.populations.partition import (
    Examples,
    Partition,
    check_indices,
    get_field,
    partition_checksum,
)
from fedpax.data.populations.scheduling import balanced_order
from fedpax.data.rounds.example_rounds import scale
from fedpax.data.rounds.stream import (
    arrays_name,
    check_sizes,
    check_state,
    evenly,
    function_name,
    source_name,
)
from fedpax.data.shuffle import hash_key, shuffled_index

Arrays = Mapping[str, NDArray[Any]]
Read = Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]]


def images_and_labels(fields: Arrays) -> dict[str, NDArray[Any]]:
    """Makes of `image` and `label` what a classifier takes.

    Args:
        fields: `image`, `[..., height, width, channels]`, and `label`, integers `[...]`.

    Returns:
        `image` as float32, integers from 0 to 255 become 0 to 1; `label` as int32.

    Raises:
        KeyError: a field is missing.
        ValueError: the images differ in shape.
    """
    image, label = get_field(fields, "image"), get_field(fields, "label")
    if image.dtype == object:
        raise ValueError(
            f"The images have several shapes, such as {image[0].shape}, and cannot be stacked: "
            "resize them when the data set is prepared, or give a `prepare` that does."
        )
    return {"image": scale(image), "label": label.astype(np.int32)}


class CohortRounds:
    """An endless iterator over the rounds of a population, as `cohort_rounds` makes it.

    Attributes:
        max_steps: the most steps that a client takes in a round: the batches' second axis.
        examples_per_round: how many examples a cohort sees in a round, epochs times each, on
            average over at most a thousand clients.
        shapes: the shapes and dtypes of a round, a `Cohort` of `jax.ShapeDtypeStruct`.
        settings: what decides the stream; a state is restored only into the same. A data set and
            functions (`prepare`, and the cohorts' `available`) stand there by name. A list of
            clients and the cohorts' weights stand there by a checksum of all of them; arrays, and
            a population that is made when asked, by their size and a checksum of a thousand
            examples or clients at most, evenly spaced.
    """

    def __init__(
        self,
        read: Read,
        population: Partition,
        cohorts: ClientSampler,
        max_steps: int,
        prepare: Callable[[Arrays], dict[str, NDArray[Any]]],
        example: Arrays,
        examples_per_round: int,
        settings: dict[str, int | str],
    ) -> None:
        self.max_steps = max_steps
        self.examples_per_round = examples_per_round
        self.settings = settings
        self._take = read
        self._population = population
        self._cohorts = cohorts
        self._prepare = prepare
        self._round = 0
        each: Any = jax.ShapeDtypeStruct((cohorts.cohort_size,), np.int32)
        places = cohorts.cohort_size, max_steps, int(settings["batch"])
        fields: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((*places, *values.shape[1:]), values.dtype)
            for name, values in example.items()
        }
        fields["mask"] = jax.ShapeDtypeStruct(places, np.bool_)
        self.shapes = Cohort(fields, each, each, each)

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def __next__(self) -> Cohort:
        """Returns the next round, in arrays of its own.

        Raises:
            ValueError: nobody is available, a client that was made for the round names an example
                that is none of the source's, or `prepare` refuses the examples.
            OSError: a record of the source cannot be read.
        """
        batch, epochs, seed, devices, at_once, examples = (
            int(self.settings[name])
            for name in ("batch", "epochs", "seed", "devices", "chunk_size", "examples")
        )
        drawn = self._cohorts.sample(self._round)
        missing = self._cohorts.cohort_size - len(drawn)
        clients = np.concatenate([drawn, np.full(missing, -1, np.int64)])
        held = [check_indices(self._population[k], examples, f"client {k}") for k in drawn]
        held += [np.zeros(0, np.int64)] * missing
        steps = _steps([len(own) for own in held], batch, epochs, self.max_steps)
        order = balanced_order(steps, devices, chunk_size=at_once)
        clients, steps, held = clients[order], steps[order], [held[k] for k in order]

        # For each place of a batch that an example fills: its client's row, and where in the row.
        sizes = np.array([len(own) for own in held])
        epoch = -(-sizes // batch) * batch  # an epoch leaves the rest of its last batch empty
        row = np.repeat(np.arange(len(clients)), steps * batch)
        slot = np.arange(len(row)) - (np.cumsum(steps * batch) - steps * batch)[row]
        filled = slot % epoch[row] < sizes[row]
        row, slot = row[filled], slot[filled]
        keys = hash_key(seed, self._round, clients[row], slot // epoch[row])
        own = shuffled_index(slot % epoch[row], sizes[row], keys)
        chosen = np.concatenate(held)[(np.cumsum(sizes) - sizes)[row] + own]

        mask = np.zeros((len(clients), self.max_steps * batch), np.bool_)
        mask[row, slot] = True
        # Empty places repeat an example that is read anyway: any will do there.
        indices = np.full(mask.shape, chosen[0] if len(chosen) else 0)
        indices[row, slot] = chosen
        shape = (len(clients), self.max_steps, batch)
        batches = {
            name: values.reshape(*shape, *values.shape[1:])
            for name, values in self._prepare(self._take(indices.ravel())).items()
        }
        self._round += 1
        return Cohort(
            {**batches, "mask": mask.reshape(shape)},
            num_examples=np.minimum(sizes, steps * batch).astype(np.int32),
            num_steps=steps.astype(np.int32),
            client_ids=clients.astype(np.int32),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns where the stream stands, after the last round that it gave, for JSON."""
        return {"settings": dict(self.settings), "round": self._round}

    def set_state(self, state: Any) -> None:
        """Goes to where a stream stood: the next rounds are bitwise those that followed there.

        Args:
            state: what `get_state` returned, in this process or another, of a stream that was
                made with the same settings over the same source.

        Raises:
            ValueError: if the state is of another stream, saying what differs.
        """
        self._round = int(check_state(state, self.settings, "round"))


def cohort_rounds(
    examples: Examples | Arrays,
    population: Partition,
    cohorts: ClientSampler,
    *,
    batch: int,
    epochs: int = 1,
    max_steps: int | None = None,
    seed: int = 0,
    devices: int = 1,
    chunk_size: int = 1,
    prepare: Callable[[Arrays], dict[str, NDArray[Any]]] = images_and_labels,
) -> CohortRounds:
    """Makes an endless stream of rounds, each of other clients with what they have.

    A client goes through its examples `epochs` times, each time in a new order and in batches of
    its own; the last batch of an epoch may not be full, which `mask` says. Within a round, clients
    are ordered so that devices that hold equal blocks of them finish together (`balanced_order`).

    Args:
        examples: a source that `load` returned, whose records are read when a cohort needs them,
            or a dict of arrays `[examples, ...]` in memory, as `read_examples` returns it.
        population: for each client the indices of its examples: a list, or any sequence that makes
            them when asked. A client without examples takes no step and has weight 0.
        cohorts: who takes part when.
        batch: examples in a step of a client.
        epochs: how often a client goes through its examples in a round.
        max_steps: the most steps of a client in a round; None asks the whole population how many
            its largest client takes.
        seed: chooses the orders.
        devices: the size of the mesh's `clients` axis, which must divide the cohort.
        chunk_size: how many clients a device runs at once, a number: clients of like size
            share a step.
        prepare: makes of the fields, arrays `[examples, ...]`, those that a batch has. A field
            whose examples differ in shape comes as an array `[examples]` of objects.

    Returns:
        An iterator of `Cohort`.

    Raises:
        ValueError: for sizes that are not positive, do not fit the memory or one another, no
            examples, a population of another number of clients than the cohorts', or a client of
            a list that names an example that there is not.

    Example:
        >>> images = np.random.default_rng(0).random((7, 4, 4, 1), np.float32)
        >>> examples = {"image": images, "label": np.arange(7)}
        >>> population = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5, 6])]
        >>> rounds = cohort_rounds(examples, population, ClientSampler(3, 2), batch=2)
        >>> cohort = next(rounds)
        >>> cohort.batches["image"].shape
        (2, 2, 2, 4, 4, 1)
        >>> cohort.client_ids.tolist(), cohort.num_steps.tolist(), cohort.num_examples.tolist()
        ([2, 1], [2, 1], [3, 1])
    """
    if not hasattr(chunk_size, "__index__"):
        raise ValueError(
            f"chunk_size is {chunk_size!r}, but which clients of like size share a "
            "step depends on how many do: give a whole number, here and to the algorithm."
        )
    sizes = {"batch": batch, "epochs": epochs, "devices": devices}
    check_sizes(1, **sizes, chunk_size=chunk_size)
    if len(population) != cohorts.num_clients:
        raise ValueError(
            f"There are examples of {len(population)} clients, but the cohorts are drawn from "
            f"{cohorts.num_clients}: make ClientSampler with num_clients={len(population)}."
        )
    if cohorts.cohort_size % devices:
        raise ValueError(
            f"A cohort of {cohorts.cohort_size} clients cannot be shared by {devices} devices in equal "
            f"blocks: take {cohorts.cohort_size - cohorts.cohort_size % devices or devices} clients, or a mesh "
            "whose clients axis divides it."
        )
    read, count, source = _open(examples)
    if listed := isinstance(population, list | tuple | np.ndarray):
        population = [check_indices(own, count, f"client {k}") for k, own in enumerate(population)]
    if max_steps is None:
        largest = max(len(own) for own in population)
        max_steps = int(_steps([largest], batch, epochs, None)[0])
        if not max_steps:
            raise ValueError("No client of the population has an example.")
    one = prepare(read(np.zeros(1, np.int64)))
    check_sizes(
        sum(values.nbytes for values in one.values()),
        cohort=cohorts.cohort_size,
        max_steps=max_steps,
        batch=batch,
    )
    some = [population[k] for k in evenly(len(population))]
    # A client that is cut short sees as many as its steps hold.
    seen = np.minimum([epochs * len(own) for own in some], max_steps * batch)
    weights, available = cohorts.weights, cohorts.available
    settings: dict[str, int | str] = {
        "source": source,
        "examples": count,
        "population": partition_checksum(population if listed else some),
        "clients": len(population),
        "cohort": cohorts.cohort_size,
        "cohorts_seed": cohorts.seed,
        "cohorts_weights": (
            "none" if weights is None else zlib.crc32(np.asarray(weights, "<f8").tobytes())
        ),
        "available": "everybody" if available is None else function_name(available),
        "max_steps": max_steps,
        **sizes,
        "chunk_size": chunk_size,
        "seed": seed,
        "prepare": function_name(prepare),
    }
    per_round = round(cohorts.cohort_size * float(seen.mean()))
    return CohortRounds(read, population, cohorts, max_steps, prepare, one, per_round, settings)


def _steps(sizes: Sequence[int], batch: int, epochs: int, most: int | None) -> NDArray[np.int64]:
    """How many steps clients of so many examples take."""
    steps = epochs * (-(-np.asarray(sizes, np.int64) // batch))
    return steps if most is None else np.minimum(steps, most)


def _open(examples: Examples | Arrays) -> tuple[Read, int, str]:
    """What stacks the examples of some indices, each read once; their number, and their name."""
    if isinstance(examples, Mapping):
        lengths = {name: len(values) for name, values in examples.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            raise ValueError(
                f"examples has fields of {lengths} examples: give one array [examples, ...] a "
                "field, all of one length that is not 0."
            )
        return (
            lambda indices: {name: values[indices] for name, values in examples.items()},
            min(lengths.values()),
            arrays_name(examples),
        )

    import grain  # here, as it takes longer to import than everything else

    if not len(examples):
        raise ValueError("The source has no examples: load another split.")
    records = grain.MapDataset.source(examples)

    def read(indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        needed, place = np.unique(indices, return_inverse=True)
        found = [records[int(i)] for i in needed]
        return {name: _stack([example[name] for example in found])[place] for name in found[0]}

    return read, len(examples), source_name(examples)


def _stack(values: Sequence[Any]) -> NDArray[Any]:
    """An array [examples, ...], or [examples] of objects where their shapes differ."""
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    objects = np.empty(len(arrays), object)
    objects[:] = arrays
    return objects
