"""Compiler options that a program needs on some devices."""

import jax
from jax.sharding import Mesh

from fedpax.chips import chip_of


def overlap_options(mesh: Mesh) -> dict[str, str]:
    """Return the compiler options with which transfers between slices overlap with local steps.

    On several slices of v5e, the TPU compiler can complete an all-gather between slices before the
    local steps that should hide it, because it fuses all-gathers with other operations. The option
    that forbids this fusion also applies to all-gathers within an island. On all other devices, the
    transfers overlap without options.

    Args:
        mesh: the mesh that the program runs on.

    Returns:
        Options for `jax.jit(round, compiler_options=...)`. On all but several slices of v5e: none.

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
    """Return compiler options with which a program of many independent parts needs less memory.

    On a CPU, XLA by default orders operations so that many can run at the same time, and keeps
    their results. A round that sends fragments has such operations for each fragment.
    """
    if platform != "cpu":
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def run_once_options(platform: str) -> dict[str, int]:
    """Return compiler options for a program that runs seldom, such as an initialization."""
    # On a CPU, LLVM skips its expensive passes, unless all programs of the process skip them
    # already.
    is_fast = jax.config.values["jax_disable_most_optimizations"]
    return {"xla_backend_optimization_level": 1} if platform == "cpu" and not is_fast else {}
