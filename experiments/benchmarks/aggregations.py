"""Robust means alone, against lower bounds of their cost and against Flower's.

    python -m fedpax.experiments.benchmarks.aggregations --model=cnn --clients=64

Random updates of all clients are aggregated, without training. Maps over clients run one client at
a time. A lower bound is the time of the part that an aggregation cannot leave out, as a program of
its own in interleaved calls:

- the median and the trimmed mean: one sort of each coordinate's values, by the fastest known
  program for the device (`fedpax.aggregators.sorting_network`);
- Krum and Multi-Krum: the matmul for the inner products of all pairs of updates;
- Bulyan: this matmul and one sort;
- the geometric median: one weighted mean for each iteration, and one before them.

If Flower is installed (`pip install flwr`), the functions of its strategies aggregate the same
arrays, in NumPy, and must give the same result. They use one thread, and fedpax uses all: compare
them by `--clock=cpu`, the CPU time of the process.
"""

import argparse
import functools
import importlib
import importlib.metadata
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

import fedpax
from fedpax.aggregators import (
    Aggregator,
    bulyan,
    coordinate_median,
    geometric_median,
    krum,
    trimmed_mean,
)
from fedpax.aggregators.all_updates import reduce_coordinates, squared_distances
from fedpax.aggregators.sorting_network import sort_rows
from fedpax.experiments.benchmarks.timing import (
    CLOCKS,
    compile_for,
    interleaved,
    is_installed,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.experiments.benchmarks.workloads import WORKLOADS
from fedpax.reports.table import markdown_table

NUM_ITERATIONS = 8  # of the geometric median
NUM_BYZANTINE = 3  # with fewer, Bulyan's last selections are ties, which Flower breaks otherwise


class Row(NamedTuple):
    """An aggregation.

    Attributes:
        aggregator: the aggregator's name.
        seconds: seconds of each call.
        bound_seconds: seconds of each call of its lower bound.
        bound_ratio: seconds divided by those of the lower bound (paired).
        flower_seconds: seconds of each call of Flower's function; None without one.
        flower_ratio: these seconds divided by fedpax's (paired); None without Flower's function.
    """

    aggregator: str
    seconds: list[float]
    bound_seconds: list[float]
    bound_ratio: float
    flower_seconds: list[float] | None
    flower_ratio: float | None


def aggregations() -> dict[str, tuple[Aggregator, Callable[[Any], Any]]]:
    """Return each aggregator, and its lower bound, a function of the placed updates."""
    return {
        "coordinate_median": (coordinate_median(), _sort),
        "trimmed_mean(0.1)": (trimmed_mean(0.1), _sort),
        "krum(3)": (krum(NUM_BYZANTINE), squared_distances),
        "krum(3), 5 selected": (krum(NUM_BYZANTINE, num_selected=5), squared_distances),
        "bulyan(3)": (bulyan(NUM_BYZANTINE), lambda u: (squared_distances(u), _sort(u))),
        "geometric_median": (geometric_median(num_iterations=NUM_ITERATIONS), _means),
    }


def flower_functions() -> dict[str, Callable[[list[Any]], list[np.ndarray]]]:
    """Return Flower's functions, `[(arrays, number of examples) of each client] -> arrays`."""
    if not is_installed("flwr"):
        return {}
    module = importlib.import_module("flwr.server.strategy.aggregate")
    byzantine = NUM_BYZANTINE
    return {
        "coordinate_median": module.aggregate_median,
        "trimmed_mean(0.1)": lambda r: module.aggregate_trimmed_avg(r, 0.1),
        "krum(3)": lambda r: module.aggregate_krum(r, byzantine, 0),
        "krum(3), 5 selected": lambda r: module.aggregate_krum(r, byzantine, 5),
        "bulyan(3)": lambda r: module.aggregate_bulyan(  # removes clients from its argument
            list(r), byzantine, module.aggregate_krum, to_keep=0
        ),
    }


def measure(
    model: str, clients: int, repetitions: int, clock: str, names: Sequence[str] | None = None
) -> list[Row]:
    """Check that fedpax and Flower agree, and time interleaved calls.

    Args:
        model: a name in `WORKLOADS`: the updates have the shapes of its parameters.
        clients: number of clients.
        repetitions: number of timed calls of each function.
        clock: a name in `CLOCKS`.
        names: the aggregators. Default None: all.

    Raises:
        AssertionError: fedpax and Flower give different results.
    """
    random = np.random.default_rng(0)
    with jax.set_mesh(fedpax.make_mesh(clients=-1)):
        params = jax.eval_shape(WORKLOADS[model]().model.init, jax.random.key(0))
        updates = jax.tree.map(
            lambda p: random.standard_normal((clients, *p.shape), dtype=np.float32), params
        )
        results = [([x[i] for x in jax.tree.leaves(updates)], 1) for i in range(clients)]
        placed = jax.tree.map(jnp.asarray, updates)
        calls: dict[str, Callable[[], Any]] = {}
        peers = flower_functions()
        chosen = {n: a for n, a in aggregations().items() if names is None or n in names}
        for name, (aggregator, bound) in chosen.items():
            ours = _compiled(functools.partial(_aggregate, aggregator), clients, placed)
            calls[name] = ours
            calls[f"bound of {name}"] = _compiled(bound, clients, placed)
            if name in peers:
                theirs = calls[f"Flower's {name}"] = functools.partial(peers[name], results)
                for own, other in zip(jax.tree.leaves(ours()), theirs(), strict=True):
                    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
        seconds = interleaved(calls, (), repetitions, CLOCKS[clock])
    rows = []
    for name in chosen:
        took, bound_took = seconds[name], seconds[f"bound of {name}"]
        peer_took = seconds.get(f"Flower's {name}")
        peer_ratio = None if peer_took is None else paired_ratio(peer_took, took)
        rows.append(
            Row(name, took, bound_took, paired_ratio(took, bound_took), peer_took, peer_ratio)
        )
    return rows


def _compiled(fn: Callable[[Any], Any], clients: int, updates: chex.ArrayTree) -> Callable[[], Any]:
    """Compile a function of the placed updates as a program."""
    return functools.partial(
        compile_for(fedpax.program(clients=clients, chunk_size=1)(fn), updates).call, updates
    )


def _aggregate(aggregator: Aggregator, updates: chex.ArrayTree) -> chex.ArrayTree:
    return aggregator.aggregate(aggregator.init(None), updates, None)[0]


def _sort(updates: chex.ArrayTree) -> chex.ArrayTree:
    """Sort the clients' values of each coordinate, and return the smallest ones."""
    return reduce_coordinates(lambda x: sort_rows(x)[0], updates)


def _means(updates: chex.ArrayTree) -> chex.ArrayTree:
    """Compute the geometric median's weighted means, one after another."""

    def iterate(_: jax.Array, mean: chex.ArrayTree) -> chex.ArrayTree:
        entry = jax.tree.leaves(mean)[0].ravel()[0]  # the weights depend on the last mean
        weights = fedpax.federated_map(lambda u: 1 + entry**2, jax.tree.leaves(updates)[0])
        return fedpax.federated_mean(updates, weights)

    return jax.lax.fori_loop(0, NUM_ITERATIONS, iterate, fedpax.federated_mean(updates))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=WORKLOADS, default="cnn", help="shapes of the updates")
    parser.add_argument("--clients", type=int, default=64, help="number of clients")
    parser.add_argument("--repetitions", type=int, default=5, help="timed calls of each function")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured")
    parser.add_argument("--aggregators", help="names separated by semicolons; default: all")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    least = 4 * NUM_BYZANTINE + 3
    if options.clients < least:
        parser.error(f"--clients is {options.clients}, expected at least {least}, for Bulyan")
    names = None if options.aggregators is None else options.aggregators.split(";")
    if unknown := {*(names or ())} - {*aggregations()}:
        parser.error(
            f"unknown aggregators {sorted(unknown)}; choose from {'; '.join(aggregations())}"
        )
    sizes = (options.model, options.clients, options.repetitions, options.clock)
    rows = on_devices(1, measure, *sizes, names)
    cells = [
        [
            row.aggregator,
            f"{statistics.median(row.seconds):.3f} s",
            f"{statistics.median(row.bound_seconds):.3f} s",
            f"{row.bound_ratio:.2f}",
            "" if row.flower_seconds is None else f"{statistics.median(row.flower_seconds):.2f} s",
            "" if row.flower_ratio is None else f"{row.flower_ratio:.1f}",
        ]
        for row in rows
    ]
    titles = ["aggregator", "fedpax", "bound", "fedpax / bound", "Flower", "Flower / fedpax"]
    print(markdown_table(titles, cells))
    flower = importlib.metadata.version("flwr") if is_installed("flwr") else None
    write(options.json, rows, flower=flower, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
