"""Robust means alone, against lower bounds of their cost and against Flower's.

    python -m fedpax.experiments.benchmarks.aggregations --model=cnn --clients=64

Random updates of all clients are aggregated, without training, one client at a time. A lower bound
is the part that an aggregation cannot leave out, as its own program: for the median and the
trimmed mean one sort of each coordinate, for Krum the matmul of the inner products of all pairs,
for Bulyan both, for the geometric median a weighted mean for each iteration and one before them.

If Flower is installed (`pip install flwr`), its functions aggregate the same arrays in NumPy and
must give the same result. They use one thread, and fedpax uses all: compare by `--clock=cpu`.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedpax
from fedpax import aggregators
from fedpax.aggregators import Aggregator
from fedpax.aggregators.all_updates import reduce_coordinates, squared_distances
from fedpax.aggregators.coordinate_means import sort_rows
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import WORKLOADS

NUM_ITERATIONS = 8  # of the geometric median
NUM_BYZANTINE = 3  # with fewer, Bulyan's last selections are ties, which Flower breaks otherwise


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


def aggregations() -> dict[str, tuple[Aggregator, Callable[[Any], Any]]]:
    """Return each aggregator, and its lower bound, a function of the placed updates."""
    krum = functools.partial(aggregators.krum, NUM_BYZANTINE)
    both = aggregators.bulyan(NUM_BYZANTINE), lambda u: (squared_distances(u), _sort(u))
    return {
        "coordinate_median": (aggregators.coordinate_median(), _sort),
        "trimmed_mean(0.1)": (aggregators.trimmed_mean(0.1), _sort),
        "krum(3)": (krum(), squared_distances),
        "krum(3), 5 selected": (krum(num_selected=5), squared_distances),
        "bulyan(3)": both,
        "geometric_median": (aggregators.geometric_median(num_iterations=NUM_ITERATIONS), _means),
    }


def flower_functions() -> dict[str, Callable[[list[Any]], list[np.ndarray]]]:
    """Return Flower's functions, `[(arrays, number of examples) of each client] -> arrays`."""
    if not timing.is_installed("flwr"):
        return {}
    module, byzantine = importlib.import_module("flwr.server.strategy.aggregate"), NUM_BYZANTINE
    return {
        "coordinate_median": module.aggregate_median,
        "trimmed_mean(0.1)": lambda r: module.aggregate_trimmed_avg(r, 0.1),
        "krum(3)": lambda r: module.aggregate_krum(r, byzantine, 0),
        "krum(3), 5 selected": lambda r: module.aggregate_krum(r, byzantine, 5),
        "bulyan(3)": lambda r: module.aggregate_bulyan(  # removes clients from its argument
            list(r), byzantine, module.aggregate_krum, to_keep=0
        ),
    }


class Aggregations(Timed):
    model: str = option("cnn", "shapes of the updates", choices=WORKLOADS)
    clients: int = option(64, "number of clients", least=4 * NUM_BYZANTINE + 3)  # for Bulyan
    aggregators: list[str] | None = harness.some(";", lambda _: aggregations())
    columns = (
        "aggregator {aggregator:20} | fedpax, s {seconds:.3f} | bound, s {bound_seconds:.3f} "
        "| fedpax / bound {bound_ratio:.2f} | Flower, s {flower_seconds:.2f} "
        "| Flower / fedpax {flower_ratio:.1f}"
    )

    def measure(self) -> Any:
        return timing.on_devices(1, self.measure_here)

    def measure_here(self) -> Iterator[Row]:
        random, peers = np.random.default_rng(0), flower_functions()
        program = fedpax.program(clients=self.clients, chunk_size=1)
        types = jax.eval_shape(WORKLOADS[self.model]().model.init, jax.random.key(0))
        shapes = [(self.clients, *leaf.shape) for leaf in jax.tree.leaves(types)]
        updates = [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
        results = [([x[i] for x in updates], 1) for i in range(self.clients)]
        for name in self.aggregators or aggregations():
            aggregator, bound = aggregations()[name]

            def aggregate(updates: Any, aggregator: Aggregator = aggregator) -> Any:
                return aggregator.aggregate(aggregator.init(None), updates, None)[0]

            calls: dict[str, Callable[[], Any]] = {}
            with jax.set_mesh(fedpax.make_mesh(clients=-1)):
                placed = jax.tree.map(jnp.asarray, updates)
                calls["fedpax"] = timing.compile_for(program(aggregate), placed).call
                calls["bound"] = timing.compile_for(program(bound), placed).call
                if name in peers:
                    calls["flower"] = functools.partial(peers[name], results)
                    for ours, other in zip(calls["fedpax"](), calls["flower"](), strict=True):
                        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5)
                seconds = self.time(calls)
            flower = seconds.get("flower")
            yield Row(
                aggregator=name,
                seconds=seconds["fedpax"],
                bound_seconds=seconds["bound"],
                bound_ratio=timing.paired_ratio(seconds["fedpax"], seconds["bound"]),
                flower_seconds=flower,
                flower_ratio=flower and timing.paired_ratio(flower, seconds["fedpax"]),
            )


main = command(Aggregations)
