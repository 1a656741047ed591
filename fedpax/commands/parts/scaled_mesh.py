"""The mesh of fewer processes: the outer axis of a configured mesh, scaled down."""

from collections.abc import Collection, Mapping

from fedpax.parallel.mesh import BETWEEN_SLICES
from fedpax.training.experiment import Experiment


def fit_mesh(experiment: Experiment, processes: int, num_processes: int) -> list[str] | None:
    """Return the arguments with which an experiment fits some of its processes; None without.

    The outer axis, the first of islands, clients, data and fsdp with more than one device, gets as
    many devices as its share of processes. With the axis `islands` the number of islands changes
    too. A mesh that takes all devices needs no change: one with an axis of -1, or with sizes that
    follow from the experiment (`Experiment.sharded_sizes`).

    Example:
        >>> from fedpax.experiments.diloco_text import diloco_text
        >>> fit_mesh(diloco_text(), 3, 4)
        ['--islands=3']
        >>> print(fit_mesh(diloco_text(), 2, 3))
        None
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
    # This is so if the outer axis is `islands`, and its size is the experiment's field `islands`.
    sizes = _sizes(experiment)
    same = getattr(experiment, "islands", None) == sizes["islands"]
    return _outer_axis(sizes) == "islands" and same
