"""Simulated devices: one CPU that JAX sees as several devices, to run programs on a mesh."""

import os

import jax


def simulate_devices(count: int, *, subgroups: bool = True) -> None:
    """Make JAX show the CPU as `count` devices, with enough worker threads for their collectives.

    Call it before JAX is first used.

    Args:
      count: number of devices, at least 1.
      subgroups: whether collectives can run over subgroups of the devices, as on a mesh of several
        axes. Default True. With False there is one worker thread per device, XLA's default, and
        programs of many small operations, such as a client's steps, are two to three times as
        fast.

    Raises:
      ValueError: if `count` is below 1.
      RuntimeError: if JAX is already in use.
    """
    if count < 1:
        raise ValueError(
            f"simulate_devices({count}): expected at least 1 device. Pass the size of the mesh."
        )
    if subgroups:
        provide_worker_threads(count)
    jax.config.update("jax_num_cpu_devices", count)


def provide_worker_threads(num_devices: int) -> None:
    """Request eight worker threads per simulated device from XLA, before JAX is first used.

    A collective blocks its worker thread until the last device of its group arrives. XLA starts
    as many threads as there are cores or devices. With few cores, all of them can wait in
    different collectives for a device that has no thread left; after 40 seconds XLA then aborts
    the process. If all collectives run over all devices, one thread per device is enough.

    If the environment variable `PJRT_NPROC` or `NPROC` is set, its number of threads is kept.

    Args:
      num_devices: number of simulated devices.
    """
    if not {"PJRT_NPROC", "NPROC"} & os.environ.keys():
        os.environ["PJRT_NPROC"] = str(8 * num_devices)
