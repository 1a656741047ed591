"""The lines that a run prints before it compiles."""

import math
import shlex
import shutil
from pathlib import Path

import jax

from fedpax.parallel.chips import CHIPS
from fedpax.run_files.paths import SCALARS
from fedpax.training.experiment import Experiment, Run
from fedpax.training.progress import Progress, describe_devices
from fedpax.training.unused_devices import describe_unused
from fedpax.training.utilization import Utilization


def announce(
    progress: Progress,
    experiment: Experiment,
    run: Run,
    participants: int,
    folder: Path,
    first: int,
    utilization: Utilization | None,
) -> None:
    """Tell the user what is about to run, and where to see it.

    Args:
        progress: prints the lines.
        experiment: the experiment.
        run: the run.
        participants: number of participants of a round.
        folder: its folder.
        first: the number of rounds that are trained already.
        utilization: what MFU is computed from; None: unknown.
    """
    params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
    num_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    progress.note(f"{num_parameters:,} parameters on {describe_devices(run.mesh)}")
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
