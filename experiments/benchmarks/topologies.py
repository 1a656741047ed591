"""A FedAvg round compiled for TPU pods of several sizes: collectives and memory of a device.

    python -m fedpax.experiments.benchmarks.topologies --clients_per_device=512

It needs the extra `tpu`, but no TPU. With a fixed number of clients per device, a round must have
the same collectives and the same memory per device on pods of all sizes. The command exits with
status 1 otherwise.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithms import fedavg
from fedpax.experiments.benchmarks.arguments import chunk_size
from fedpax.experiments.benchmarks.timing import write
from fedpax.hlo.collectives import collectives
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.planning import find_topology
from fedpax.primitives.placement import ChunkSize


class Compiled(NamedTuple):
    """Collectives and memory of one device in a round.

    Attributes:
        topology: the pod.
        devices: number of devices.
        clients: number of clients on all devices.
        collectives: for each collective its kind, the shapes of its operands, and whether it is in
            a loop.
        collective_bytes: bytes of the collectives' operands on the device, per round.
        argument_bytes: bytes of the round's arguments on the device.
        temporary_bytes: bytes of temporaries on the device.
    """

    topology: str
    devices: int
    clients: int
    collectives: tuple[tuple[str, tuple[str, ...], bool], ...]
    collective_bytes: int
    argument_bytes: int
    temporary_bytes: int


def compile_for(
    topology: str,
    *,
    clients_per_device: int,
    chunk_size: ChunkSize,
    local_steps: int,
    batch_size: int,
) -> Compiled:
    """Compile a FedAvg round of an MLP 784-200-10 for a pod.

    Args:
        topology: the pod, such as `v5e:4x4`; see `find_topology`.
        clients_per_device: number of clients per device.
        chunk_size: number of clients that a device runs at once, or "auto".
        local_steps: local steps of a client.
        batch_size: examples in a step.

    Returns:
        The collectives and the memory of a device.
    """
    devices = find_topology(topology).devices
    mesh = fedpax.make_mesh(devices=devices, clients=-1)
    clients = len(devices) * clients_per_device
    model = mlp(MLPConfig())
    algorithm = fedavg(
        classification_loss(model.apply),
        cohort_size=clients,
        client_optimizer=optax.sgd(0.1),
        chunk_size=chunk_size,
    )

    def like(spec: P, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    state = jax.eval_shape(lambda: algorithm.init(model.init(jax.random.key(0))))
    state = jax.tree.map(lambda x: like(P(), x.dtype, *x.shape), state)
    shape = (clients, local_steps, batch_size)
    batches = {
        "image": like(P("clients"), jnp.float32, *shape, 784),
        "label": like(P("clients"), jnp.int32, *shape),
    }
    num_examples: Any = like(P("clients"), jnp.float32, clients)
    cohort = fedpax.Cohort(batches, num_examples)
    with jax.set_mesh(mesh):
        compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
    found = collectives(compiled.as_text() or "", mesh)
    memory: Any = compiled.memory_analysis()
    return Compiled(
        topology,
        len(devices),
        clients,
        tuple(sorted((c.kind, c.shapes, c.in_loop) for c in found)),
        sum(c.bytes * (c.executions or 0) for c in found),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compile for each pod and print a table; return 1 if the pods differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--topologies", default="v5e:4x4,v5e:8x8,v5e:16x16", help="pods, separated by commas"
    )
    parser.add_argument("--clients_per_device", type=int, default=512, help="clients per device")
    parser.add_argument(
        "--chunk_size",
        type=chunk_size,
        default="auto",
        help='clients that a device runs at once: a number or "auto"',
    )
    parser.add_argument("--local_steps", type=int, default=5, help="local steps of a client")
    parser.add_argument("--batch_size", type=int, default=20, help="examples in a step")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    settings = vars(parser.parse_args(argv))
    options = dict(settings)
    pods, path = options.pop("topologies").split(","), options.pop("json")
    rows = [compile_for(pod, **options) for pod in pods]
    print("topology  devices    clients  collectives  their bytes  arguments  temporaries")
    for r in rows:
        print(
            f"{r.topology:8}  {r.devices:7,}  {r.clients:9,}  {len(r.collectives):11}  "
            f"{r.collective_bytes:11,}  {r.argument_bytes:9,}  {r.temporary_bytes:11,}"
        )
    same = {r[3:] for r in rows}
    print(
        "All pods have the same collectives and memory." if len(same) == 1 else "The pods differ."
    )
    write(path, rows, **settings)
    return 0 if len(same) == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
