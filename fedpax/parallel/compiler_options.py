"""Compiler options of some devices, and one CPU that JAX sees as several devices."""

import os

import jax
from jax.sharding import Mesh

from fedpax.chips import chip_of
from fedpax.errors import ArgumentError


def overlap_options(mesh: Mesh) -> dict[str, str]:
    """Return the compiler options with which transfers between slices overlap with local steps.

    On several slices of v5e, the TPU compiler can complete an all-gather between slices before the
    local steps that should hide it. The option forbids this.

    Args:
        mesh: the mesh that the program runs on.

    Returns:
        Options for `jax.jit(round, compiler_options=...)`; none but for several slices of v5e.

    Example:
        >>> import jax
        >>> from fedpax.parallel import make_mesh
        >>> mesh = make_mesh(islands=-1)
        >>> double = jax.jit(lambda x: 2 * x, compiler_options=overlap_options(mesh))
        >>> overlap_options(mesh), float(double(3.0))
        ({}, 6.0)
    """
    slices = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if len(slices) > 1 and chip is not None and chip.name == "v5e":
        return {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false"}
    return {}


def memory_options(platform: str) -> dict[str, str]:
    """Return compiler options with which a program of many independent parts needs less memory."""
    if platform != "cpu":
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def run_once_options(platform: str) -> dict[str, int]:
    """Return compiler options for a program that runs seldom, such as an initialization."""
    # On a CPU, LLVM skips its expensive passes.
    is_fast = jax.config.values["jax_disable_most_optimizations"]
    return {"xla_backend_optimization_level": 1} if platform == "cpu" and not is_fast else {}


# ---- simulated devices: one CPU that JAX sees as several devices, to run programs on a mesh

# The eight worker threads of each come near the limits of a machine; more can hang the process.
MAX_SIMULATED_DEVICES = 1024


def simulate_devices(count: int, *, subgroups: bool = True) -> None:
    """Make JAX show the CPU as `count` devices, with enough worker threads for their collectives.

    Call it before JAX is first used.

    Args:
        count: number of devices, from 1 to 1,024.
        subgroups: whether collectives can run over subgroups of the devices, as on a mesh of
            several axes. With False, programs of many small operations are two to three times as
            fast.

    Raises:
        ValueError: if `count` is below 1 or above 1,024.
        RuntimeError: if JAX is already in use.
    """
    if not 1 <= count <= MAX_SIMULATED_DEVICES:
        raise ArgumentError(
            f"simulate_devices({count}): expected 1 to {MAX_SIMULATED_DEVICES:,} devices. Pass the "
            "size of the mesh."
        )
    if subgroups:
        provide_worker_threads(count)
    jax.config.update("jax_num_cpu_devices", count)


def provide_worker_threads(num_devices: int) -> None:
    """Request eight worker threads per simulated device from XLA, before JAX is first used."""
    # A collective blocks its worker thread until the last device of its group arrives. With few
    # cores, all threads can wait in different collectives, and XLA aborts the process after 40
    # seconds. The environment variables `PJRT_NPROC` and `NPROC` take precedence.
    if not {"PJRT_NPROC", "NPROC"} & os.environ.keys():
        os.environ["PJRT_NPROC"] = str(8 * num_devices)
