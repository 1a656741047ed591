"""`fedpax evaluate`: measure a run's checkpoint on held-out data."""

import json
import math
from collections.abc import Sequence

import jax
from absl import flags

from fedpax.commands.options import output_file, parse
from fedpax.commands.saved_run import (
    build_run,
    checkpoint_round,
    define_saved_run_flags,
    load_saved_params,
    read_saved_run,
)
from fedpax.console import print_error, print_line
from fedpax.run_files.paths import write_atomically
from fedpax.run_files.quantiles import with_quantiles
from fedpax.training.progress import describe_devices, format_metrics


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint, print its metrics, and write the file that is asked for.

    Args:
        arguments: the arguments after `evaluate`.

    Returns:
        The exit status.
    """
    options, fields = parse("evaluate", arguments, define_flags, needs_exp=False)
    report = output_file("json", options.json)
    saved = read_saved_run("evaluate", arguments, options, fields)
    number = checkpoint_round("evaluate", saved, options.round)
    run = build_run(saved.experiment)
    print_error(f"{saved.exp}: evaluating round {number} on {describe_devices(run.mesh)}")
    with jax.set_mesh(run.mesh):
        evaluation = run.evaluate(load_saved_params(saved, run, number))
    metrics = {name: float(value) for name, value in with_quantiles(evaluation).items()}
    print_line(f"{saved.exp} round {number}: held-out {format_metrics(metrics)}")
    if report:
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        content = {
            "exp": saved.exp,
            "job_log_dir": str(saved.folder),
            "round": number,
            "metrics": finite,
        }
        write_atomically(report, json.dumps(content, indent=2) + "\n")
    return 0


def define_flags(options: flags.FlagValues) -> None:
    """Define the flags of the command."""
    define_saved_run_flags(options)
    flags.DEFINE_string("json", None, "A file for the metrics.", flag_values=options)
