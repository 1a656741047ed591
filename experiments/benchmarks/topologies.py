"""A FedAvg round compiled for TPU pods of several sizes: collectives and memory of a device.

    python -m fedpax.experiments.benchmarks.topologies --clients_per_device=512

It needs the extra `tpu`, but no TPU. With a fixed number of clients per device, a round must have
the same collectives and the same memory per device on pods of all sizes. The command exits with
status 1 otherwise.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import WORKLOADS
from fedpax.hlo.collectives import collectives
from fedpax.planning import find_topology
from fedpax.primitives.placement import ChunkSize
from fedpax.training.compiled_round import with_shardings


class Topologies(Benchmark):
    topologies: list[str] = option("v5e:4x4,v5e:8x8,v5e:16x16", "pods", harness.names)
    clients_per_device: int = option(512, "clients per device")
    chunk_size: ChunkSize = option(
        "auto", 'clients that a device runs at once: a number or "auto"', harness.chunk_size
    )
    local_steps: int = option(5, "local steps of a client")
    batch_size: int = option(20, "examples in a step")
    columns = (
        "topology {topology:9} | devices {devices:,} | clients {clients:10,} "
        "| collectives {num_collectives} | their bytes {collective_bytes:,} "
        "| arguments {argument_bytes:12,} | temporaries {temporary_bytes:,}"
    )

    def measure(self) -> Iterator[Row]:
        first = None
        for topology in self.topologies:
            row = compile_for(topology, self)
            device = row.collectives, row.collective_bytes, row.argument_bytes, row.temporary_bytes
            first = first or device
            row.met = device == first
            yield row

    def summary(self, rows: list[Row]) -> str:
        same = all(row.met for row in rows)
        return "All pods have the same collectives and memory." if same else "The pods differ."


def compile_for(topology: str, sizes: Topologies) -> Row:
    """Compile a FedAvg round of an MLP 784-200-10 for a pod; return what one device has."""
    devices, workload = find_topology(topology).devices, WORKLOADS["mlp"]()
    mesh = fedpax.make_mesh(devices=devices, clients=-1)
    clients = len(devices) * sizes.clients_per_device
    algorithm = workload.fedavg(clients, chunk_size=sizes.chunk_size)
    types: Any = workload.argument_types(clients, mesh, sizes.local_steps, sizes.batch_size)
    params, *cohort_types = types
    state = jax.eval_shape(algorithm.init, params)
    state = with_shardings(state, jax.tree.map(lambda _: NamedSharding(mesh, P()), state))
    cohort = fedpax.Cohort(*cohort_types)
    with jax.set_mesh(mesh):
        compiled = jax.jit(algorithm.round, donate_argnums=0).lower(state, cohort).compile()
    exchanges = collectives(compiled.as_text() or "", mesh)
    memory: Any = compiled.memory_analysis()
    return Row(
        topology=topology,
        devices=len(devices),
        clients=clients,
        num_collectives=len(exchanges),
        # For each its kind, the shapes of its operands, and whether it is in a loop.
        collectives=sorted((c.kind, c.shapes, c.in_loop) for c in exchanges),
        collective_bytes=sum(c.bytes * (c.executions or 0) for c in exchanges),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


main = command(Topologies)
