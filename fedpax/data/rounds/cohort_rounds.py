"""cohort_rounds: an endless stream of sampled clients, each with its own number of examples."""

import zlib
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fedpax.console import count_of
from fedpax.data.rounds.cohort_stream import (
    MOSTLY_PADDING,
    CohortRounds,
    PadTo,
    Read,
    client_steps,
)
from fedpax.data.rounds.documents import read as read_records
from fedpax.data.rounds.labeled_examples import (
    Arrays,
    Preprocess,
    apply_preprocess,
    preprocess_images,
)
from fedpax.data.rounds.stream_parts import (
    arrays_fingerprint,
    check_sizes,
    evenly_spaced,
    qualified_name,
    source_name,
)
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.populations.client_arrays import ContiguousClients, RaggedPartition
from fedpax.populations.client_sampler import ClientSampler
from fedpax.populations.partition import Partition, check_parts, check_sized, partition_checksum
from fedpax.populations.synthetic_clients import DirichletClients
from fedpax.sources.reused_memory import ColumnReader
from fedpax.sources.source import Columns, Examples, Source, as_examples, column_array, stack_values


def cohort_rounds(
    examples: Examples | Arrays,
    population: Partition,
    sampler: ClientSampler,
    *,
    batch_size: int,
    local_epochs: int = 1,
    max_steps: int | None = None,
    seed: int = 0,
    num_devices: int = 1,
    chunk_size: int = 1,
    preprocess: Preprocess = preprocess_images,
    pad_to: PadTo = "population",
) -> CohortRounds:
    """Make an endless stream of rounds, each with sampled clients of a population.

    Each local epoch has a new random order, and its last batch may not be full.

    Args:
        examples: a source from `load` or a list of dicts, of which each round reads its cohort's
            records; a dict of arrays `[examples, ...]`; or a data frame or table of pandas, Polars
            or pyarrow.
        population: for each client the indices of its examples: a list, or a sequence that
            generates them when indexed. A client without examples has weight 0.
        sampler: samples the clients of each round. If it samples fewer than `cohort_size`, other
            slots are empty.
        batch_size: examples per step and client.
        local_epochs: how often a client iterates over its examples in a round.
        max_steps: the most steps of a client in a round; longer clients are truncated. Default
            None: the steps of the largest client.
        seed: the random seed of the examples' orders.
        num_devices: the size of the mesh's `clients` axis; it must divide the cohort.
        chunk_size: the number of clients that a device runs at once, as in the algorithm.
        preprocess: a function from the source's fields to a batch's, arrays of numbers; all are
            `[examples, ...]`. Default: `image` to float32 in 0 to 1, and `label` to int32; `dict`
            leaves all fields. A field whose examples differ in shape is an array `[examples]` of
            objects: pad it, and return a field `mask`, 0 at padding.
        pad_to: with "population", each round has `max_steps` steps. With "round", for clients of
            very different sizes, it has a 4th, 16th, ... of them if no client takes more, each
            compiled once.

    Returns:
        An iterator over `fedpax.Cohort` with all of its fields: `batches` is a dict of arrays
        `[clients, steps, batch_size, ...]`, with a `mask`, 0 where there is no example (any value),
        bool `[clients, steps, batch_size]` if `preprocess` returns none; `num_examples`,
        `num_steps` and `client_ids` are int32 `[clients]`, ids -1 where fewer clients were
        available or sampled.

    Raises:
        ValueError: a size does not fit the memory or the other sizes, there are no examples,
            population and sampler have different numbers of clients, or an index is out of range.
        KeyError: the examples have no `image` or `label`, and `preprocess` is the default.
        TypeError: an argument, or a field from `preprocess`, has another type.

    Example:
        >>> images = np.random.default_rng(0).random((7, 4, 4, 1), np.float32)
        >>> examples = {"image": images, "label": np.arange(7)}
        >>> population = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5, 6])]
        >>> rounds = cohort_rounds(examples, population, ClientSampler(3, 2), batch_size=2)
        >>> cohort = next(rounds)
        >>> cohort.batches["image"].shape
        (2, 2, 2, 4, 4, 1)
        >>> cohort.client_ids.tolist(), cohort.num_steps.tolist(), cohort.num_examples.tolist()
        ([2, 1], [2, 1], [3, 1])
    """
    check_sizes(1, batch_size=batch_size, local_epochs=local_epochs)
    if max_steps is not None:
        check_sizes(1, max_steps=max_steps)
    if pad_to not in get_args(PadTo):
        raise ArgumentError(
            f"pad_to is {pad_to!r}, expected 'population' or 'round'. 'round' makes rounds without "
            "the largest clients short."
        )
    _check_devices(num_devices, chunk_size)
    _check_clients(population, sampler, num_devices)
    read, num_examples, name = _open(examples)
    if is_list := isinstance(population, list | tuple | np.ndarray | RaggedPartition):
        population = check_parts(population, num_examples, "client")
    sizes = None
    if isinstance(population, RaggedPartition | ContiguousClients | DirichletClients):
        sizes = population.sizes()
    elif max_steps is None:
        sizes = np.fromiter(map(len, population), np.int64)
    if max_steps is None:
        assert sizes is not None
        max_steps = int(client_steps([sizes.max()], batch_size, local_epochs, None)[0])
        if not max_steps:
            raise ArgumentError("No client of the population has an example.")
    example = apply_preprocess(preprocess, read(np.zeros(1, np.int64)), 1)
    _check_memory(example, sizes, sampler.cohort_size, max_steps, batch_size, local_epochs)
    some = [population[k] for k in evenly_spaced(len(population))]
    seen = np.minimum([local_epochs * len(part) for part in some], max_steps * batch_size)
    settings: dict[str, int | str] = {
        "source": name,
        "num_examples": num_examples,
        "population": partition_checksum(population if is_list else some),
        **_sampler_settings(sampler),
        "max_steps": max_steps,
        "batch_size": batch_size,
        "local_epochs": local_epochs,
        "seed": seed,
        "preprocess": qualified_name(preprocess),
    }
    return CohortRounds(
        read,
        population,
        sampler,
        max_steps,
        preprocess,
        example,
        max(1, round(sampler.expected_participants * float(seen.mean()))),
        settings,
        num_devices=num_devices,
        chunk_size=chunk_size,
        pad_to=pad_to,
    )


def _check_devices(num_devices: int, chunk_size: int) -> None:
    if not hasattr(chunk_size, "__index__"):
        raise ArgumentError(
            f"chunk_size is {chunk_size!r}, expected an integer, because the order of clients "
            "depends on it: give the same integer here and to the algorithm."
        )
    check_sizes(1, num_devices=num_devices, chunk_size=chunk_size)


def _check_memory(
    example: Arrays,
    sizes: NDArray[np.int64] | None,
    cohort_size: int,
    max_steps: int,
    batch_size: int,
    local_epochs: int,
) -> None:
    """Check that a round, and the next one, fit the memory of this machine."""
    num_bytes = sum(values.nbytes for values in example.values())
    share = 1.0  # of a round of the largest clients that takes memory: see `aligned_zeros`
    if sizes is not None:
        steps = client_steps(sizes, batch_size, local_epochs, max_steps)
        largest = steps if len(steps) <= cohort_size else np.partition(steps, -cohort_size)
        valid = int(largest[-cohort_size:].sum()) / (cohort_size * max_steps)
        share = min(1.0, MOSTLY_PADDING * valid)

    def remedy(memory: int) -> str:
        fitting = memory // (2 * num_bytes * cohort_size * batch_size)
        if sizes is None or not fitting:
            return "reduce one of these sizes."
        rest = np.maximum(sizes - fitting * batch_size, 0)
        return (
            f"the largest client has {sizes.max():,} examples. Reduce the cohort, or pass "
            f"max_steps={fitting} (--cohort.max_steps={fitting}): {np.count_nonzero(rest):,} of "
            f"{len(sizes):,} clients then leave out {rest.sum():,} of {sizes.sum():,} examples in "
            "a round."
        )

    check_sizes(
        num_bytes,
        max(1.0, 2 * share),
        remedy,
        cohort_size=cohort_size,
        max_steps=max_steps,
        batch_size=batch_size,
    )


def _check_clients(population: Partition, sampler: ClientSampler, num_devices: int) -> None:
    if not isinstance(sampler, ClientSampler):
        raise ArgumentTypeError(
            f"sampler is a {type(sampler).__name__}, expected a ClientSampler. For a sampler of "
            "your own, subclass ClientSampler and override sample(round_number)."
        )
    check_sized(population, "population")
    if len(population) != sampler.num_clients:
        raise ArgumentError(
            f"population has {count_of(len(population), 'client')}, but the sampler has "
            f"{sampler.num_clients}: make ClientSampler with num_clients={len(population)}."
        )
    if sampler.cohort_size % num_devices:
        divisible = sampler.cohort_size - sampler.cohort_size % num_devices or num_devices
        raise ArgumentError(
            f"num_devices={num_devices} does not divide cohort_size={sampler.cohort_size}: take "
            f"{divisible} clients, or a mesh whose clients axis divides the cohort."
        )


def _sampler_settings(sampler: ClientSampler) -> dict[str, int | str]:
    """Return the settings of a sampler that determine its cohorts."""
    weights, available = sampler.weights, sampler.available
    settings: dict[str, int | str] = {
        "num_clients": sampler.num_clients,
        "cohort_size": sampler.cohort_size,
        "sampler_seed": sampler.seed,
        "sampler_weights": (
            "none" if weights is None else zlib.crc32(np.asarray(weights, "<f8").tobytes())
        ),
        "available": "all" if available is None else qualified_name(available),
    }
    if sampler.sampling_probability is not None:
        settings["sampling_probability"] = str(sampler.sampling_probability)
    if sampler.searches:  # earlier versions drew other cohorts from these populations
        settings["weighted_draws"] = "searches"
    return settings


def _open(examples: Examples | Arrays) -> tuple[Read, int, str]:
    """Return a function that stacks the examples of given indices, their number and a name."""
    examples = as_examples(examples, "examples")
    if isinstance(examples, Columns):
        arrays = {name: column_array(values) for name, values in examples.columns.items()}
        return ColumnReader(arrays), len(examples), arrays_fingerprint(arrays)

    if not len(examples):
        raise ArgumentError("The source has no examples: load another split.")

    if isinstance(examples, Source) and hasattr(examples, "take"):  # from files: columns at once
        read = examples.reader() if hasattr(examples, "reader") else examples.take
        return read, len(examples), source_name(examples)

    def read_stacked(indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        unique, position = np.unique(indices, return_inverse=True)
        # In one call, which takes a tenth of the time for files of 2**18 examples.
        records = read_records(examples, unique.tolist())
        return {
            name: stack_values([example[name] for example in records])[position]
            for name in records[0]
        }

    return read_stacked, len(examples), source_name(examples)
