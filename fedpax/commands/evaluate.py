"""`fedpax evaluate`: measure a run's checkpoint on held-out data, of all clients or of each."""

import functools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from fedpax.algorithm import Params
from fedpax.checkpoints.saved_state import load_state
from fedpax.commands.parts.file_flags import engine_of
from fedpax.commands.parts.flower_export import write_heldout_data
from fedpax.commands.parts.options import parse
from fedpax.commands.parts.output_files import output_file
from fedpax.commands.parts.saved_run import (
    SavedRun,
    build_run,
    checkpoint_round,
    load_saved_params,
    read_saved_run,
)
from fedpax.console import print_error, print_line
from fedpax.data.open_client_files import OpenFiles
from fedpax.deploy.batch_training import RunRounds, evaluate_in_batches, for_workers, open_heldout
from fedpax.deploy.flower.app_files import run_flower
from fedpax.errors import UsageError
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.reports.client_report import clients_json, format_clients, plot_clients
from fedpax.run_files.metrics import with_quantiles
from fedpax.run_files.paths import write_atomically
from fedpax.settings.table_data import FilesConfig
from fedpax.sites.site_files import FEDERATION
from fedpax.training.client_metrics import ClientMetrics
from fedpax.training.experiment import Run
from fedpax.training.progress import describe_devices, format_metrics


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint, print its metrics, and write the file that is asked for."""
    options, fields = parse("evaluate", arguments, needs_exp=False)
    report = output_file("json", options.json)
    picture = output_file("picture", options.picture, ".png")
    if picture and not options.by_client:
        raise UsageError(
            "--picture without --by_client, expected both: the picture is of the metrics by "
            "client. Add --by_client, or draw the run with `fedpax show --picture`."
        )
    run_rounds, on_flower = engine_of(options), options.engine == "flower"
    saved = read_saved_run("evaluate", arguments, options, fields)
    if isinstance(saved.experiment, FedAvgFiles) and isinstance(saved.trained, FedAvgFiles):
        if not saved.experiment.data.files and (saved.folder / FEDERATION).is_file():
            raise UsageError(_how_to_measure(options.job_log_dir))
        _check_held_out(saved.experiment.data, saved.trained.data)
    number = checkpoint_round("evaluate", saved, options.round)
    run = build_run(saved.experiment)
    print_error(f"{saved.exp}: evaluating round {number} on {describe_devices(run.mesh)}")
    for line in run.cautions:
        print_error(f"{saved.exp}: {line}")
    if options.by_client and run.evaluate_clients is None and run.evaluate_own_models is None:
        raise UsageError(
            f"--by_client: the held-out data of {saved.exp} have no clients, expected an "
            "experiment with Run.evaluate_clients, such as fedavg_table. Leave out --by_client; in "
            "an experiment of your own, set Run.evaluate_clients."
        )
    if options.engine and run.evaluate_own_models is not None:
        problem = "the clients' own models are in the checkpoint of this process"
        if run.evaluate_clients is None:
            raise UsageError(f"--engine={options.engine}: {problem}. Leave out --engine.")
        print_error(
            f"Measures the shared model alone: {problem}, which reads them without --engine."
        )
    clients = None
    with jax.set_mesh(run.mesh):
        params = load_saved_params(saved, run, number)
        if run_rounds is None and not on_flower:
            evaluation = run.evaluate(params)
            if options.by_client:
                clients = measure_clients(run, params, saved.saved_in, number)
    if on_flower:
        evaluation, clients = _evaluate_on_flower(saved, jax.device_get(params), options)
    elif run_rounds is not None:
        evaluation, clients = _evaluate_in_batches(
            saved, jax.device_get(params), run_rounds, options.by_client
        )
    metrics = {name: float(value) for name, value in with_quantiles(evaluation).items()}
    print_line(f"{saved.exp} round {number}: held-out {format_metrics(metrics)}")
    if isinstance(saved.experiment, FedAvgFiles) and not on_flower:  # nodes have their own
        print_line(_describe_measured(saved.experiment.data, saved.experiment.opened))
    if clients is not None:
        print_line(format_clients(clients))
        if picture:
            plot_clients(clients, picture)
    if report:
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        content: dict[str, Any] = {
            "exp": saved.exp,
            "job_log_dir": str(saved.folder),
            "round": number,
            "metrics": finite,
        }
        if clients is not None:
            content["clients"] = clients_json(clients)
        write_atomically(report, json.dumps(content, indent=2) + "\n")
    return 0


def _evaluate_in_batches(
    saved: SavedRun, params: Params, run_rounds: RunRounds, by_client: bool
) -> tuple[Mapping[str, float], ClientMetrics | None]:
    experiment: Any = saved.experiment
    if not hasattr(experiment, "open_heldout_clients"):
        raise UsageError(
            f"--engine: the held-out data of {saved.exp} have no clients, expected an experiment "
            "with clients, such as fedavg_table. Leave out --engine."
        )
    open_clients = functools.partial(open_heldout, for_workers(experiment, saved.folder))
    return evaluate_in_batches(
        experiment.open_heldout_clients(), params, run_rounds, open_clients, by_client=by_client
    )


def _evaluate_on_flower(
    saved: SavedRun, params: Params, options: flags.FlagValues
) -> tuple[Mapping[str, float], ClientMetrics | None]:
    """Evaluate a checkpoint on Flower's nodes, each on the held-out examples that it has."""
    experiment: Any = saved.experiment
    if not isinstance(experiment, FedAvgFiles):
        raise UsageError(
            f"--engine=flower: {saved.exp} reads no files, expected an experiment on files, such "
            "as fedavg_table. Leave out --engine."
        )
    heldout = experiment.open_heldout_participants()
    run = functools.partial(
        run_flower,
        write_data=functools.partial(write_heldout_data, experiment, saved.exp),
        name=f"evaluate-{saved.exp}",
        flags=shlex.split(options.flower_flags or ""),
        tell=print_error,
    )
    return evaluate_in_batches(
        heldout, params, run, lambda: heldout.clients, by_client=options.by_client
    )


def measure_clients(run: Run, params: Params, folder: Path, number: int) -> ClientMetrics:
    """Measure the shared model and the clients' own models on each client."""
    shared = None if run.evaluate_clients is None else run.evaluate_clients(params)
    if run.evaluate_own_models is None:
        assert shared is not None
        return shared
    like = jax.eval_shape(run.algorithm.init, params)
    evaluated = run.evaluate_own_models(load_state(folder, number, like))
    personal = {f"personal_{name}": values for name, values in evaluated.metrics.items()}
    if shared is None:
        return evaluated._replace(metrics=personal)
    return shared._replace(metrics={**shared.metrics, **personal})


def _how_to_measure(folder: str) -> str:
    """Return the message for the folder of a coordinator, without files to evaluate on."""
    return (
        f"--job_log_dir={folder} is the folder of a coordinator, which has no data, expected files "
        "with the columns of its table.json. Give for example --data.files='FOLDER/*.csv', or "
        "evaluate at a site with the --job_log_dir of its `fedpax join`. "
        f"`fedpax show --job_log_dir={folder}` has the metrics of the sites' held-out examples."
    )


def _check_held_out(data: FilesConfig, trained: FilesConfig) -> None:
    """Raise if another column of clients lets the run's files hold out other examples."""
    # An example is held out by its values, among which is its client, if the path names it.
    files, before = ([f.replace("{client}", "*") for f in x.files] for x in (data, trained))
    by_path = trained.client is None and trained.partition is None and not data.has_split
    named = data.client is None or any("{client}" in file for file in data.files)
    if by_path and not named and files == before:
        raise UsageError(
            f"--data.client={data.client} would hold out other examples of these files than the "
            "run did, and the model was trained on most of them. Let the path name the clients "
            "too, such as --data.files='FOLDER/{client}.csv': the held-out part is then the run's."
        )


def _describe_measured(data: FilesConfig, opened: OpenFiles) -> str:
    """Return how many of the examples an evaluation measures, and how to measure more."""
    held_out, count = int((~opened.training).sum()), len(opened.owners)
    words = f"measured {held_out:,} of {count:,} examples: the held-out part"
    if data.has_split:
        return words
    most = _most_heldout(data, opened)
    if most is None or most <= data.heldout_fraction:
        return words
    return f"{words}; on these files, --data.heldout_fraction={most:g} measures the most"


def _most_heldout(data: FilesConfig, opened: OpenFiles) -> float | None:
    """Return the largest of some fractions that leaves an example to train on, as a run needs."""
    if len(opened.owners) > 10_000:
        return 0.99
    from fedpax.user_files.held_out import held_out

    table, rows = opened.columns.stored, opened.columns.rows
    content = table if data.partition is None else table.drop_columns([opened.client])
    for fraction in (0.99, 0.9, 0.8, 0.5):
        chosen = held_out(content, fraction)
        chosen = chosen if rows is None else chosen[rows]
        if not chosen[~opened.is_new[opened.owners]].all():
            return fraction
    return None
