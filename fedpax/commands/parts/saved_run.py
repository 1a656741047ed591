"""A run that a folder holds: its experiment is rebuilt, and its parameters are loaded."""

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint_files import DamagedCheckpointError, find_own_damage
from fedpax.checkpoints.saved_state import best_round, load_params
from fedpax.commands.parts.devices import enable_compilation_cache, provide_devices
from fedpax.commands.parts.options import check_job_log_dir, override
from fedpax.console import print_error
from fedpax.errors import UsageError
from fedpax.experiments.catalog import find_experiment, is_shipped
from fedpax.run_files.configuration import (
    class_name,
    flatten,
    from_json,
    is_within_fedpax,
    moved_out_of_main,
    own_classes,
    read_configuration_json,
)
from fedpax.run_files.paths import (
    CHECKPOINTS,
    CONFIGURATION,
    complete_rounds,
    folder_of_checkpoints,
    resolve_folder,
    rounds_without_checksums,
)
from fedpax.training.compiled_round import with_shardings
from fedpax.training.experiment import Experiment, Run
from fedpax.training.folder_owners import is_in_use
from fedpax.user_files.finding import is_url


class SavedRun(NamedTuple):
    """A folder's run before anything is built."""

    exp: str  # the experiment's name on the command line, or its class if it has none
    folder: Path  # the run's folder, or its `checkpoint_dir`
    experiment: Experiment
    trained: Experiment  # the run's, before the command set fields

    @property
    def saved_in(self) -> Path:
        """The folder of its checkpoints."""
        return folder_of_checkpoints(self.folder, self.experiment.training.checkpoint_dir)


def read_saved_run(
    command: str, arguments: Sequence[str], options: flags.FlagValues, fields: Sequence[str]
) -> SavedRun:
    """Rebuild the experiment of the run in `--job_log_dir`, which can come from others."""
    # Only code of fedpax is run, and code that `--exp` names.
    check_job_log_dir(options)
    if options.round not in (None, "best") and not options.round.isdecimal():
        raise UsageError(
            f"--round={options.round} is not a round, expected a round or `best`. Leave it out for "
            "the newest checkpoint."
        )
    folder = existing_folder(options.job_log_dir)
    named_configuration = read_configuration_json(folder)
    if named_configuration is None and complete_rounds(folder / CHECKPOINTS):
        raise UsageError(
            f"--job_log_dir={options.job_log_dir} has checkpoints but no config.json, expected the "
            "file as `fedpax train` writes it. Restore it from a copy, or start the run's "
            "former command again, which writes it."
        )
    if named_configuration is None:
        raise UsageError(
            f"--job_log_dir={options.job_log_dir} holds no run, expected a folder with config.json "
            "as `fedpax train` writes it. Give the folder of a run, or train there first."
        )
    exp, saved = named_configuration
    classes: Collection[type] = ()
    if options.exp:
        default = find_experiment(options.exp)()
        saved = moved_out_of_main(saved, type(default).__module__)
        same_name = not exp or options.exp.rpartition(":")[2] == exp.rpartition(":")[2]
        if not (same_name and class_name(default) == saved["class"]):
            raise UsageError(
                f"--job_log_dir={options.job_log_dir} holds another experiment, "
                f"--exp={exp or saved['class']}, expected --exp={options.exp}. Leave out --exp, or "
                "give another folder."
            )
        classes = own_classes(default)
    elif not is_shipped(exp) or not is_within_fedpax(saved["class"]):
        raise UsageError(_how_to_name(command, arguments, folder, exp, saved["class"]))
    _check_hosts(command, arguments, fields, folder, saved)
    prefix = f"fedpax {command} --job_log_dir={options.job_log_dir}"
    description = f"The configuration of {exp or saved['class']} in {folder}."
    configuration = from_json(saved, folder / CONFIGURATION, classes)
    if not isinstance(configuration, Experiment):
        raise UsageError(
            f"{folder / CONFIGURATION} holds a {type(configuration).__name__}, expected an "
            "experiment. Restore the file from a copy."
        )
    try:
        experiment = override(configuration, fields, prefix, description)
    except SystemExit as stop:
        if stop.code:
            names = ", ".join(f"--{name}" for name in options)
            print_error(f"`fedpax {command}` takes {names} and the fields of the experiment.")
        raise
    experiment.read_inputs(folder)
    return SavedRun(exp or saved["class"], folder, experiment, configuration)


def _how_to_name(
    command: str, arguments: Sequence[str], folder: Path, exp: str, class_: str
) -> str:
    """Return the message for an experiment whose code runs only if the command names it."""
    known = exp and not is_shipped(exp)
    named = f"--exp={exp if known else 'path/to/file.py:function'}"
    again = shlex.join(["fedpax", command, *arguments, named])
    subject = f"the experiment {exp}" if known else f"the class {class_}"
    if class_.startswith("__main__:"):
        return (
            f"{folder / CONFIGURATION} names {subject}, which a notebook or a script defined, "
            "expected code that other programs can import. There, fedpax.train(experiment, folder) "
            "returns the model and the metrics; anywhere, fedpax.checkpoints.load_params(folder) "
            "loads the model. For this command, save the class and a function that returns "
            f"the experiment in a file, and run: {again}"
        )
    return (
        f"{folder / CONFIGURATION} names {subject}, which does not come with fedpax, expected "
        "--exp: code that a folder names runs only if the command names it too. If you trust this "
        f"code, run: {again}"
    )


def _check_hosts(
    command: str,
    arguments: Sequence[str],
    fields: Sequence[str],
    folder: Path,
    saved: Mapping[str, Any],
) -> None:
    """Raise if a folder names files at another host, and the command does not name them."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in fields if word[:2] == "--"}
    again: list[str] = []
    for name, value in flatten(saved):
        texts = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str)]
        # A bucket of checkpoints is gs:// alone, and no host of the sender.
        if name not in {*given, "training.checkpoint_dir"} and any(map(is_url, texts)):
            # A path such as -x must not become a flag.
            again += [f"--{name}", *(f"./{x}" if x.startswith("-") else x for x in texts)]
    if again:
        words = shlex.join(["fedpax", command, *arguments, *again])
        raise UsageError(
            f"{folder / CONFIGURATION} names files at another host, which would learn who reads "
            "the folder, and get your credentials. Give files of your own, or, if you trust this "
            f"host, run: {words}"
        )


def existing_folder(job_log_dir: str) -> Path:
    """Return a run's folder as an absolute path, or its `checkpoint_dir` in a bucket."""
    folder = resolve_folder(job_log_dir)
    if not folder.is_dir():
        trouble = "is a file" if folder.is_file() else "does not exist"
        raise UsageError(
            f"--job_log_dir={job_log_dir} {trouble}, expected the folder of a run. The current "
            f"folder is {os.getcwd()}."
        )
    return folder


def checkpoint_round(command: str, saved: SavedRun, chosen: str | None) -> int:
    """Return the round of the checkpoint that `--round` chooses."""
    if chosen == "best":
        return best_round(saved.saved_in)
    round_number = None if chosen is None else int(chosen)
    rounds = complete_rounds(saved.saved_in / CHECKPOINTS)
    if not rounds:
        raise UsageError(
            f"{saved.saved_in} has no complete checkpoint, expected at least one. A run saves one "
            "every training.checkpoint_every rounds, when it is stopped, and at its end: train on, "
            f"then run `fedpax {command}` again."
        )
    if round_number is not None and round_number not in rounds:
        raise UsageError(
            f"--round={round_number} has no checkpoint in {saved.saved_in}, expected one of "
            f"{', '.join(map(str, rounds))}. Give one of these, or leave out --round for the "
            "newest."
        )
    if round_number is not None:
        return round_number
    later = [n for n in rounds_without_checksums(saved.saved_in / CHECKPOINTS) if n > rounds[-1]]
    if later and not is_in_use(saved.folder):
        print_error(
            f"{saved.saved_in / CHECKPOINTS / str(later[-1])} has no checksums.json: the "
            "checkpoint is unfinished or incomplete, so the newest complete one is read, of round "
            f"{rounds[-1]}. If a copy left that file out, copy it back."
        )
    return rounds[-1]


def build_run(experiment: Experiment) -> Run:
    """Provide the devices of an experiment's mesh, and build its run."""
    enable_compilation_cache()
    provide_devices(experiment.mesh, experiment.sharded_sizes())
    return experiment.build()


def load_saved_params(saved: SavedRun, run: Run, round_number: int) -> Params:
    """Load the parameters of a checkpoint onto a run's mesh."""
    like = with_shardings(
        jax.eval_shape(run.init, jax.random.key(0)), run.resolved_shardings.params
    )
    try:
        return load_params(saved.saved_in, round_number, like)
    except (DamagedCheckpointError, FileNotFoundError) as error:
        folder = saved.saved_in / CHECKPOINTS
        rounds = complete_rounds(folder)
        if is_in_use(saved.folder) and max(rounds, default=0) > round_number:
            raise UsageError(
                f"The checkpoint of round {round_number} cannot be read: the run in {saved.folder} "
                "trains, and has removed it or was removing it. Run the command again for the "
                f"newest, of round {rounds[-1]}, or give a --round that the run keeps "
                "(--training.keep_every)."
            ) from error
        if isinstance(error, FileNotFoundError):
            raise
        before = [n for n in reversed(complete_rounds(folder)) if n < round_number]
        whole = next((n for n in before if find_own_damage(folder / str(n)) is None), None)
        other = "" if whole is None else f" --round={whole} reads the newest whole one before it."
        raise UsageError(f"{error}{other}") from error


def load_whole_model(saved: SavedRun, run: Run, round_number: int) -> Params:
    """Load the model of a checkpoint onto a run's mesh; adapters are merged into their model."""
    params = load_saved_params(saved, run, round_number)
    return params if run.whole_model is None else run.whole_model(params)
