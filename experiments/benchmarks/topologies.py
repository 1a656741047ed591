"""A FedAvg round compiled for TPU pods of several sizes: collectives and memory of a device.

    python -m fedpax.experiments.benchmarks.topologies --clients_per_device=512

It needs the extra `tpu`, but no TPU. With a fixed number of clients per device, a round must have
the same collectives and the same memory per device on pods of all sizes. The command exits with
status 1 otherwise.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithms import fedavg
from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.hlo.collectives import collectives
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.planning import find_topology
from fedpax.primitives.placement import ChunkSize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    topologies: list[str] = option(
        "v5e:4x4,v5e:8x8,v5e:16x16", "pods, separated by commas", harness.names
    )
    clients_per_device: int = option(512, "clients per device")
    chunk_size: ChunkSize = option(
        "auto", 'clients that a device runs at once: a number or "auto"', harness.chunk_size
    )
    local_steps: int = option(5, "local steps of a client")
    batch_size: int = option(20, "examples in a step")


def compile_for(topology: str, settings: Settings) -> Row:
    """Compile a FedAvg round of an MLP 784-200-10 for a pod; return what one device has."""
    devices = find_topology(topology).devices
    mesh = fedpax.make_mesh(devices=devices, clients=-1)
    clients = len(devices) * settings.clients_per_device
    model = mlp(MLPConfig())
    algorithm = fedavg(
        classification_loss(model.apply),
        cohort_size=clients,
        client_optimizer=optax.sgd(0.1),
        chunk_size=settings.chunk_size,
    )

    def like(spec: P, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    state = jax.eval_shape(lambda: algorithm.init(model.init(jax.random.key(0))))
    state = jax.tree.map(lambda x: like(P(), x.dtype, *x.shape), state)
    shape = (clients, settings.local_steps, settings.batch_size)
    batches = {
        "image": like(P("clients"), jnp.float32, *shape, 784),
        "label": like(P("clients"), jnp.int32, *shape),
    }
    num_examples: Any = like(P("clients"), jnp.float32, clients)
    cohort = fedpax.Cohort(batches, num_examples)
    with jax.set_mesh(mesh):
        compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
    exchanges = collectives(compiled.as_text() or "", mesh)
    memory: Any = compiled.memory_analysis()
    return Row(
        topology=topology,
        devices=len(devices),
        clients=clients,
        # For each its kind, the shapes of its operands, and whether it is in a loop.
        collectives=sorted((c.kind, c.shapes, c.in_loop) for c in exchanges),
        collective_bytes=sum(c.bytes * (c.executions or 0) for c in exchanges),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


def measure(settings: Settings) -> Iterator[Row]:
    """Compile for each pod, and compare each device with the first pod's."""
    first = None
    for topology in settings.topologies:
        row = compile_for(topology, settings)
        device = row.collectives, row.collective_bytes, row.argument_bytes, row.temporary_bytes
        first = first or device
        row.same = device == first
        yield row


def conclude(settings: Settings, rows: list[Row]) -> str:
    """Say whether the pods agree."""
    same = all(row.same for row in rows)
    return "All pods have the same collectives and memory." if same else "The pods differ."


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "topology": "{topology:9}",
        "devices": "{devices:,}",
        "clients": "{clients:10,}",
        "collectives": lambda row: str(len(row.collectives)),
        "their bytes": "{collective_bytes:,}",
        "arguments": "{argument_bytes:12,}",
        "temporaries": "{temporary_bytes:,}",
    },
    conclude,
    required="same",
)


if __name__ == "__main__":
    raise SystemExit(main())
