"""Rounds of FedAvg with each aggregator, and the aggregators alone: time and memory.

    python -m fedpax.experiments.benchmarks.aggregator_rounds --model=cnn --clients=64

`round / mean's` is the time of a round divided by that with the plain mean. `alone` is the time to
aggregate random updates without training. `added` is its excess over the mean's, as a fraction of
the round with the mean: times of whole rounds vary by several percent. `temporaries` shows the
memory of robust means, which need all updates at once.

A lower bound is the work that an aggregator cannot leave out: for the median and the trimmed mean
one sort of each coordinate, for Krum the matmul of the inner products of all pairs, for Bulyan
both, for the geometric median a weighted mean per iteration and one more. Flower's functions, if it
is installed, must give the same result. They use one thread: compare by `--clock=cpu`.
"""

import functools
import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax import Cohort
from fedpax import aggregators as of
from fedpax.aggregators import Aggregator, chain, codecs, mean
from fedpax.aggregators.all_updates import reduce_coordinates, squared_distances
from fedpax.aggregators.coordinate_means import sort_rows
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, integers, option
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Sizes, Workload

NUM_ITERATIONS = 8  # of the geometric median


def aggregators(clients: int) -> dict[str, Aggregator]:
    """Return the aggregators by name; those that need more clients are left out."""
    neighbors: Any = {"num_neighbors": min(4, (clients - 1) // 2 * 2) or None}  # an even number
    private: dict[str, Any] = {"max_norm": 1.0, "noise_multiplier": 1.0, "seed": 0}
    compressed = {
        "uniform(4)": codecs.uniform(4),
        "rotated(uniform(4))": codecs.rotated(codecs.uniform(4)),
        "drive": codecs.drive(),
        "terngrad": codecs.terngrad(),
        "sign": codecs.sign(),
        "e3m0": codecs.e3m0(),
        "top_k(1/64)": codecs.top_k(1 / 64),
        "random_k(1/64)": codecs.random_k(1 / 64),
    }
    aggregators = {
        "mean": mean(),
        "clip_by_norm": chain(of.clip_by_norm(1.0), mean()),
        "adaptive_clip": chain(of.adaptive_clip(initial_norm=1.0), mean()),
        "private_mean": of.private_mean(**private),
        "secure_mean, 4 neighbours": of.secure_mean(max_value=1.0, bits=16, seed=0, **neighbors),
        "private_secure_mean, 4 neighbours": of.private_secure_mean(**private, **neighbors),
        "quantized_mean(4)": of.quantized_mean(4),
        **{name: of.compressed_mean(codec) for name, codec in compressed.items()},
        "geometric_median": of.geometric_median(num_iterations=NUM_ITERATIONS),
        "coordinate_median": of.coordinate_median(),
        "trimmed_mean(0.1)": of.trimmed_mean(0.1),
    }
    # With fewer faulty clients than 3, Bulyan's last selections are ties, which Flower breaks
    # otherwise.
    for faulty, selected in ((1, 2), (3, 5)):
        if clients >= 2 * faulty + 3:
            name = f"krum({faulty})"
            aggregators[name] = of.krum(faulty)
            aggregators[f"{name}, {selected} selected"] = of.krum(faulty, num_selected=selected)
        if clients >= 4 * faulty + 3:
            aggregators[f"bulyan({faulty})"] = of.bulyan(faulty)
    return aggregators


def _sort(updates: Any) -> Any:
    """Sort the clients' values of each coordinate, and return the smallest ones."""
    return reduce_coordinates(lambda x: sort_rows(x)[0], updates)


def _means(updates: Any) -> Any:
    """Compute the geometric median's weighted means, one after another."""

    def iterate(_: jax.Array, mean: Any) -> Any:
        entry = jax.tree.leaves(mean)[0].ravel()[0]  # the weights depend on the last mean
        weights = fedpax.federated_map(lambda u: 1 + entry**2, jax.tree.leaves(updates)[0])
        return fedpax.federated_mean(updates, weights)

    return jax.lax.fori_loop(0, NUM_ITERATIONS, iterate, fedpax.federated_mean(updates))


BOUNDS: dict[str, Callable[[Any], Any]] = {
    "geometric_median": _means,
    "coordinate_median": _sort,
    "trimmed_mean": _sort,
    "krum": squared_distances,
    "bulyan": lambda updates: (squared_distances(updates), _sort(updates)),
}
"""The lower bounds, functions of the placed updates, by the beginning of the aggregator's name."""


def flower_functions() -> dict[str, Callable[[list[Any]], list[np.ndarray]]]:
    """Return Flower's functions, `[(arrays, number of examples) of each client] -> arrays`."""
    if not timing.is_installed("flwr"):
        return {}
    module = importlib.import_module("flwr.server.strategy.aggregate")
    return {
        "coordinate_median": module.aggregate_median,
        "trimmed_mean(0.1)": lambda r: module.aggregate_trimmed_avg(r, 0.1),
        "krum(3)": lambda r: module.aggregate_krum(r, 3, 0),
        "krum(3), 5 selected": lambda r: module.aggregate_krum(r, 3, 5),
        "bulyan(3)": lambda r: module.aggregate_bulyan(  # removes clients from its argument
            list(r), 3, module.aggregate_krum, to_keep=0
        ),
    }


class AggregatorRounds(Sizes, Timed):
    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: list[int] = option("64", "numbers of clients in the round", integers, least=2)
    devices: list[int] = option("1", "numbers of devices; simulated on a CPU", integers)
    chunk_size: int = option(1, "clients that run at once")
    repetitions: int = option(7, "timed calls of each round", least=1)
    aggregators: list[str] | None = harness.some(";", lambda run: aggregators(min(run.clients)))
    columns = (
        "aggregator {name:32} | temporaries {temporary_bytes:bytes} | round, s {seconds:.3f} "
        "| round / mean's {ratio:.2f} | added {added:+.1%} | alone, s {alone_seconds:.3f} "
        "| bound, s {bound_seconds:.3f} | alone / bound {bound_ratio:.2f} "
        "| Flower, s {flower_seconds:.2f} | Flower / alone {flower_ratio:.1f}"
    )

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> Iterator[Row]:
        params, batches, num_examples = workload.random_arguments(clients, mesh)
        cohort, random = Cohort(batches, num_examples), np.random.default_rng(0)
        updates = jax.tree.map(
            lambda p: random.standard_normal((clients, *p.shape), np.float32), params
        )
        of_clients = [([x[i] for x in jax.tree.leaves(updates)], 1) for i in range(clients)]
        program = fedpax.program(clients=clients, chunk_size=self.chunk_size)
        placed, peers = jax.device_put(updates, P("clients")), flower_functions()
        rounds: dict[str, timing.Compiled] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for name, aggregator in aggregators(clients).items():
            if self.aggregators is not None and name not in ("mean", *self.aggregators):
                continue
            settings = {"aggregator": aggregator, "chunk_size": self.chunk_size}
            algorithm = workload.fedavg(clients, **settings)
            rounds[name] = timing.compile_for(algorithm.round, algorithm.init(params), cohort)

            def aggregate(updates: Any, params: Any, aggregator: Any = aggregator) -> Any:
                return aggregator.aggregate(aggregator.init(params), updates, None)[0]

            calls[name] = timing.compile_for(program(aggregate), placed, params).call
            for start in filter(name.startswith, BOUNDS):
                bound = timing.compile_for(program(BOUNDS[start]), placed)
                calls[f"bound of {name}"] = bound.call
            if name in peers:
                calls[f"Flower's {name}"] = functools.partial(peers[name], of_clients)
                pairs = jax.tree.leaves(calls[name]()), calls[f"Flower's {name}"]()
                for ours, other in zip(*pairs, strict=True):
                    np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5)
        rows, seconds = self.compare(rounds, "mean"), self.time(calls)
        for row in rows:
            own = seconds[row.name]
            triples = zip(own, seconds["mean"], rows[0].seconds, strict=True)
            row.alone_seconds = own
            row.added = statistics.median((ours - least) / whole for ours, least, whole in triples)
            row.bound_seconds = bound_of = seconds.get(f"bound of {row.name}")
            row.bound_ratio = bound_of and timing.paired_ratio(own, bound_of)
            row.flower_seconds = flower = seconds.get(f"Flower's {row.name}")
            row.flower_ratio = flower and timing.paired_ratio(flower, own)
            yield row


main = command(AggregatorRounds)
