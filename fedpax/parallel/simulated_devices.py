"""Simulated devices: one CPU that shows as many, to run a mesh's programs where there is none."""

import os

import jax


def simulate_devices(count: int, *, groups: bool = True) -> None:
    """Makes JAX show the CPU as `count` devices, with workers enough for their collectives.

    Call it before anything asks for a device.

    Args:
        count: the number of devices, at least 1.
        groups: whether collectives may run over some of the devices, as on a mesh of several axes.
            Without, there are no workers beyond XLA's own, one a device, and programs of many
            small operations, such as a client's steps, are two to three times as fast.

    Raises:
        ValueError: `count` is below 1.
        RuntimeError: devices are in use already.
    """
    if count < 1:
        raise ValueError(
            f"simulate_devices({count}): expected at least 1 device. Pass the size of the mesh."
        )
    if groups:
        provide_workers(count)
    jax.config.update("jax_num_cpu_devices", count)


def provide_workers(devices: int) -> None:
    """Asks XLA for eight worker threads a simulated device, before anything asks for a device.

    A collective blocks the worker that runs it until the last device arrives. XLA has as many
    workers as cores or devices, so that on few cores all of them can wait, in different
    collectives, with nobody left to arrive; after 40 seconds it then ends the process. Where all
    collectives run over all devices, as many workers as devices are enough. Where the environment
    variable `PJRT_NPROC` or `NPROC` already gives a number, that stays.

    Args:
        devices: the number of simulated devices.
    """
    if not {"PJRT_NPROC", "NPROC"} & os.environ.keys():
        os.environ["PJRT_NPROC"] = str(8 * devices)
