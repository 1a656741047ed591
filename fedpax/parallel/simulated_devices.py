"""Simulated devices: one CPU that JAX sees as several devices, to run programs on a mesh."""

import os

import jax

from fedpax.errors import ArgumentError

# The eight worker threads of each come near the limits of a machine; more can hang the process.
MAX_SIMULATED_DEVICES = 1024


def simulate_devices(count: int, *, subgroups: bool = True) -> None:
    """Make JAX show the CPU as `count` devices, with enough worker threads for their collectives.

    Call it before JAX is first used.

    Args:
        count: number of devices, from 1 to 1,024.
        subgroups: whether collectives can run over subgroups of the devices, as on a mesh of
            several axes. Default True. With False there is one worker thread per device, XLA's
            default, and programs of many small operations, such as a client's steps, are two to
            three times as fast.

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
    # A collective blocks its worker thread until the last device of its group arrives. XLA starts
    # as many threads as there are cores or devices. With few cores, all of them can wait in
    # different collectives for a device that has no thread left; after 40 seconds XLA then aborts
    # the process. If all collectives run over all devices, one thread per device is enough. If the
    # environment variable `PJRT_NPROC` or `NPROC` is set, its number of threads is kept.
    if not {"PJRT_NPROC", "NPROC"} & os.environ.keys():
        os.environ["PJRT_NPROC"] = str(8 * num_devices)
