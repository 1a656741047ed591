"""`fedpax train`: train an experiment in a folder, or resume the run that the folder holds."""

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from absl import flags

from fedpax.commands.parts.devices import (
    enable_compilation_cache,
    fit_mesh,
    island_numbers,
    processes_per_island,
    provide_devices,
)
from fedpax.commands.parts.file_flags import engine_of
from fedpax.commands.parts.options import allowed_changes, parse_run
from fedpax.commands.parts.processes import end_together, leave_on_failure, provide_processes
from fedpax.console import count_of, print_line
from fedpax.deploy.batch_training import train_in_batches
from fedpax.elastic.membership import find_membership
from fedpax.elastic.supervisor import ElasticOptions, end_with_supervisor, supervise
from fedpax.errors import UsageError
from fedpax.run_files.paths import folder_of_checkpoints
from fedpax.training.experiment import Experiment
from fedpax.training.trainer import TrainingResult
from fedpax.training.trainer import train as train_experiment


def train(arguments: Sequence[str]) -> int:
    """Train an experiment and print the result."""
    options, experiment, folder = parse_run("train", arguments)
    run_rounds = engine_of(options)
    if run_rounds is not None:
        if options.elastic:
            raise UsageError(
                "--engine and --elastic are given, expected one of them: an engine restarts its "
                "workers by itself. Leave --elastic out."
            )
        provide_devices(experiment.mesh, experiment.sharded_sizes())
        result = train_in_batches(
            experiment,
            folder,
            run_rounds,
            exp=options.exp,
            allow_config_change=allowed_changes(options),
        )
        print_line(describe(result, experiment.training.rounds, options.job_log_dir))
        return 0
    if options.elastic:
        return _train_elastically(options, experiment, folder, arguments)
    membership = find_membership()
    if membership is not None:
        end_with_supervisor()
    enable_compilation_cache()
    with leave_on_failure():
        provide_processes(options, experiment)
        together: AbstractContextManager[None] = nullcontext()
        if membership is None:  # else the keeper notices the end of a process
            saved_in = experiment.training.checkpoint_dir
            together = end_together(folder, saved_in, 0.4 * options.heartbeat_timeout)
        with together:
            result = train_experiment(
                experiment,
                folder,
                exp=options.exp,
                allow_config_change=allowed_changes(options),
                participant_states=options.participant_states,
                membership=membership,
            )
    if jax.process_index() == 0:
        print_line(describe(result, experiment.training.rounds, options.job_log_dir))
    return 0 if result.signal is None else 128 + result.signal


def _train_elastically(
    options: flags.FlagValues, experiment: Experiment, folder: Path, arguments: Sequence[str]
) -> int:
    """Supervise a training process of an experiment, configured for all processes."""
    values: dict[str, Any] = {name: options[name].value for name in ElasticOptions._fields}
    allowed = "mesh,islands" if hasattr(experiment, "islands") else "mesh"

    def fit(
        members: Sequence[int], num_processes: int
    ) -> tuple[list[str], list[int] | None] | None:
        settings = fit_mesh(experiment, len(members), num_processes)
        if settings is None:
            return None
        numbers = island_numbers(experiment, members, num_processes)
        return [*settings, f"--allow_config_change={allowed}"], numbers

    return supervise(
        folder,
        folder_of_checkpoints(folder, experiment.training.checkpoint_dir),
        arguments,
        ElasticOptions(**values),
        fit=fit,
        processes_per_island=functools.partial(processes_per_island, experiment),
    )


def describe(result: TrainingResult, rounds: int, folder: str) -> str:
    """Describe the result of a training run in one sentence."""
    completed = f"{result.rounds} of {count_of(rounds, 'round')}"
    if result.signal is not None:
        saved = f"saved {completed} in {folder}" if result.rounds else "stopped before round 1"
        return f"{result.signal.name}: {saved}. Run the same command again to resume."
    if result.stopped_early is not None:
        verb = "Stopped" if result.rounds_trained else "Nothing to do: stopped"
        return (
            f"{verb} early, after {completed} in {folder}: {result.stopped_early}. To train on, "
            "raise --training.stop_after, with --allow_config_change=training.stop_after."
        )
    if not result.rounds_trained:
        more = result.rounds > rounds
        held = f"{count_of(result.rounds, 'round')}, more than the {rounds} of the experiment"
        return f"Nothing to do: {folder} holds {held if more else f'all {completed}'}."
    loss = (result.evaluation or {}).get("loss", math.nan)
    return f"Finished {completed} in {folder}: held-out loss {loss:.4f}."
