"""Check before a run that its folder holds the same experiment, and a state that fits it."""

import contextlib
import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedpax.checkpoints.orbax_files import ocp
from fedpax.checkpoints.participant_states import (
    ParticipantRule,
    check_resizable,
    check_same_leaves,
    has_saved_shape,
    saved_leaves,
    shapes_of_same_clients,
)
from fedpax.console import count_of, print_error
from fedpax.elastic.membership import Membership
from fedpax.errors import ConfigurationError
from fedpax.run_files.configuration import (
    changed_code,
    class_name,
    differences,
    flatten,
    from_json,
    moved_out_of_main,
    own_classes,
    read_configuration_json,
    to_json,
)
from fedpax.run_files.evaluations import STOP
from fedpax.run_files.metrics import select
from fedpax.run_files.metrics_log import last_rounds, read_log
from fedpax.run_files.paths import (
    CHECKPOINTS,
    CONFIGURATION,
    SCALARS,
    latest_round,
    resolve_checkpoint_dir,
    resolve_folder,
)
from fedpax.training.agreement import check_agreement
from fedpax.training.experiment import Experiment
from fedpax.training.folder_owners import CheckpointDir, JobDirLock


class ResumeOptions(NamedTuple):
    """Allowed changes since the folder's checkpoint was saved."""

    allow_config_change: Collection[str]  # paths of fields of the configuration
    participant_states: ParticipantRule  # how to make states for another number of participants
    # the part of this process in an elastic job; None: there is no such job
    membership: Membership | None = None


class TrainingJob(NamedTuple):
    """A run to train, and where."""

    experiment: Experiment
    folder: Path  # the run's folder
    saved_in: Path
    checkpoint_dir: CheckpointDir | None  # `saved_in`, if it is not the run's folder
    exp: str
    options: ResumeOptions

    @property
    def name(self) -> str:
        """The name of the experiment, for messages."""
        return self.exp or type(self.experiment).__name__


WITHOUT_EFFECT = frozenset(
    {
        "training.profile_at",
        "training.hang_after",
        "training.on_hang",
        "training.keep_best",
        "training.tracker",
        "training.track_checkpoints",
    }
)
"""Fields that may always change, because they have no effect on what is trained."""


@contextlib.contextmanager
def lock_run(
    folder: Path,
    experiment: Experiment,
    exp: str,
    allow_config_change: Collection[str],
    saved_in: Path | None = None,
) -> Iterator[None]:
    """Lock a run's folder, and check that all processes agree and that it is the experiment's."""
    with JobDirLock(folder):
        check_agreement(folder, experiment, saved_in)
        check_configuration(folder, experiment, exp, allow_config_change=allow_config_change)
        if jax.process_index() == 0:
            tell_changed_code(folder, experiment, exp)
        yield


def tell_changed_code(folder: Path, experiment: Experiment, exp: str) -> None:
    """Tell which files of the experiment's code differ from those that its folder was made by."""
    if (names := changed_code(folder, experiment, exp)) and latest_round(folder):
        print_error(
            f"fedpax: {', '.join(names)} has changed since {folder} was written: its rounds are of "
            "the former code. Set another --job_log_dir to train all rounds with the new code."
        )


def check_configuration(
    folder: Path,
    experiment: Experiment,
    exp: str = "",
    *,
    allow_config_change: Collection[str] = (),
    flag: str = "--job_log_dir",
) -> None:
    """Check that a folder is empty, or holds the same experiment with an allowed configuration."""
    check_field_names(experiment, allow_config_change)
    _check_entries(folder)
    named_configuration = read_configuration_json(folder)
    if named_configuration is None:
        return
    name, saved = named_configuration
    saved = moved_out_of_main(saved, type(experiment).__module__)
    same_class = saved["class"] == class_name(experiment)
    changes, former = {}, None
    if same_class:
        classes = own_classes(experiment)
        former = from_json(saved, folder / CONFIGURATION, classes)
        changes = _changes(folder, former, experiment)
        if changes:
            experiment.check_resumable(former)
    # A module can be written in several ways (mine, ./mine.py), but the class is the same.
    functions = {text.rpartition(":")[2] for text in (name, exp) if text}
    if not same_class and name == exp:
        raise ConfigurationError(
            f"{flag}={folder} holds a {saved['class']}, expected a {class_name(experiment)}"
            f"{f', as --exp={exp} makes now' if exp else ''}. If the class was renamed, write its "
            f"new name into config.json there; otherwise set another {flag}."
        )
    if not same_class or (changes and len(functions) > 1):
        raise ConfigurationError(
            f"{flag}={folder} holds another experiment"
            f"{f', --exp={name}' if name else ''}, expected "
            f"{f'--exp={exp}' if exp else class_name(experiment)} or an empty folder. Set another "
            f"{flag}."
        )
    refused = {
        path: change
        for path, change in changes.items()
        if not any(f"{path}.".startswith(f"{allowed}.") for allowed in allow_config_change)
    }
    if refused:
        allowed_paths = ",".join([*allow_config_change, *refused])
        listing = "\n".join(f"  {path}: {change}" for path, change in refused.items())
        saved_in = resolve_checkpoint_dir(folder, experiment.training.checkpoint_dir)
        misfit = describe_state_misfit(saved_in, experiment)
        remedy = (
            f"Set the former values to resume the run, another {flag} to start a new one, "
            f"or --allow_config_change={allowed_paths} to resume it with the new values."
            if misfit is None
            else "The run cannot resume with the new values, because its state would have another "
            f"structure. {misfit}"
        )
        raise ConfigurationError(
            f"{flag}={folder} holds this experiment with another configuration. Fields that "
            f"would change:\n{listing}\n{remedy}"
        )
    if flag == "--job_log_dir" and former is not None and jax.process_index() == 0:
        _tell_other_span(former, experiment)


def _tell_other_span(former: Experiment, now: Experiment) -> None:
    """Tell that a run continues on a schedule of the learning rate with another span in steps."""
    before, span = _schedule_span(former), _schedule_span(now)
    if before is None or span is None or before[1] == span[1]:
        return
    longer = span[1] > before[1]
    print_error(
        f"--optimizer.schedule={span[0]} spans {span[2]} now, and spanned {before[2]}: the "
        "learning rate continues on the "
        f"{'longer schedule, and can rise again' if longer else 'shorter schedule'}."
    )


def describe_end_of_schedule(now: Experiment, done: int, state: Any) -> str | None:
    """Describe the steps that follow the schedule's end, in a run that has done `done` rounds."""
    # The optimizer counts the steps: earlier rounds can have had another number of them.
    counts = [
        int(np.asarray(shard.data).max())
        for node in jax.tree.leaves(state, is_leaf=_counts_steps)
        if _counts_steps(node)
        for shard in node.count.addressable_shards
    ]
    span = _schedule_span(now)
    if span is None or not counts:
        return None
    steps, (schedule, last, words) = max(counts), span
    left = last // now.training.rounds * (now.training.rounds - done)
    after = steps + left - last
    if after <= 0:
        return None
    return (
        f"--optimizer.schedule={schedule} spans {words}. The run has done {steps:,} steps, and has "
        f"{left:,} left: {f'the last {after:,}' if after < left else 'all'} of them take the "
        "schedule's final learning rate. To decay until the end, keep --data.local_steps, or "
        "start a new run with --training.begin_from"
    )


def _schedule_span(experiment: Any) -> tuple[str, int, str] | None:
    """Return a schedule that depends on the run's steps, their number, and this in words."""
    schedule = getattr(getattr(experiment, "optimizer", None), "schedule", "constant")
    local_steps = getattr(getattr(experiment, "data", None), "local_steps", None)
    if local_steps is None or schedule not in ("cosine", "linear", "wsd"):
        return None
    rounds = experiment.training.rounds
    steps = rounds * local_steps
    return schedule, steps, f"{steps:,} steps ({count_of(rounds, 'round')} of {local_steps:,})"


def _counts_steps(node: object) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _check_entries(folder: Path) -> None:
    """Raise if one of the run's folders is a file."""
    for name in (CHECKPOINTS, SCALARS):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise ConfigurationError(
                f"{folder / name} is a file, expected a folder, which the run makes itself. Move "
                "the file away, or set another --job_log_dir."
            )


def _changes(folder: Path, old: Experiment, new: Experiment) -> dict[str, str]:
    """Return the fields that differ, but for `WITHOUT_EFFECT` and more rounds of a finished run."""
    changes = differences(old, new)
    for path in WITHOUT_EFFECT:
        changes.pop(path, None)
    if new.training.rounds > old.training.rounds:
        # A damaged checkpoint may have been deleted.
        lines = read_log(folder, last_rounds).lines
        finished = max(
            latest_round(folder) or 0, *(x["round"] for x in select(lines, "training")), 0
        )
        stops = [line["round"] for line in select(lines, STOP)]
        if finished >= old.training.rounds or finished in stops:
            changes.pop("training.rounds", None)
    return changes


def check_field_names(experiment: Experiment, names: Collection[str]) -> None:
    """Check that each name is the path of a field, or of a group of fields."""
    paths = [path for path, _ in flatten(to_json(experiment))]
    groups = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    for name in names:
        if name not in groups and name not in paths:
            near = difflib.get_close_matches(name, [*groups, *paths], n=3)
            raise ConfigurationError(
                f"--allow_config_change={name} names no field of the experiment, expected a path "
                f"such as {' or '.join(near) if near else 'training.rounds'}. Run the command with "
                "--help to see all fields."
            )


def describe_state_misfit(saved_in: Path, experiment: Experiment) -> str | None:
    """Describe why an experiment cannot resume from a run's newest checkpoint, by its shapes."""
    try:
        step = latest_round(saved_in)
        if step is None:
            return None
        saved = saved_leaves(resolve_folder(saved_in) / CHECKPOINTS, step)
        run = experiment.build()
        with jax.set_mesh(run.mesh):
            params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
            state = jax.eval_shape(run.algorithm.init, params)
    except Exception:  # training reports it, if it is still there when the values are allowed
        return None
    wanted = ocp.tree.to_flat_dict(state)
    try:
        check_same_leaves(wanted, saved.shapes, step)
        shapes = shapes_of_same_clients(state, saved)
        for path, leaf in wanted.items():
            # The first axis of any leaf but the model's can be the participants'.
            participants = leaf.shape[0] if leaf.shape else None
            if not has_saved_shape(leaf, shapes[path], path, participants):
                check_resizable(state, shapes[path][0], leaf.shape[0])
    except ValueError as error:
        return str(error)
    return None
