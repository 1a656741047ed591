"""The gradient of a FedAvg round with respect to its learning rates: time and memory.

    python -m fedpax.experiments.benchmarks.gradient --clients=64,1024

The loss after a round is differentiated with respect to the server's and the clients' learning
rates. The local training is rematerialized: no residuals are stored per client, and 16,384 clients
need the same temporaries as 64. Before anything is timed, the loss and the gradient of a cohort of
two clients per device are compared with plain JAX.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import fedpax
from fedpax.algorithm import Params
from fedpax.experiments.benchmarks.arguments import chunk_size, integers
from fedpax.experiments.benchmarks.fedavg_round import check_equal
from fedpax.experiments.benchmarks.rounds import vmap_round
from fedpax.experiments.benchmarks.timing import (
    compile_for,
    interleaved,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.experiments.benchmarks.workloads import (
    LEARNING_RATE,
    LOCAL_STEPS,
    WORKLOADS,
    Workload,
)
from fedpax.primitives.placement import ChunkSize

Rates: TypeAlias = dict[str, jax.Array]
"""The scalar learning rates `"server"` and `"client"`."""

DifferentiableRound: TypeAlias = Callable[[Rates, Params, chex.ArrayTree, jax.Array], Params]
"""A round `(rates, params, batches, num_examples) -> params`."""


class Row(NamedTuple):
    """A round and its gradient, at one size.

    Attributes:
        model: the clients' model.
        device: kind of the devices.
        devices: number of devices.
        clients: number of clients.
        round_temporary_bytes: bytes of the round's temporaries on one device.
        gradient_temporary_bytes: bytes of temporaries of the loss after the round and its gradient,
            on one device.
        round_seconds: seconds of each call of the round; empty without repetitions.
        gradient_seconds: seconds of each call of the loss and its gradient.
        ratio: seconds of the gradient divided by the seconds of the round (paired); None without
            repetitions.
    """

    model: str
    device: str
    devices: int
    clients: int
    round_temporary_bytes: int
    gradient_temporary_bytes: int
    round_seconds: list[float]
    gradient_seconds: list[float]
    ratio: float | None


def make_round(
    workload: Workload, clients: int, chunk_size: ChunkSize, unroll: int
) -> DifferentiableRound:
    """Make the round as a fedpax program.

    Args:
        workload: the clients' model and local training.
        clients: number of clients.
        chunk_size: number of clients that a device runs at once, as in `fedpax.program`.
        unroll: local steps per iteration of a client's loop.
    """

    @fedpax.program(clients=clients, chunk_size=chunk_size)
    def fedavg_round(
        rates: Rates,
        params: Params,
        batches: chex.ArrayTree,
        num_examples: Float[Array, " clients"],
    ) -> Params:
        @jax.checkpoint
        def local_train(params: Params, rate: jax.Array, batches: chex.ArrayTree) -> Params:
            return workload.local_train(params, batches, rate, unroll)

        at_clients = fedpax.federated_broadcast((params, rates["client"]))
        change = fedpax.federated_map(local_train, *at_clients, batches)
        mean = fedpax.federated_mean(change, weights=num_examples)
        return jax.tree.map(lambda p, m: p + rates["server"] * m, params, mean)

    return fedavg_round


def make_plain_round(workload: Workload) -> DifferentiableRound:
    """Make the same round in plain JAX, which stores the residuals of all clients."""

    def fedavg_round(
        rates: Rates,
        params: Params,
        batches: chex.ArrayTree,
        num_examples: Float[Array, " clients"],
    ) -> Params:
        def local_train(params: Params, batches: chex.ArrayTree) -> Params:
            return workload.local_train(params, batches, rates["client"])

        moved = vmap_round(local_train, len(num_examples))(params, batches, num_examples)
        return jax.tree.map(lambda p, m: p + rates["server"] * (m - p), params, moved)

    return fedavg_round


def loss_after(
    workload: Workload, fedavg_round: DifferentiableRound
) -> Callable[[Rates, Params, chex.ArrayTree, jax.Array], jax.Array]:
    """Make the loss of the model after a round, on the first batch of the first client."""

    def loss(
        rates: Rates, params: Params, batches: chex.ArrayTree, num_examples: jax.Array
    ) -> Float[Array, ""]:
        params = fedavg_round(rates, params, batches, num_examples)
        return workload.loss(params, jax.tree.map(lambda leaf: leaf[0, 0], batches))

    return loss


def measure(
    model: str,
    devices: int,
    clients: int,
    chunk_size: ChunkSize = "auto",
    unroll: int = 1,
    repetitions: int = 5,
) -> Row:
    """Compile a round and its gradient, and time interleaved calls of both.

    Args:
        model: a name in `WORKLOADS`.
        devices: number of `jax.devices()` to use.
        clients: number of clients.
        chunk_size: as in `make_round`.
        unroll: as in `make_round`.
        repetitions: number of timed calls of each. 0: compile only, without data.

    Returns:
        The measurements.

    Raises:
        AssertionError: the loss or its gradient differs from plain JAX's.
    """
    workload = WORKLOADS[model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    rates = {"server": jnp.float32(1.0), "client": jnp.float32(LEARNING_RATE)}
    fedavg_round = make_round(workload, clients, chunk_size, unroll)
    gradient = jax.value_and_grad(loss_after(workload, fedavg_round))
    with jax.set_mesh(mesh):
        types = workload.argument_types(clients, mesh)
        compiled = {
            name: compile_for(fn, rates, *types)
            for name, fn in (("round", fedavg_round), ("gradient", gradient))
        }
        seconds: dict[str, list[float]] = {name: [] for name in compiled}
        if repetitions:
            few = 2 * devices
            implementations = {
                "plain JAX": make_plain_round(workload),
                "fedpax": make_round(workload, few, chunk_size, unroll),
            }
            arguments = (rates, *workload.random_arguments(few, mesh))
            check_equal(
                {
                    name: jax.jit(jax.value_and_grad(loss_after(workload, fn)))(*arguments)
                    for name, fn in implementations.items()
                }
            )
            calls = {name: c.call for name, c in compiled.items()}
            seconds = interleaved(
                calls, (rates, *workload.random_arguments(clients, mesh)), repetitions
            )
    return Row(
        model,
        jax.devices()[0].device_kind,
        devices,
        clients,
        compiled["round"].temporary_bytes,
        compiled["gradient"].temporary_bytes,
        seconds["round"],
        seconds["gradient"],
        paired_ratio(seconds["gradient"], seconds["round"]) if repetitions else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="the clients' model")
    parser.add_argument(
        "--clients",
        type=integers,
        default="64,1024",
        help="numbers of clients in the round, separated by commas",
    )
    parser.add_argument(
        "--devices",
        type=integers,
        default="1,2",
        help="numbers of devices, separated by commas; simulated on a CPU",
    )
    parser.add_argument(
        "--chunk_size",
        type=chunk_size,
        default="auto",
        help='clients that a device runs at once: a number or "auto"',
    )
    parser.add_argument(
        "--unroll", type=int, default=LOCAL_STEPS, help="local steps per loop iteration"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="timed calls of each; 0: compile only"
    )
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    chunk = options.chunk_size
    print("devices   clients  temporaries: round     gradient   median s: round   gradient   ratio")
    rows = []
    for devices in options.devices:
        for clients in options.clients:
            sizes = (options.model, devices, clients, chunk, options.unroll, options.repetitions)
            rows.append(on_devices(devices, measure, *sizes))
            print(describe(rows[-1]), flush=True)
    write(options.json, rows, **vars(options))
    return 0


def describe(row: Row) -> str:
    """Format a row as a line of the table."""
    timed = ""
    if row.ratio is not None:
        medians = map(statistics.median, (row.round_seconds, row.gradient_seconds))
        timed = "{:18.4f} {:10.4f} {:7.2f}".format(*medians, row.ratio)
    return (
        f"{row.devices:7} {row.clients:9,} {row.round_temporary_bytes:19,} "
        f"{row.gradient_temporary_bytes:12,}{timed}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
