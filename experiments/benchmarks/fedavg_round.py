"""A FedAvg round with fedpax, DrJAX, `jax.vmap` and a hand-written loop: time and memory.

    python -m fedpax.experiments.benchmarks.fedavg_round --model=mlp --clients=64,1024

All must give the same result. Calls are interleaved, and a ratio is the median over repetitions.
DrJAX, of the extra `bench`, is left out if it is not installed.

`--baselines=gradient` adds the loss after fedpax's round with its gradient in the learning rates of
server and clients, which must equal the `jax.vmap` round's. The local training is rematerialized.
`--plot` draws time and memory over the number of clients.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import fedpax
from fedpax.algorithm import Params
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import (
    BATCH_SIZE,
    LEARNING_RATE,
    LOCAL_STEPS,
    Sizes,
    Workload,
)
from fedpax.primitives.placement import ChunkSize

NumExamples: TypeAlias = Float[Array, " clients"]
LocalTrain: TypeAlias = Callable[[Params, chex.ArrayTree], Params]
Round: TypeAlias = Callable[[Params, chex.ArrayTree, jax.Array], Params]
Average: TypeAlias = Callable[[LocalTrain, Any], Round]  # from the server's learning rate

GRADIENT, RATES = "gradient", {"server": 1.0, "client": LEARNING_RATE}


def fedpax_round(
    local_train: LocalTrain, clients: int, chunk_size: ChunkSize, rate: Any = 1.0
) -> Round:
    """Make the round with fedpax, with the server's learning rate."""

    @fedpax.program(clients=clients, chunk_size=chunk_size)
    def fedavg_round(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        at_clients = fedpax.federated_broadcast(params)
        update = fedpax.federated_map(local_train, at_clients, batches)
        mean = fedpax.federated_mean(update, weights=num_examples)
        return jax.tree.map(lambda p, m: p + rate * m, params, mean)

    return fedavg_round


def drjax_round(local_train: LocalTrain, clients: int) -> Round:
    """Make the round with DrJAX, which takes one array of weights per leaf."""
    import drjax

    @drjax.program(clients=clients)
    def fedavg_round(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        update = drjax.map_fn(local_train, (drjax.broadcast(params), batches))
        weights = jax.tree.map(lambda _: num_examples, update)
        return _add(params, drjax.reduce_weighted_mean(update, weights))

    return fedavg_round


def vmap_round(local_train: LocalTrain, clients: int) -> Round:
    """Make the round as one `jax.vmap` over all clients; the compiler partitions it."""

    def fedavg_round(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        update = jax.vmap(local_train, in_axes=(None, 0))(params, batches)
        share = num_examples / jnp.sum(num_examples)
        return _add(params, jax.tree.map(lambda c: jnp.tensordot(share, c, 1), update))

    return fedavg_round


def scan_round(local_train: LocalTrain, clients: int) -> Round:
    """Make the round as a loop over the clients of a device, with one all-reduce at the end.

    This is the lower limit of memory: no copies of the parameters and no client's update is stored.
    """

    def on_device(params: Params, batches: chex.ArrayTree, num_examples: NumExamples) -> Params:
        # Varying over devices: otherwise JAX sums the gradients of all clients.
        varying = jax.tree.map(lambda p: jax.lax.pcast(p, "clients", to="varying"), params)

        def add(total: Params, client: tuple[chex.ArrayTree, jax.Array]) -> tuple[Params, None]:
            batches, weight = client
            update = local_train(varying, batches)
            return jax.tree.map(lambda t, c: t + weight * c, total, update), None

        zeros = jax.tree.map(jnp.zeros_like, varying)
        total, _ = jax.lax.scan(add, zeros, (batches, num_examples))
        total, weight = jax.lax.psum((total, jnp.sum(num_examples)), "clients")
        return _add(params, jax.tree.map(lambda t: t / weight, total))

    specs = (P(), P("clients"), P("clients"))
    return jax.shard_map(on_device, in_specs=specs, out_specs=P())


def _add(params: Params, update: Params) -> Params:
    return jax.tree.map(jnp.add, params, update)


def gradient_round(
    workload: Workload, average: Average, rates: Mapping[str, float] = RATES
) -> Callable[..., Any]:
    """Make the loss after a round, on the first batch, and its gradient by the learning rates."""

    def gradient(params: Params, batches: Any, num_examples: NumExamples) -> Any:
        def loss(rates: Any) -> jax.Array:
            @jax.checkpoint
            def local_train(params: Params, batches: Any) -> Params:
                return workload.local_train(params, batches, rates["client"], LOCAL_STEPS)

            after = average(local_train, rates["server"])(params, batches, num_examples)
            return workload.loss_fn(after, jax.tree.map(lambda leaf: leaf[0, 0], batches))[0]

        return jax.value_and_grad(loss)(jax.tree.map(jnp.float32, rates))

    return gradient


def plain_average(clients: int) -> Average:
    """Make `vmap_round` with the server's learning rate."""

    def average(local_train: LocalTrain, rate: Any) -> Round:
        def fedavg_round(params: Params, *data: Any) -> Params:
            moved = vmap_round(local_train, clients)(params, *data)
            return jax.tree.map(lambda p, m: p + rate * (m - p), params, moved)

        return fedavg_round

    return average


BASELINES = {"scan": scan_round, "drjax": drjax_round, "vmap": vmap_round}
STYLES: dict[str, dict[str, Any]] = {
    "drjax": {"label": "DrJAX", "color": "#b3531d", "marker": "s"},
    "scan": {"label": "hand-written loop", "color": "#7a7a7a", "marker": "o", "markersize": 9},
    "fedpax auto": {"label": "fedpax", "color": "#1d4fb3", "marker": "o"},
}


def check_equal(results: dict[str, Any]) -> None:
    """Raise an AssertionError if a result differs from the first by more than rounding."""
    (first, expected), *rest = results.items()
    for name, result in rest:
        close: Any = {"rtol": 1e-3, "atol": 1e-4, "err_msg": f"{name} differs from {first}"}
        jax.tree.map(functools.partial(np.testing.assert_allclose, **close), result, expected)


class FedAvgRound(Sizes, Timed):
    chunk_size: list[ChunkSize] = option("auto,1", "values to run fedpax with", harness.chunk_sizes)
    baselines: list[str] = option(
        ",".join(BASELINES),
        "implementations to compare fedpax with, and gradient",
        harness.names,
        known=lambda _: [*BASELINES, GRADIENT],
    )
    local_steps: int = option(LOCAL_STEPS, "steps of a client")
    batch_size: int = option(BATCH_SIZE, "examples in a step")
    columns = (
        "devices {devices} | clients {clients:9,} | round {implementation:16} "
        "| compile s {compile_seconds:.1f} | temporaries {temporary_bytes:14,} "
        "| median s {seconds:.4f} | fedpax/this {fedpax_ratio:.3f}"
    )

    def measure(self) -> Iterator[Row]:
        if "drjax" in self.baselines and not timing.is_installed("drjax"):
            print("drjax is not installed and is left out: `pip install 'fedpax[bench]'`.")
            installed = [name for name in self.baselines if name != "drjax"]
            self = dataclasses.replace(self, baselines=installed)
        return super().measure()

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> list[Row]:
        train = workload.local_train
        rounds = {f"fedpax {k}": fedpax_round(train, clients, k) for k in self.chunk_size}
        first = next(iter(rounds))
        rounds |= {k: BASELINES[k](train, clients) for k in self.baselines if k != GRADIENT}
        gradients: dict[str, Any] = {}
        if GRADIENT in self.baselines:
            gradients["plain JAX"] = gradient_round(workload, plain_average(clients))
            gradients[GRADIENT] = gradient_round(
                workload, lambda train, rate: fedpax_round(train, clients, self.chunk_size[0], rate)
            )
        sizes = self.local_steps, self.batch_size
        types = workload.argument_types(clients, mesh, *sizes)
        measured = rounds | {k: fn for k, fn in gradients.items() if k == GRADIENT}
        compiled = {name: timing.compile_for(fn, *types) for name, fn in measured.items()}
        calls, arguments = {name: c.program for name, c in compiled.items()}, tuple[Any, ...]()
        if self.repetitions:
            # A few steps in full precision: GPUs and TPUs round the operands of matmuls, and
            # after hundreds of steps rounding alone makes the results differ.
            few = workload.random_arguments(clients, mesh, min(5, self.local_steps))
            with jax.default_matmul_precision("float32"):
                for functions in filter(None, (rounds, gradients)):
                    check_equal({name: jax.jit(fn)(*few) for name, fn in functions.items()})
            arguments = workload.random_arguments(clients, mesh, *sizes)
        seconds = self.time(calls, *arguments)
        return [
            Row(
                implementation=name,
                compile_seconds=program.compile_seconds,
                temporary_bytes=program.temporary_bytes,
                seconds=seconds[name],
                fedpax_ratio=timing.paired_ratio(seconds[first], seconds[name]),
            )
            for name, program in compiled.items()
        ]

    def draw(self, rows: list[Row]) -> Figure:
        kinds = {(row.model, row.devices) for row in rows}
        if len(kinds) != 1:
            raise ValueError(f"rows of {len(kinds)} pairs of a model and a number of devices")
        scales = {"xscale": "log", "yscale": "log", "xlabel": "clients"}
        titles = {"s": "time of a round", "B": "temporary memory of a round"}
        axes = harness.panels(*({"title": t, **scales} for t in titles.values()), size=(9, 3.4))
        for name, style in STYLES.items():
            measured = [row for row in rows if row.implementation == name]
            timed = {r.clients: statistics.median(r.seconds) for r in measured if r.seconds}
            sizes = {row.clients: row.temporary_bytes for row in measured}
            for panel, points in zip(axes, (timed, sizes), strict=True):
                if points:
                    panel.plot(*zip(*sorted(points.items()), strict=True), **style)
        for panel, unit in zip(axes, titles, strict=True):
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.yaxis.set_major_formatter(EngFormatter(unit))
        return harness.figure_of(axes, legend=1)


main = command(FedAvgRound)
