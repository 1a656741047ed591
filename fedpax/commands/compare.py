"""`fedpax compare`: train several experiments and compare them in a table and a picture."""

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from fedpax.checkpoints.checkpoint_files import check_latest_round
from fedpax.comma_lists import split_list
from fedpax.commands.parts.devices import num_cores
from fedpax.commands.parts.options import (
    UsageError,
    allowed_changes,
    check_job_log_dir,
    configure,
    metric_names_of,
    parse,
)
from fedpax.commands.parts.saved_run import build_run
from fedpax.console import print_error, print_line
from fedpax.errors import ConfigurationError
from fedpax.experiments.catalog import expand_groups, group_or_none
from fedpax.extras import describe_missing, is_installed
from fedpax.parallel.mesh_sizes import simulated_count
from fedpax.preemption import run_subprocess
from fedpax.reports.comparison import write_comparison
from fedpax.reports.target import (
    MetricTrajectory,
    Target,
    parse_target,
    trajectory_of,
    write_target_comparison,
)
from fedpax.run_files.configuration import to_json
from fedpax.run_files.metrics import RESERVED_METRICS, describe_damage, read_metrics, select
from fedpax.run_files.paths import latest_round, refuse_checkpoint_dir, resolve_job_log_dir
from fedpax.training.experiment import Experiment
from fedpax.training.resume_checks import (
    check_configuration,
    check_field_names,
    tell_changed_code,
)


def compare(arguments: Sequence[str]) -> int:
    """Train the experiments that are not finished, print a table, and write the files."""
    options, fields = parse("compare", arguments)
    chosen = split_list(options.exp, lambda exp: Path(exp.rpartition(":")[0]).is_file())
    target, names = _find_target(options.target, chosen), expand_groups(chosen)
    if not names:
        raise UsageError(
            f"--exp={options.exp} names no experiment, expected names separated by commas. Run "
            "`fedpax list` to see the names."
        )
    seeds, metrics = _parse_seeds(options.seeds, fields), metric_names_of(options)
    by_title = {name.rpartition(":")[2]: name for name in names}
    if len(by_title) < len(names):
        raise UsageError(
            f"--exp={options.exp} names two experiments whose functions have the same name, "
            "expected different names, because each names a folder. Leave one out."
        )
    pairs = itertools.product(by_title.items(), seeds)
    runs = [_plan(*names, seed, fields, options.job_log_dir) for names, seed in pairs]
    for run in runs:
        refuse_checkpoint_dir(run.experiment.training.checkpoint_dir, "compare")
    check_job_log_dir(options)
    destination = resolve_job_log_dir(options.job_log_dir)
    runs = [run._replace(folder=destination / run.label) for run in runs]
    for path in (run.folder for run in runs):
        if path.is_symlink():
            raise UsageError(
                f"{path} is a link to {os.readlink(path)}, expected the folder of a run itself, "
                "because the run would be trained where the link leads. Remove the link, or set "
                "another --job_log_dir."
            )
    titles: dict[str, set[str]] = {}
    for run in runs:
        titles.setdefault(json.dumps(to_json(run.experiment)), set()).add(run.title)
    if fields and (equal := next((same for same in titles.values() if len(same) > 1), None)):
        print_error(
            f"fedpax: with {' '.join(fields)}, {' and '.join(sorted(equal))} are one experiment: "
            "their rows differ in their names alone."
        )
    allowed = _allowed_by_run(runs, allowed_changes(options))
    for run, paths in zip(runs, allowed, strict=True):
        check_configuration(run.folder, run.experiment, run.exp, allow_config_change=paths)
    for run, paths in zip(runs, allowed, strict=True):
        if status := _train(run, paths):
            return status
    for run in runs:
        for text in describe_damage(run.folder, latest_round(run.folder) or 0):
            print_error(text)
    repeats = {title: [run.folder for run in runs if run.title == title] for title in by_title}
    print_line(write_comparison(repeats, destination, metrics))
    if len(seeds) > 1:
        print_line(
            f"\nMeans ± standard deviations of {len(seeds)} seeds: {', '.join(map(str, seeds))}."
        )
    if target is not None:
        print_line(
            "\n`communicated` is the size of the operands of collectives on this mesh. The bytes "
            "below are those that all participants receive and send."
        )
        print_line(f"\n{_compare_to_target(runs, target, destination)}")
    draws = is_installed("matplotlib")
    for name in ("comparison", *(["target"] if target is not None else [])):
        picture = f"{destination / f'{name}.png'} and " if draws else ""
        blank = "\n" if name == "comparison" else ""
        print_line(f"{blank}See {picture}{destination / f'{name}.json'}.")
    if not draws:
        print_error(f"fedpax: {describe_missing('matplotlib', 'A picture of the comparison')}")
    return 0


class PlannedRun(NamedTuple):
    """A run of the comparison."""

    label: str  # the name of its folder
    title: str  # the experiment's name in tables
    exp: str  # the experiment, as `fedpax train` takes it
    fields: Sequence[str]  # the arguments that override fields, with the seed
    experiment: Experiment
    folder: Path


def _plan(
    title: str, exp: str, seed: int | None, fields: Sequence[str], into: str | None
) -> PlannedRun:
    label = title if seed is None else f"{title}_seed_{seed}"
    # First, so that a seed that is stated by its own name keeps its value.
    fields = fields if seed is None else [f"--seed={seed}", *fields]
    folder = Path(into or "") / label
    experiment = configure(exp, fields, folder if into else None, command="compare")
    return PlannedRun(label, title, exp, fields, experiment, folder)


def _train(run: PlannedRun, allowed: Sequence[str]) -> int:
    """Train a run unless it is finished; return the exit status."""
    if (latest_round(run.folder) or 0) >= run.experiment.training.rounds:
        check_latest_round(run.folder)
        print_error(f"{run.label if run.label != run.title else run.exp} is finished already.")
        tell_changed_code(run.folder, run.experiment, run.exp)
        return 0
    # One process each, because a process can set the number of simulated devices only once.
    command = [sys.executable, "-m", "fedpax", "train", f"--exp={run.exp}"]
    command += [f"--job_log_dir={run.folder}", *run.fields]
    return run_subprocess([*command, *(f"--allow_config_change={path}" for path in allowed)])


def _parse_seeds(text: str | None, fields: Sequence[str]) -> list[int] | list[None]:
    """Return the seeds of `--seeds`; without it, one run with the seeds of the experiment."""
    if text is None:
        return [None]
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(
            f"--seeds={text} is no list of seeds, expected different integers, separated by "
            "commas. Set for example --seeds=0,1,2."
        )
    if any(word.partition("=")[0] == "--seed" for word in fields):
        raise UsageError(
            f"--seeds={text} and --seed are both given, expected one of them. Leave out --seed."
        )
    return seeds


def _find_target(text: str | None, chosen: Sequence[str]) -> Target | None:
    """Return the target that the command line or the only named group sets, or None."""
    if text is None and len(chosen) == 1 and (group := group_or_none(chosen[0])):
        text = group.target
    if text is None:
        return None
    try:
        return parse_target(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _compare_to_target(runs: Sequence[PlannedRun], target: Target, destination: Path) -> str:
    """Write the files of the target, and return the table of the costs until it is reached."""
    evaluations = {run.label: select(read_metrics(run.folder), "evaluation") for run in runs}
    known = {key for lines in evaluations.values() for line in lines for key in line}
    if target.metric not in known:
        metrics = sorted(known - RESERVED_METRICS - {"kind", "round"} | {"loss"})
        raise UsageError(
            f"--target={target.metric}={target.value:g}: no evaluation has the metric "
            f"{target.metric!r}, expected one of {', '.join(metrics)}. Set for example "
            f"--target={metrics[0]}={target.value:g}; the runs are kept."
        )
    trajectories: dict[str, MetricTrajectory] = {}

    def simulated(run: PlannedRun) -> int:
        return simulated_count(run.experiment.mesh, run.experiment.sharded_sizes(), num_cores())

    # The largest mesh first, because the number of simulated devices is set once.
    for planned in sorted(runs, key=simulated, reverse=True):
        run, label = build_run(planned.experiment), planned.label
        with jax.set_mesh(run.mesh):
            trajectories[label] = trajectory_of(run, evaluations[label], target.metric)
    in_order = {run.label: trajectories[run.label] for run in runs}
    titles = {run.label: run.title for run in runs}
    return write_target_comparison(in_order, target, destination, titles)


def _allowed_by_run(runs: Sequence[PlannedRun], paths: Sequence[str]) -> list[list[str]]:
    """Return the allowed fields that each experiment has; each must belong to one at least."""
    allowed: list[list[str]] = [[] for _ in runs]
    for path in paths:
        errors = []
        for run, own in zip(runs, allowed, strict=True):
            try:
                check_field_names(run.experiment, [path])
            except ConfigurationError as error:
                errors.append(error)
            else:
                own.append(path)
        if len(errors) == len(runs):
            raise errors[0]
    return allowed
