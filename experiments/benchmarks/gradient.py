"""The derivative of a FedAvg round by its learning rates, against the round: time and memory.

    python -m fedpax.experiments.benchmarks.gradient --clients=64,1024

differentiates the loss after a round by the server's and the clients' learning rates. The clients'
function is rematerialized, so that nothing is stored for each of them, and temporaries are as many
for 16,384 clients as for 64. Before anything is timed, a cohort of two clients a device must give
the loss and the derivative that plain JAX gives.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedpax
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


class Row(NamedTuple):
    """A round and its derivative, at one size.

    Attributes:
        model: what the clients train.
        device: the devices' kind.
        devices: how many there are.
        clients: how many clients train.
        round_temporary_bytes: the round's temporaries on one device.
        gradient_temporary_bytes: those of the loss after it and its derivative.
        round_seconds: of each call; empty where only memory was asked for.
        gradient_seconds: of each call.
        ratio: seconds of the derivative over the round's, paired.
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


def make_round(workload: Workload, clients: int, chunk_size: Any, unroll: int) -> Any:
    """Makes `round(rates, params, batches, num_examples) -> params`.

    `rates` has the scalars `server` and `client`; `unroll` is how many of a client's steps stand
    in one turn of their loop.
    """

    @fedpax.program(clients=clients, chunk_size=chunk_size)
    def fedavg_round(rates: Any, params: Any, batches: Any, num_examples: jax.Array) -> Any:
        @jax.checkpoint
        def local_train(params: Any, rate: jax.Array, batches: Any) -> Any:
            return workload.local_train(params, batches, rate, unroll)

        at_clients = fedpax.federated_broadcast((params, rates["client"]))
        change = fedpax.federated_map(local_train, *at_clients, batches)
        mean = fedpax.federated_mean(change, weights=num_examples)
        return jax.tree.map(lambda p, m: p + rates["server"] * m, params, mean)

    return fedavg_round


def make_plain_round(workload: Workload) -> Any:
    """Makes the same round with nothing of fedpax, which stores all that the clients compute."""

    def fedavg_round(rates: Any, params: Any, batches: Any, num_examples: jax.Array) -> Any:
        def local_train(params: Any, batches: Any) -> Any:
            return workload.local_train(params, batches, rates["client"])

        moved = vmap_round(local_train, len(num_examples))(params, batches, num_examples)
        return jax.tree.map(lambda p, m: p + rates["server"] * (m - p), params, moved)

    return fedavg_round


def loss_after(workload: Workload, fedavg_round: Any) -> Any:
    """Makes the loss after a round on the first batch of the first client, for all to see."""

    def loss(rates: Any, params: Any, batches: Any, num_examples: jax.Array) -> jax.Array:
        params = fedavg_round(rates, params, batches, num_examples)
        return workload.loss(params, jax.tree.map(lambda leaf: leaf[0, 0], batches))

    return loss


def measure(
    model: str,
    devices: int,
    clients: int,
    chunk_size: Any = "auto",
    unroll: int = 1,
    repetitions: int = 5,
) -> Row:
    """Compiles a round and its derivative, and times them in turn.

    Args:
        model: a name in `WORKLOADS`.
        devices: how many of `jax.devices()` to use.
        clients: how many clients train.
        chunk_size: as in `fedpax.program`.
        unroll: as in `make_round`.
        repetitions: how often each is timed. 0 only compiles, and makes no data.

    Returns:
        The figures.

    Raises:
        AssertionError: the loss or its derivative is not that of plain JAX.
    """
    workload = WORKLOADS[model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    rates = {"server": jnp.float32(1.0), "client": jnp.float32(LEARNING_RATE)}
    fedavg_round = make_round(workload, clients, chunk_size, unroll)
    gradient = jax.value_and_grad(loss_after(workload, fedavg_round))
    with jax.set_mesh(mesh):
        types = workload.arguments(clients, mesh)
        compiled = {
            name: compile_for(fn, rates, *types)
            for name, fn in (("round", fedavg_round), ("gradient", gradient))
        }
        seconds: dict[str, list[float]] = {name: [] for name in compiled}
        if repetitions:
            few = 2 * devices
            ways = {
                "plain JAX": make_plain_round(workload),
                "fedpax": make_round(workload, few, chunk_size, unroll),
            }
            arguments = (rates, *workload.draw(few, mesh))
            check_equal(
                {
                    way: jax.jit(jax.value_and_grad(loss_after(workload, fn)))(*arguments)
                    for way, fn in ways.items()
                }
            )
            calls = {name: c.call for name, c in compiled.items()}
            seconds = interleaved(calls, (rates, *workload.draw(clients, mesh)), repetitions)
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
    """Measures as the arguments say, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="mlp")
    parser.add_argument("--clients", default="64,1024", help="sizes of the cohort")
    parser.add_argument("--devices", default="1,2", help="how many; a CPU simulates them")
    parser.add_argument("--chunk_size", default="auto", help='a number, or "auto"')
    parser.add_argument("--unroll", type=int, default=LOCAL_STEPS, help="of a client's steps")
    parser.add_argument("--repetitions", type=int, default=5, help="0 compiles, and runs nothing")
    parser.add_argument("--json", help="a file for the figures, else printed")
    options = parser.parse_args(argv)
    chunk = options.chunk_size
    chunk = chunk if chunk == "auto" else int(chunk)
    print("devices   clients  temporaries: round     gradient   median s: round   gradient   ratio")
    rows = []
    for devices in map(int, options.devices.split(",")):
        for clients in map(int, options.clients.split(",")):
            sizes = (options.model, devices, clients, chunk, options.unroll, options.repetitions)
            rows.append(on_devices(devices, measure, *sizes))
            print(describe(rows[-1]), flush=True)
    write(options.json, rows, **vars(options))
    return 0


def describe(row: Row) -> str:
    """A line of the table."""
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
