"""What a run prints before it compiles: its size, its devices, and those it does not use."""

import math
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from fedpax.chips import CHIPS
from fedpax.console import count_of
from fedpax.errors import ConfigurationError
from fedpax.parallel.mesh import available_devices
from fedpax.run_files.paths import SCALARS
from fedpax.training.experiment import Experiment, Run
from fedpax.training.flops_utilization import Utilization
from fedpax.training.progress import Progress, describe_devices

UNREAD_MASK = (
    "the loss does not read the mask of its batches, so padding is trained on too: weigh examples "
    "by batch['mask'], as the losses of fedpax.models do"
)
METRICS_HAVE_NO_NOISE = (
    "not private: the metrics of clients, such as the loss, metrics of held-out examples, and the "
    "numbers of clients and examples, which have no noise"
)


def announce(
    progress: Progress,
    experiment: Experiment,
    run: Run,
    participants: int,
    folder: Path,
    first: int,
    utilization: Utilization | None,
) -> None:
    """Tell the user what is about to run, and where to see it."""
    params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
    num_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    progress.note(f"{count_of(num_parameters, 'parameter')} on {describe_devices(run.mesh)}")
    for line in run.notes:
        progress.note(line)
    if unused := describe_unused(experiment, run, participants):
        progress.note(unused)
    scalars = shlex.quote(str(folder / SCALARS))
    missing = "" if shutil.which("tensorboard") else " (pip install tensorboard)"
    progress.note(f"folder {folder}; live view: tensorboard --logdir {scalars}{missing}")
    if utilization is not None:
        progress.note(utilization.describe(run.item_unit))
    elif run.flops_per_item is not None and (device := run.mesh.devices.flat[0]).platform != "cpu":
        progress.note(
            f"no MFU: the peak FLOP/s of the device {device.device_kind!r} are not known, expected "
            f"one of {', '.join(CHIPS)}"
        )
    if run.frozen is not None and run.frozen.source:
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.frozen.shapes))
        progress.note(f"reading {size:,} frozen parameters, {run.frozen.source}")
    if first:
        kept = "" if run.initial is None else f"; not reading {run.initial.source} again"
        progress.note(f"resuming from round {first}{kept}")
    elif run.initial is not None:
        progress.note(f"reading the initial parameters, {run.initial.source}")


def describe_aggregator(
    run: Run, state: Any, metrics: Collection[str], participants: int
) -> tuple[str, ...]:
    """Describe what a user has to know of a round's aggregator; `state` may be abstract."""
    lines = list[str]()
    is_told = any("epsilon" in line for line in run.notes)  # by an experiment that knows more
    if "noise_stddev" in metrics and "epsilon" in metrics and not is_told:
        lines += [
            "private: the metric epsilon is of the model after each round, for a client whose "
            "updates count or are 0, without amplification by sampling "
            "(fedpax.aggregators.privacy_spent computes epsilon with it)",
            METRICS_HAVE_NO_NOISE,
            "simulated in one program: the noise is drawn from the aggregator's seed. A reader who "
            "knows the seed can subtract the noise, and no epsilon holds",
        ]
    elif "noise_stddev" in metrics and not is_told:
        sent = run.algorithm.sent_exactly
        reason = "the noise is 0, or something else that changes the model has no noise"
        if sent is not None:
            reason = f"clients send {sent} too, which change the model and have no noise"
        lines.append(f"not private: no epsilon holds, because {reason}")
    num_clients = getattr(run.cohorts, "num_clients", None)
    if num_clients is not None and participants < num_clients and _has_residual(state):
        lines.append(
            f"error feedback with {participants} of {num_clients} clients in a round: the residual "
            "of one client is added to the update of another. Without --aggregator.error_feedback, "
            "codecs that are unbiased need no residual"
        )
    return tuple(lines)


def _has_residual(state: Any) -> bool:
    """Return whether a state holds residuals of error feedback."""
    if getattr(state, "residual", None) is not None:
        return True
    below = state.values() if isinstance(state, dict) else state
    return isinstance(state, dict | list | tuple) and any(map(_has_residual, below))


def describe_unused(experiment: Experiment, run: Run, participants: int) -> str | None:
    """Describe devices that a run does not use; None if it uses all."""
    total, used = len(available_devices()), run.mesh.size
    if used >= total:
        return None
    remedy = _remedy(experiment, run, total, participants)
    return f"the mesh has {used} of {total} devices{f'. For all, {remedy}' if remedy else ''}"


def check_processes(experiment: Experiment, run: Run) -> None:
    """Check that each process has devices of the mesh."""
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
