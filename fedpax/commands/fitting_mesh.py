"""The mesh of fewer processes: the outer axis of a configured mesh, scaled down."""

import dataclasses

from fedpax.parallel.mesh import BETWEEN_SLICES
from fedpax.training.experiment import Experiment


def fit_mesh(experiment: Experiment, processes: int, num_processes: int) -> list[str] | None:
    """Return the settings with which an experiment fits some of its processes.

    The outer axis, the first of islands, clients, data and fsdp with more than one device, gets as
    many devices as its share of processes. With the axis `islands` the number of islands changes
    too. A mesh with an axis of -1 takes all devices and needs no change.

    Args:
        experiment: the experiment, configured for all processes.
        processes: the number of processes that train.
        num_processes: the number of all processes.

    Returns:
        Arguments of the command line; None if the axis has no whole size.

    Example:
        >>> from fedpax.experiments.diloco_text import diloco_text
        >>> fit_mesh(diloco_text(), 3, 4)
        ['--mesh.islands=3', '--islands=3']
        >>> print(fit_mesh(diloco_text(), 2, 3))
        None
    """
    sizes = dataclasses.asdict(experiment.mesh)
    outer = next((name for name in (*BETWEEN_SLICES, "fsdp") if sizes[name] > 1), None)
    if processes == num_processes or -1 in sizes.values():
        return []
    if outer is None:
        return None
    size, remainder = divmod(sizes[outer] * processes, num_processes)
    if remainder or not size:
        return None
    settings = [f"--mesh.{outer}={size}"]
    # The algorithm's islands are those of the mesh, and not a multiple, where it has this field.
    if outer == "islands" and getattr(experiment, "islands", None) == sizes["islands"]:
        settings.append(f"--islands={size}")
    return settings
