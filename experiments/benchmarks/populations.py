"""Populations of millions of clients: CPU time and memory of partitions, streams and cohorts.

    python -m fedpax.experiments.benchmarks.populations --clients=1000000,10000000

Clients have two examples on average, with 10 labels. Memory is the peak of a step beyond its
arguments, in a second call. Bars: 2 microseconds and 200 bytes a client to make a population; 1
microsecond a client for other steps that visit all; 10 ms for a cohort of 1,000 drawn by weight.
"""

import itertools
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fedpax import data
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, integers, option

COHORT = 1000
POPULATION_SECONDS, POPULATION_BYTES, STEP_SECONDS = 2e-6, 200, 1e-6  # for each client
COHORT_SECONDS = 0.01
Step = Callable[[], Any]


def cases(clients: int) -> Iterator[tuple[dict[str, Step], float, float]]:
    """Yield steps of each kind, with the most seconds and the most bytes of a step."""
    random, size = np.random.default_rng(0), min(COHORT, clients)
    labels = random.integers(0, 10, 2 * clients)
    examples, pool = {"label": labels.astype(np.uint8)}, {"label": labels[:60_000]}
    skewed = data.DirichletClients(pool["label"], clients, alpha=0.5, median_examples=30, sigma=1.0)
    dirichlet = partial(data.partition_dirichlet, labels, clients, alpha=0.5)
    by_quantity = partial(data.partition_by_quantity, 2 * clients, clients, alpha=1.0)
    sampler = data.ClientSampler(clients, size)
    make_rounds = partial(data.cohort_rounds, batch_size=10, preprocess=dict)
    makes: dict[str, Step] = {
        "partition_iid": lambda: data.partition_iid(2 * clients, clients),
        "partition_dirichlet": dirichlet,
        "partition_dirichlet(equal_sizes=True)": partial(dirichlet, equal_sizes=True),
        "partition_by_quantity": by_quantity,
        "partition_by_shards": lambda: data.partition_by_shards(labels, clients),
        "cohort_rounds(DirichletClients)": lambda: make_rounds(pool, skewed, sampler),
    }
    yield makes, clients * POPULATION_SECONDS, clients * POPULATION_BYTES
    weights, sizes = random.exponential(size=clients), random.integers(1, 50, clients // 8 * 8)
    population = data.partition_iid(2 * clients, clients)
    visits: dict[str, Step] = {
        "cohort_rounds(partition)": lambda: make_rounds(examples, population, sampler),
        "partition_statistics": lambda: data.partition_statistics(population),
        "balanced_order(num_devices=1)": lambda: data.balanced_order(sizes),
        "balanced_order(num_devices=8)": lambda: data.balanced_order(sizes, 8),
        "ClientSampler(weights)": lambda: data.ClientSampler(clients, size, 0, weights),
    }
    yield visits, clients * STEP_SECONDS, math.inf
    by_weight, rounds = data.ClientSampler(clients, size, weights=weights), itertools.count()
    yield {"sample(), by weight": lambda: by_weight.sample(next(rounds))}, COHORT_SECONDS, math.inf


def cpu_seconds(step: Step) -> float:
    """Return the CPU seconds of a step."""
    began = time.process_time()
    step()
    return time.process_time() - began


def peak_bytes(step: Step) -> int:
    """Return the largest number of bytes that a step allocates at a time."""
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Populations(Benchmark):
    clients: list[int] = option("100000,1000000", "numbers of clients", integers)
    columns = (
        "clients {clients:,} | step {step:37} | CPU s {seconds:.3f} | bar {bar:.3f} "
        "| us a client {microseconds:.2f} | peak MB {megabytes:.1f}"
    )
    bar = f"{POPULATION_SECONDS:g} s and {POPULATION_BYTES} bytes a client to make a population"

    def measure(self) -> Iterator[Row]:
        for clients in self.clients:
            for steps, most_seconds, most_bytes in cases(clients):
                for name, step in steps.items():
                    seconds, size = cpu_seconds(step), peak_bytes(step)
                    yield Row(
                        clients=clients,
                        step=name,
                        seconds=seconds,
                        microseconds=1e6 * seconds / clients,
                        bar=most_seconds,
                        bytes=size,
                        megabytes=size / 1e6,
                        met=seconds <= most_seconds and size <= most_bytes,
                    )


main = command(Populations)
