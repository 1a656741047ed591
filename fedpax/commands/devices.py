"""Provide the devices of a training command: simulated on a CPU, or of several processes."""

import dataclasses
import math
import os

import jax

from fedpax.commands.options import UsageError
from fedpax.parallel.mesh import MeshConfig
from fedpax.parallel.simulated_devices import (
    MAX_SIMULATED_DEVICES,
    provide_worker_threads,
    simulate_devices,
)


def join_processes() -> None:
    """Join the processes that train together, before JAX is asked for a device.

    Raises:
        UsageError: there are no other processes.
    """
    count, own = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    try:
        # Collectives between CPU processes need gloo; other devices bring their own.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            num_processes=int(count) if count else None, process_id=int(own) if own else None
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"--multihost found no other processes ({error}), expected those of a TPU pod, a Slurm "
            "job or the environment. Elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from None


def provide_devices(mesh: MeshConfig) -> None:
    """Simulate the devices of a mesh on a CPU, unless the environment sets their number.

    A mesh that takes all devices (-1) gets one device per core, as far as the other axes divide
    them: clients that run one after another on a device occupy one core.

    Args:
        mesh: the sizes of the mesh's axes.

    Raises:
        UsageError: there are fewer devices than the mesh needs.
    """
    sizes = dataclasses.asdict(mesh)
    takes_all = -1 in sizes.values()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    needed = max(_num_cores() // fixed, 1) * fixed if takes_all else mesh.size
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ
    chosen |= "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    # On a mesh with one axis every collective runs over all devices.
    subgroups = sum(size != 1 for size in sizes.values()) > 1
    # A mesh larger than what a CPU can simulate needs accelerators; simulating it would hang.
    too_many = needed > MAX_SIMULATED_DEVICES
    if subgroups and not too_many:
        provide_worker_threads(needed)
    if not chosen and not too_many:
        try:
            simulate_devices(needed, subgroups=subgroups)
        except RuntimeError:  # JAX is in use already, with the devices that it has
            chosen = True
    if not takes_all and jax.device_count() < mesh.size:
        axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        remedy = "Make the mesh smaller, for example with --mesh.fsdp=-1 for all available devices"
        if too_many:
            remedy += f"; a CPU can simulate {MAX_SIMULATED_DEVICES:,} devices at most"
        elif chosen:
            remedy += ", or unset XLA_FLAGS and JAX_NUM_CPU_DEVICES to simulate more"
        raise UsageError(
            f"the mesh {axes} needs {mesh.size:,} devices, but there are {jax.device_count()} "
            f"({jax.default_backend()}). {remedy}."
        )


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
