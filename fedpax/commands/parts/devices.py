"""The devices of a training command: simulated or not, a scaled mesh, and compiled programs."""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax

from fedpax.errors import UsageError
from fedpax.parallel.compiler_options import (
    MAX_SIMULATED_DEVICES,
    provide_worker_threads,
    simulate_devices,
)
from fedpax.parallel.mesh import BETWEEN_SLICES, MeshConfig, MeshSizeError
from fedpax.parallel.mesh_sizes import ShardedSize, follow, simulated_count
from fedpax.training.experiment import Experiment


def skip_absent_tpus() -> None:
    """Let JAX use the CPU at once where libtpu is installed and there is neither TPU nor GPU."""
    # The search for TPUs of libtpu, which serves plans, takes a second and prints errors.
    asked = jax.config.values["jax_platforms"] or "JAX_FORCE_TPU_INIT" in os.environ
    if asked or importlib.util.find_spec("libtpu") is None:
        return
    other_devices = importlib.metadata.entry_points(group="jax_plugins")
    if not other_devices and not has_tpu(Path("/")):
        jax.config.update("jax_platforms", "cpu")


def has_tpu(root: Path) -> bool:
    """Return whether the machine may have a TPU: a device file, or a PCI device of Google."""
    # Google's virtual disks and network cards are left out.
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
    """Simulate the devices of a mesh on a CPU, unless the environment sets their number."""
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


# ---- the mesh of fewer processes: the outer axis of a configured mesh, scaled down


def fit_mesh(experiment: Experiment, processes: int, num_processes: int) -> list[str] | None:
    """Return the arguments with which an experiment fits some of its processes; None without.

    The outer axis, the first of islands, clients, data and fsdp with more than one device, gets as
    many devices as its share of processes; with `islands`, the number of islands changes too. A
    mesh that takes all devices needs no change.

    Example:
        >>> from fedpax.experiments.diloco_text import diloco_text
        >>> fit_mesh(diloco_text(), 3, 4)
        ['--islands=3']
    """
    sizes = _sizes(experiment)
    outer = _outer_axis(sizes)
    if processes == num_processes or -1 in sizes.values():
        return []
    if outer is None:
        return [] if experiment.sharded_sizes() else None
    size, remainder = divmod(sizes[outer] * processes, num_processes)
    if remainder or not size:
        return None
    settings = [f"--mesh.{outer}={size}"] if outer in experiment.mesh.stated else []
    if _islands_are_processes(experiment):
        settings.append(f"--islands={size}")
    return settings


def processes_per_island(experiment: Experiment, num_processes: int) -> int:
    """Return the number of processes that train an island together."""
    if not _islands_are_processes(experiment):
        return 1
    group, remainder = divmod(num_processes, _sizes(experiment)["islands"])
    return 1 if remainder or not group else group


def island_numbers(
    experiment: Experiment, members: Collection[int], num_processes: int
) -> list[int] | None:
    """Return the numbers of the islands that some processes train."""
    if not _islands_are_processes(experiment):
        return None
    islands = _sizes(experiment)["islands"]
    if islands % num_processes and num_processes % islands:
        return None
    # Processes have equal parts of the islands axis, in order.
    homes = {
        island: {
            process
            for process in range(num_processes)
            if process * islands < (island + 1) * num_processes
            and (process + 1) * islands > island * num_processes
        }
        for island in range(islands)
    }
    numbers = [island for island, home in homes.items() if home <= set(members)]
    whole = sum(len(homes[island]) for island in numbers) == len(members) * max(
        1, islands // num_processes
    )
    return numbers if whole else None


def _sizes(experiment: Experiment) -> dict[str, int]:
    """Return the sizes of the mesh; the axis of islands is their number if it is not stated."""
    sizes, stated = experiment.mesh.sizes, experiment.mesh.stated
    for item in experiment.sharded_sizes():
        if item.axes == ("islands",) and "islands" not in stated:
            sizes["islands"] = item.size
    return sizes


def _outer_axis(sizes: Mapping[str, int]) -> str | None:
    return next((name for name in (*BETWEEN_SLICES, "fsdp") if sizes[name] > 1), None)


def _islands_are_processes(experiment: Experiment) -> bool:
    """Return whether the number of islands follows from the number of processes."""
    # It does if the outer axis is `islands`, and its size is the experiment's field `islands`.
    sizes = _sizes(experiment)
    same = getattr(experiment, "islands", None) == sizes["islands"]
    return _outer_axis(sizes) == "islands" and same


# ---- JAX's persistent compilation cache: a second start of an experiment compiles nothing


def enable_compilation_cache() -> None:
    """Keep compiled programs in `$XDG_CACHE_HOME/fedpax/jax`, or `~/.cache/fedpax/jax`."""
    # JAX's own settings come first: `JAX_ENABLE_COMPILATION_CACHE=0` switches the cache off, and
    # `JAX_COMPILATION_CACHE_DIR` names another folder. Without a folder there is no cache.
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"] or settings["jax_compilation_cache_dir"]:
        return
    try:
        folder = _cache_home() / "fedpax" / "jax"
        # For the user alone: JAX executes what it finds there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX's default is 1 second, but a start compiles many programs that take less.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cache_home() -> Path:
    """Return the user's cache folder; by the XDG specification a relative path is ignored."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"
