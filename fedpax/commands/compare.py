"""`fedpax compare`: train several experiments and compare them in a table and a picture."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from absl import flags

from fedpax.algorithm import RESERVED_METRICS
from fedpax.commands.devices import num_cores
from fedpax.commands.options import (
    UsageError,
    allowed_changes,
    check_job_log_dir,
    configure,
    define_training_flags,
    parse,
)
from fedpax.commands.saved_run import build_run
from fedpax.experiments.catalog import expand_groups, find_group, groups
from fedpax.parallel.mesh_rule import simulated_count
from fedpax.paths import split_list
from fedpax.training.checkpoint_dir import refuse_checkpoint_dir
from fedpax.training.compare import write_comparison
from fedpax.training.configuration import ConfigurationError, resolve_job_log_dir
from fedpax.training.console import print_error, print_line
from fedpax.training.experiment import Experiment
from fedpax.training.job_dir import check_configuration, check_field_names
from fedpax.training.metrics import describe_damage, read_metrics, select
from fedpax.training.preemption import run_subprocess
from fedpax.training.saved_rounds import check_latest_round, latest_round
from fedpax.training.target import (
    Course,
    Target,
    course_of,
    parse_target,
    write_target_comparison,
)


def compare(arguments: Sequence[str]) -> int:
    """Train the experiments that are not finished, print a table, and write the files.

    Args:
        arguments: the arguments after `compare`.

    Returns:
        The exit status.
    """
    options, fields = parse("compare", arguments, define_flags)
    chosen = split_list(options.exp, lambda exp: Path(exp.rpartition(":")[0]).is_file())
    target, names = _find_target(options.target, chosen), expand_groups(chosen)
    if not names:
        raise UsageError(
            f"--exp={options.exp} names no experiment, expected names separated by commas. Run "
            "`fedpax list` to see the names."
        )
    into = Path(options.job_log_dir) if options.job_log_dir else None
    experiments = {
        name: configure(name, fields, into and into / name.rpartition(":")[2]) for name in names
    }
    for experiment in experiments.values():
        refuse_checkpoint_dir(experiment.training.checkpoint_dir, "compare")
    check_job_log_dir(options)
    by_folder = {name.rpartition(":")[2]: name for name in names}
    if len(by_folder) < len(names):
        raise UsageError(
            f"--exp={options.exp} names two experiments whose functions have the same name, "
            "expected different names, because each names a folder. Leave one out."
        )
    destination = resolve_job_log_dir(options.job_log_dir)
    folders = {folder: destination / folder for folder in by_folder}
    for path in folders.values():
        if path.is_symlink():
            raise UsageError(
                f"{path} is a link to {os.readlink(path)}, expected the folder of a run itself, "
                "because the run would be trained where the link leads. Remove the link, or set "
                "another --job_log_dir."
            )
    allowed = _allowed_by_experiment(experiments, allowed_changes(options))
    for folder, name in by_folder.items():
        check_configuration(
            folders[folder], experiments[name], name, allow_config_change=allowed[name]
        )
    for folder, name in by_folder.items():
        if (latest_round(folders[folder]) or 0) >= experiments[name].training.rounds:
            check_latest_round(folders[folder])
            print_error(f"{name} is finished already.")
            continue
        # One process each, because a process can set the number of simulated devices only once.
        command = [sys.executable, "-m", "fedpax", "train", f"--exp={name}"]
        command += [f"--job_log_dir={folders[folder]}", *fields]
        command += [f"--allow_config_change={path}" for path in allowed[name]]
        if status := run_subprocess(command):
            return status
    for job_log_dir in folders.values():
        for text in describe_damage(job_log_dir, latest_round(job_log_dir) or 0):
            print_error(text)
    print_line(write_comparison(folders, destination))
    if target is not None:
        configured = {folder: experiments[name] for folder, name in by_folder.items()}
        print_line(
            "\n`communicated` is the size of the operands of collectives on this mesh. The bytes "
            "below are those that all participants receive and send."
        )
        print_line(f"\n{_compare_to_target(configured, folders, target, destination)}")
    print_line(f"\nSee {destination / 'comparison.png'} and {destination / 'comparison.json'}.")
    if target is not None:
        print_line(f"See {destination / 'target.png'} and {destination / 'target.json'}.")
    return 0


def define_flags(options: flags.FlagValues) -> None:
    """Define the flags of the command."""
    define_training_flags(options)
    flags.DEFINE_string("target", None, "A metric and its value.", flag_values=options)


def _find_target(text: str | None, chosen: Sequence[str]) -> Target | None:
    """Return the target that the command line or the only named group sets, or None."""
    if text is None and len(chosen) == 1 and chosen[0] in groups():
        text = find_group(chosen[0]).target
    if text is None:
        return None
    try:
        return parse_target(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _compare_to_target(
    experiments: Mapping[str, Experiment],
    folders: Mapping[str, Path],
    target: Target,
    destination: Path,
) -> str:
    """Write the files of the target, and return the table of the costs until it is reached."""
    evaluations = {
        name: select(read_metrics(folder), "evaluation") for name, folder in folders.items()
    }
    known = {key for lines in evaluations.values() for line in lines for key in line}
    if target.metric not in known:
        metrics = sorted(known - RESERVED_METRICS - {"kind", "round"} | {"loss"})
        raise UsageError(
            f"--target={target.metric}={target.value:g}: no evaluation has the metric "
            f"{target.metric!r}, expected one of {', '.join(metrics)}. Set for example "
            f"--target={metrics[0]}={target.value:g}; the runs are kept."
        )
    courses: dict[str, Course] = {}

    def simulated(name: str) -> int:
        experiment = experiments[name]
        return simulated_count(experiment.mesh, experiment.sharded_sizes(), num_cores())

    # The largest mesh first, because the number of simulated devices is set once.
    for name in sorted(experiments, key=simulated, reverse=True):
        run = build_run(experiments[name])
        with jax.set_mesh(run.mesh):
            courses[name] = course_of(run, evaluations[name], target.metric)
    in_order = {name: courses[name] for name in experiments}
    return write_target_comparison(in_order, target, destination)


def _allowed_by_experiment(
    experiments: dict[str, Experiment], paths: Sequence[str]
) -> dict[str, list[str]]:
    """Return the allowed fields that each experiment has; each must belong to one at least."""
    allowed: dict[str, list[str]] = {name: [] for name in experiments}
    for path in paths:
        errors = []
        for name, experiment in experiments.items():
            try:
                check_field_names(experiment, [path])
            except ConfigurationError as error:
                errors.append(error)
            else:
                allowed[name].append(path)
        if len(errors) == len(experiments):
            raise errors[0]
    return allowed
