"""The mesh of an experiment with clients: the largest axis of devices that divides the cohort."""

import dataclasses
from typing import Protocol

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.errors import ArgumentError
from fedpax.experiments.cohort_settings import CohortConfig
from fedpax.parallel.mesh import MeshConfig, MeshSizeError, available_devices
from fedpax.parallel.mesh_rule import ShardedSize


class _WithCohort(Protocol):
    """The fields that `OnClientsMesh` reads."""

    @property
    def cohort(self) -> CohortConfig: ...
    @property
    def mesh(self) -> MeshConfig: ...


class OnClientsMesh:
    """An experiment with the fields `cohort` and `mesh`."""

    def sharded_sizes(self: _WithCohort) -> list[ShardedSize]:
        """Return the size that the axis of clients divides."""
        return [ShardedSize("cohort.size", self.cohort.size, ("clients",))]

    def make_mesh(self: _WithCohort) -> Mesh:
        """Make the mesh of the largest number of devices that divides the cohort."""
        return clients_mesh(self.mesh, self.cohort.size)


def over_clients(mesh: Mesh) -> NamedSharding:
    """Return the sharding of cohorts over a mesh."""
    return NamedSharding(mesh, PartitionSpec("clients" if "clients" in mesh.axis_names else None))


def clients_mesh(mesh: MeshConfig, cohort_size: int) -> Mesh:
    """Make a mesh whose axis of clients divides the cohort, with equal parts of all processes."""
    devices = available_devices()
    processes = sorted({device.process_index for device in devices})
    sizes = resolve_clients_axis(mesh, cohort_size, len(processes))
    if sizes.size % len(processes):
        rest = dataclasses.replace(mesh, clients=1).size
        raise MeshSizeError(
            f"{len(processes)} processes cannot share --cohort.size={cohort_size} clients equally. "
            f"Set --cohort.size={len(devices) // rest} for all {len(devices)} devices."
        )
    each = sizes.size // len(processes)
    return sizes.make(
        [
            device
            for process in processes
            for device in [d for d in devices if d.process_index == process][:each]
        ]
    )


def resolve_clients_axis(mesh: MeshConfig, cohort_size: int, processes: int = 1) -> MeshConfig:
    """Replace `clients=-1`, or no size, by the largest one that divides cohort and fits devices."""
    if mesh.clients not in (None, -1):
        if cohort_size % mesh.clients:
            raise ArgumentError(
                f"--mesh.clients={mesh.clients} does not divide --cohort.size={cohort_size}. Set "
                f"--cohort.size to a multiple of {mesh.clients}, or --mesh.clients=-1 for the "
                "largest axis that divides the cohort."
            )
        return mesh
    rest = dataclasses.replace(mesh, clients=1).size
    available = max(len(available_devices()) // rest, 1)
    sizes = [d for d in range(1, available + 1) if cohort_size % d == 0]
    even = [d for d in sizes if d * rest % processes == 0]
    return dataclasses.replace(mesh, clients=max(even or sizes))
