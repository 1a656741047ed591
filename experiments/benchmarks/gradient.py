"""The gradient of a FedAvg round with respect to its learning rates: time and memory.

    python -m fedpax.experiments.benchmarks.gradient --clients=64,1024

The loss after a round is differentiated with respect to the server's and the clients' learning
rates. The local training is rematerialized: no residuals are stored per client, and 16,384 clients
need the same temporaries as 64. Before anything is timed, the loss and the gradient of a cohort of
two clients per device are compared with plain JAX.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.fedavg_round import check_equal, fedpax_round, vmap_round
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import (
    LEARNING_RATE,
    LOCAL_STEPS,
    Sizes,
    Workload,
)
from fedpax.primitives.placement import ChunkSize

DifferentiableRound = Callable[[Any, Any, Any, jax.Array], Any]  # (rates, params, data, weights)


def make_round(workload: Workload, chunk_size: ChunkSize, unroll: int) -> DifferentiableRound:
    """Make the round with fedpax, with `unroll` local steps per iteration of a loop."""

    def fedavg_round(rates: Any, params: Any, batches: Any, num_examples: jax.Array) -> Any:
        @jax.checkpoint
        def local_train(params: Any, batches: Any) -> Any:
            return workload.local_train(params, batches, rates["client"], unroll)

        average = fedpax_round(local_train, len(num_examples), chunk_size, rates["server"])
        return average(params, batches, num_examples)

    return fedavg_round


def make_plain_round(workload: Workload) -> DifferentiableRound:
    """Make the same round in plain JAX, which stores the residuals of all clients."""

    def fedavg_round(rates: Any, params: Any, batches: Any, num_examples: jax.Array) -> Any:
        def local_train(params: Any, batches: Any) -> Any:
            return workload.local_train(params, batches, rates["client"])

        moved = vmap_round(local_train, len(num_examples))(params, batches, num_examples)
        return jax.tree.map(lambda p, m: p + rates["server"] * (m - p), params, moved)

    return fedavg_round


def loss_after(workload: Workload, fedavg_round: DifferentiableRound) -> Callable[..., jax.Array]:
    """Make the loss of the model after a round, on the first batch of the first client."""

    def loss(rates: Any, params: Any, batches: Any, num_examples: jax.Array) -> jax.Array:
        params = fedavg_round(rates, params, batches, num_examples)
        return workload.loss_fn(params, jax.tree.map(lambda leaf: leaf[0, 0], batches))[0]

    return loss


class Gradient(Sizes, Timed):
    chunk_size: ChunkSize = option(
        "auto", 'clients that a device runs at once: a number or "auto"', harness.chunk_size
    )
    unroll: int = option(LOCAL_STEPS, "local steps per loop iteration")
    columns = (
        "devices {devices} | clients {clients:9,} | temporaries: round {round_temporary_bytes:,} "
        "| gradient {gradient_temporary_bytes:14,} | median s: round {round_seconds:.4f} "
        "| gradient, s {gradient_seconds:.4f} | ratio {ratio:.2f}"
    )

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> list[Row]:
        rates = {"server": jnp.float32(1.0), "client": jnp.float32(LEARNING_RATE)}
        fedavg_round = make_round(workload, self.chunk_size, self.unroll)
        gradient = jax.value_and_grad(loss_after(workload, fedavg_round))
        types, arguments = workload.argument_types(clients, mesh), tuple[Any, ...]()
        compiled = {
            name: timing.compile_for(fn, rates, *types)
            for name, fn in (("round", fedavg_round), ("gradient", gradient))
        }
        if self.repetitions:
            plain = jax.value_and_grad(loss_after(workload, make_plain_round(workload)))
            few = workload.random_arguments(2 * mesh.size, mesh)
            functions = {"plain JAX": plain, "fedpax": gradient}
            check_equal({name: jax.jit(fn)(rates, *few) for name, fn in functions.items()})
            arguments = (rates, *workload.random_arguments(clients, mesh))
        seconds = self.time({name: c.program for name, c in compiled.items()}, *arguments)
        return [
            Row(
                ratio=timing.paired_ratio(seconds["gradient"], seconds["round"]),
                **{f"{name}_temporary_bytes": c.temporary_bytes for name, c in compiled.items()},
                **{f"{name}_seconds": taken for name, taken in seconds.items()},
            )
        ]


main = command(Gradient)
