"""Provide the devices of a training command, simulated on a CPU where there are no others."""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from fedpax.errors import UsageError
from fedpax.parallel.mesh import MeshConfig, MeshSizeError
from fedpax.parallel.mesh_rule import ShardedSize, follow, simulated_count
from fedpax.parallel.simulated_devices import (
    MAX_SIMULATED_DEVICES,
    provide_worker_threads,
    simulate_devices,
)


def skip_absent_tpus() -> None:
    """Let JAX use the CPU at once where libtpu is installed and there is neither TPU nor GPU."""
    # libtpu serves plans there. The search for its TPUs takes a second and prints warnings and
    # errors. `JAX_PLATFORMS` or `JAX_FORCE_TPU_INIT` in the environment ask for that search.
    asked = jax.config.values["jax_platforms"] or "JAX_FORCE_TPU_INIT" in os.environ
    if asked or importlib.util.find_spec("libtpu") is None:
        return
    other_devices = importlib.metadata.entry_points(group="jax_plugins")
    if not other_devices and not has_tpu(Path("/")):
        jax.config.update("jax_platforms", "cpu")


def has_tpu(root: Path) -> bool:
    """Return whether the machine may have a TPU: a device file, or a PCI device of Google."""
    # Google's virtual disks and network cards, which every machine of its cloud has, are left out.
    if list(root.glob("dev/accel*")) or list(root.glob("dev/vfio/[0-9]*")):
        return True
    storage_or_network = ("0x01", "0x02")  # classes of the PCI standard
    for device in root.glob("sys/bus/pci/devices/*"):
        with contextlib.suppress(OSError):
            is_google = (device / "vendor").read_text().strip() == "0x1ae0"
            if is_google and not (device / "class").read_text().startswith(storage_or_network):
                return True
    return False


def provide_devices(
    mesh: MeshConfig, sharded: Sequence[ShardedSize] = (), num_processes: int = 1
) -> None:
    """Simulate the devices of a mesh on a CPU, unless the environment sets their number.

    `fedpax.parallel.mesh_rule.simulated_count` tells how many. Several processes simulate the same
    number of devices each.
    """
    skip_absent_tpus()
    sizes = mesh.stated
    takes_all = -1 in sizes.values()
    needed = simulated_count(mesh, sharded, num_cores())
    requested = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    forced = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or forced is not None
    # Simulating more devices than a CPU can hangs. A larger mesh needs accelerators.
    too_many = needed > MAX_SIMULATED_DEVICES
    if requested.isdecimal() and int(requested) > MAX_SIMULATED_DEVICES:
        raise UsageError(
            f"JAX_NUM_CPU_DEVICES={requested}: expected at most {MAX_SIMULATED_DEVICES:,}, which a "
            "CPU can simulate. Set a smaller number, or unset it to simulate what the mesh needs."
        )
    count = math.ceil(needed / num_processes)
    if chosen and (number := requested or (forced and forced[1])) and number.isdecimal():
        count = int(number)
    # On a mesh with one axis every collective runs over all devices.
    subgroups = _num_axes(mesh, sharded, count * num_processes) > 1
    if subgroups and not too_many:
        provide_worker_threads(count)
    in_use = False
    if not chosen and not too_many:
        try:
            simulate_devices(count, subgroups=subgroups)
        except RuntimeError:  # JAX is in use already, with the devices that it has
            in_use = True
    try:
        available = jax.device_count()
    except (RuntimeError, AssertionError) as error:  # an assertion, without a plugin for cuda
        reason = str(error) or f"JAX_PLATFORMS={jax.config.values['jax_platforms']} has none here"
        raise UsageError(
            f"JAX cannot use its devices ({reason}), expected the devices of JAX_PLATFORMS. "
            "Correct or unset JAX_PLATFORMS; `fedpax doctor` shows what JAX finds without it."
        ) from error
    if not takes_all and available < mesh.size:
        axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        remedy = "Make the mesh smaller, for example with --mesh.fsdp=-1 for all available devices"
        if too_many:
            remedy += f"; a CPU can simulate {MAX_SIMULATED_DEVICES:,} devices at most"
        elif chosen:
            remedy += ", or unset XLA_FLAGS and JAX_NUM_CPU_DEVICES to simulate more"
        elif in_use and jax.default_backend() == "cpu":
            remedy += (
                f", or start Python with JAX_NUM_CPU_DEVICES={mesh.size} to simulate more: this "
                "process has used JAX already, so that their number is fixed. If the experiment's "
                "file uses JAX when it is imported, use NumPy there"
            )
        raise UsageError(
            f"the mesh {axes} needs {mesh.size:,} devices, but there are {available} "
            f"({jax.default_backend()}). {remedy}."
        )


def _num_axes(mesh: MeshConfig, sharded: Sequence[ShardedSize], num_devices: int) -> int:
    """Return the number of axes of the mesh that have more than one device."""
    with contextlib.suppress(MeshSizeError):  # clients use some of the devices
        mesh = follow(mesh, sharded, num_devices)
    return sum(size != 1 for size in mesh.sizes.values())


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
