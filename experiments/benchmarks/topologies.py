"""The same round on TPU pods of several sizes, compiled ahead of time: what crosses, what is held.

    python -m fedpax.experiments.benchmarks.topologies --clients_per_device=512

needs the `tpu` extra and no TPU. With the clients of a device fixed, a round must have the same
collectives and the same bytes on each device whatever the pod's size; the command fails otherwise.
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
from fedpax.experiments.benchmarks.timing import write
from fedpax.hlo.collectives import collectives
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.planning import find_topology


class Compiled(NamedTuple):
    """What one device does and holds in a round.

    Attributes:
        topology: the pod.
        devices: how many it has.
        clients: how many clients train on them.
        collectives: kind, operand's shapes and whether in a loop, of each.
        collective_bytes: bytes that the device hands to them in a round.
        argument_bytes: bytes of the arguments on the device.
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
    topology: str, *, clients_per_device: int, chunk_size: Any, local_steps: int, batch: int
) -> Compiled:
    """Compiles a FedAvg round of an MLP 784-200-10 for a pod.

    Args:
        topology: such as `v5e:4x4`, as in `find_topology`.
        clients_per_device: clients that train on a device.
        chunk_size: how many of them at once, or "auto".
        local_steps: steps of a client.
        batch: examples in a step.

    Returns:
        What is to be read from the compiled program.
    """
    devices = find_topology(topology).devices
    mesh = fedpax.make_mesh(devices=devices, clients=-1)
    clients = len(devices) * clients_per_device
    model = mlp(MLPConfig())
    method = fedavg(
        classification_loss(model.apply),
        clients=clients,
        client_optimizer=optax.sgd(0.1),
        chunk_size=chunk_size,
    )

    def like(spec: P, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    state = jax.eval_shape(lambda: method.init(model.init(jax.random.key(0))))
    state = jax.tree.map(lambda x: like(P(), x.dtype, *x.shape), state)
    rows = (clients, local_steps, batch)
    batches = {
        "image": like(P("clients"), jnp.float32, *rows, 784),
        "label": like(P("clients"), jnp.int32, *rows),
    }
    with jax.set_mesh(mesh):
        weights = like(P("clients"), jnp.float32, clients)
        compiled = jax.jit(method.round, donate_argnums=0).lower(state, batches, weights).compile()
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
    """Compiles for each pod and prints a table; fails where pods differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topologies", default="v5e:4x4,v5e:8x8,v5e:16x16")
    parser.add_argument("--clients_per_device", type=int, default=512)
    parser.add_argument("--chunk_size", default="auto", help='a number, or "auto"')
    parser.add_argument("--local_steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--json", help="a file for the figures, else printed")
    settings = vars(parser.parse_args(argv))
    options = dict(settings)
    pods, path = options.pop("topologies").split(","), options.pop("json")
    if options["chunk_size"] != "auto":
        options["chunk_size"] = int(options["chunk_size"])
    rows = [compile_for(pod, **options) for pod in pods]
    print("topology  devices    clients  collectives  bytes in them  arguments  temporaries")
    for r in rows:
        print(
            f"{r.topology:8}  {r.devices:7,}  {r.clients:9,}  {len(r.collectives):11}  "
            f"{r.collective_bytes:13,}  {r.argument_bytes:9,}  {r.temporary_bytes:11,}"
        )
    same = {r[3:] for r in rows}
    print("The same on every pod." if len(same) == 1 else "These differ between pods.")
    write(path, rows, **settings)
    return 0 if len(same) == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
