"""The gradient of a FedAvg round with respect to its learning rates: time and memory.

    python -m fedpax.experiments.benchmarks.gradient --clients=64,1024

The loss after a round is differentiated with respect to the server's and the clients' learning
rates. The local training is rematerialized: no residuals are stored per client, and 16,384 clients
need the same temporaries as 64. Before anything is timed, the loss and the gradient of a cohort of
two clients per device are compared with plain JAX.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import fedpax
from fedpax.algorithm import Params
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.fedavg_round import check_equal
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, option
from fedpax.experiments.benchmarks.rounds import vmap_round
from fedpax.experiments.benchmarks.workloads import (
    LEARNING_RATE,
    LOCAL_STEPS,
    WORKLOADS,
    Sizes,
    Workload,
)
from fedpax.primitives.placement import ChunkSize

Rates: TypeAlias = dict[str, jax.Array]
"""The scalar learning rates `"server"` and `"client"`."""

DifferentiableRound: TypeAlias = Callable[[Rates, Params, chex.ArrayTree, jax.Array], Params]
"""A round `(rates, params, batches, num_examples) -> params`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Sizes, Timed):
    """The options."""

    chunk_size: ChunkSize = option(
        "auto", 'clients that a device runs at once: a number or "auto"', harness.chunk_size
    )
    unroll: int = option(LOCAL_STEPS, "local steps per loop iteration")


def make_round(
    workload: Workload, clients: int, chunk_size: ChunkSize, unroll: int
) -> DifferentiableRound:
    """Make the round as a fedpax program, with `unroll` local steps per iteration of a loop."""

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


def loss_after(workload: Workload, fedavg_round: DifferentiableRound) -> Callable[..., jax.Array]:
    """Make the loss of the model after a round, on the first batch of the first client."""

    def loss(
        rates: Rates, params: Params, batches: chex.ArrayTree, num_examples: jax.Array
    ) -> Float[Array, ""]:
        params = fedavg_round(rates, params, batches, num_examples)
        return workload.loss(params, jax.tree.map(lambda leaf: leaf[0, 0], batches))

    return loss


def measure(settings: Settings, devices: int, clients: int) -> list[Row]:
    """Compile a round and its gradient, compare it with plain JAX, and time interleaved calls."""
    workload = WORKLOADS[settings.model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    rates = {"server": jnp.float32(1.0), "client": jnp.float32(LEARNING_RATE)}
    options = settings.chunk_size, settings.unroll
    fedavg_round = make_round(workload, clients, *options)
    gradient = jax.value_and_grad(loss_after(workload, fedavg_round))
    with jax.set_mesh(mesh):
        types = workload.argument_types(clients, mesh)
        round_program = timing.compile_for(fedavg_round, rates, *types)
        gradient_program = timing.compile_for(gradient, rates, *types)
        arguments: Any = ()
        if settings.repetitions:
            few = 2 * devices
            arguments = (rates, *workload.random_arguments(few, mesh))
            implementations = {
                "plain JAX": make_plain_round(workload),
                "fedpax": make_round(workload, few, *options),
            }
            check_equal(
                {
                    name: jax.jit(jax.value_and_grad(loss_after(workload, fn)))(*arguments)
                    for name, fn in implementations.items()
                }
            )
            arguments = (rates, *workload.random_arguments(clients, mesh))
        calls = {"round": round_program.call, "gradient": gradient_program.call}
        seconds = timing.interleaved(calls, arguments, settings.repetitions, settings.clock)
    row = Row(
        model=settings.model,
        device=jax.devices()[0].device_kind,
        devices=devices,
        clients=clients,
        round_temporary_bytes=round_program.temporary_bytes,
        gradient_temporary_bytes=gradient_program.temporary_bytes,
        round_seconds=seconds["round"],
        gradient_seconds=seconds["gradient"],
        ratio=timing.paired_ratio(seconds["gradient"], seconds["round"]),
    )
    return [row]


main = Benchmark(
    __doc__,
    Settings,
    lambda settings: settings.measure_each(measure),
    {
        "devices": "{devices}",
        "clients": "{clients:9,}",
        "temporaries: round": "{round_temporary_bytes:,}",
        "gradient": "{gradient_temporary_bytes:14,}",
        "median s: round": "{round_seconds:.4f}",
        "gradient ": "{gradient_seconds:.4f}",
        "ratio": "{ratio:.2f}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
