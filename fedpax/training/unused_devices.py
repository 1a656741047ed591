"""Devices that a run does not use, and the setting that uses them."""

import jax

from fedpax.errors import ConfigurationError
from fedpax.parallel.mesh import available_devices
from fedpax.training.experiment import Experiment, Run


def describe_unused(experiment: Experiment, run: Run, participants: int) -> str | None:
    """Describe devices that a run does not use, and what to set for all of them.

    Args:
        experiment: the experiment.
        run: the run that it built.
        participants: number of participants of a round.

    Returns:
        A sentence; None if the run's mesh has all devices.
    """
    total, used = len(available_devices()), run.mesh.size
    if used >= total:
        return None
    remedy = _remedy(experiment, run, total, participants)
    return f"the mesh has {used} of {total} devices{f'. For all, {remedy}' if remedy else ''}"


def check_processes(experiment: Experiment, run: Run) -> None:
    """Check that each process has devices of the mesh.

    Raises:
        ConfigurationError: a process has none.
    """
    processes = {device.process_index for device in run.mesh.devices.flat}
    if len(processes) == jax.process_count():
        return
    remedy = _remedy(experiment, run, len(available_devices()))
    raise ConfigurationError(
        f"the mesh has {run.mesh.size} of {len(available_devices())} devices, all in "
        f"{len(processes)} of {jax.process_count()} processes, expected devices of every process. "
        f"Start fewer processes{f', or {remedy}' if remedy else ''}."
    )


def _remedy(
    experiment: Experiment, run: Run, total: int, participants: int | None = None
) -> str | None:
    axis = run.placement
    try:
        same = experiment.make_mesh() == run.mesh
    except ValueError:
        same = False
    if not same or axis not in experiment.mesh.sizes:
        return None  # the experiment makes its mesh in another way
    share = total * run.mesh.shape[axis] // run.mesh.size
    for item in experiment.sharded_sizes():
        if item.axes == (axis,):
            return f"set --{item.field}={-(-item.size // share) * share}"
    if participants is not None and participants % share:
        return f"make the number of {axis} a multiple of {share}, and set --mesh.{axis}=-1"
    return f"set --mesh.{axis}=-1"
