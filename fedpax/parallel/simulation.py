"""Simulated devices: one CPU that shows as many, to run a mesh's programs where there is none."""

import os

import jax


def simulate_devices(count: int) -> None:
    """Makes JAX show the CPU as `count` devices. Call it before anything asks for a device.

    Collectives between simulated devices block the worker thread that runs them until the last
    device arrives. XLA has as many workers as cores or devices, so that on few cores all of them
    can be waiting, in different collectives, with nobody left to arrive: it then ends the process
    after 40 seconds. This call therefore also asks for eight workers a device, unless the
    environment variable `PJRT_NPROC` or `NPROC` says another number. On two cores that more than
    doubles the speed, too.

    Args:
        count: the number of devices, at least 1.

    Raises:
        ValueError: `count` is below 1.
        RuntimeError: devices are in use already.
    """
    if count < 1:
        raise ValueError(
            f"simulate_devices({count}): expected at least 1 device. Pass the size of the mesh."
        )
    jax.config.update("jax_num_cpu_devices", count)
    if not {"PJRT_NPROC", "NPROC"} & os.environ.keys():
        os.environ["PJRT_NPROC"] = str(8 * count)
