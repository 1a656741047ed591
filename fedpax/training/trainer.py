"""The training loop of every experiment."""

import functools
import os
import signal
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax

from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint import CheckpointWriteError, LostCheckpointDirError
from fedpax.checkpoints.checkpoint_files import check_latest_round
from fedpax.checkpoints.exports import Exports
from fedpax.checkpoints.participant_states import ParticipantRule, check_rule
from fedpax.checkpoints.saved_state import load_params
from fedpax.checks import check_integer_fields
from fedpax.console import count_of
from fedpax.elastic.membership import Membership
from fedpax.errors import ConfigurationError, FedpaxError
from fedpax.files import NO_ROOM
from fedpax.garbage_collection import collect_seldom
from fedpax.preemption import PreemptionGuard
from fedpax.run_files.configuration import read_configuration_json, write_configuration
from fedpax.run_files.evaluations import Evaluations
from fedpax.run_files.goodput import GoodputClock, describe_goodput
from fedpax.run_files.metrics_log import last_line, last_rounds, read_log
from fedpax.run_files.paths import (
    is_remote,
    latest_round,
    resolve_checkpoint_dir,
    resolve_job_log_dir,
)
from fedpax.training.agreement import check_same_data
from fedpax.training.compiled_round import with_shardings
from fedpax.training.diagnostics import Watchdog, check_profile_at
from fedpax.training.early_stop import EarlyStop
from fedpax.training.experiment import Experiment, Run, StoredParams, check_run
from fedpax.training.folder_owners import CheckpointDir
from fedpax.training.resume_checks import (
    ResumeOptions,
    TrainingJob,
    check_configuration,
    lock_run,
)
from fedpax.training.round_logger import NonFiniteError
from fedpax.training.round_loop import RoundLoop
from fedpax.training.run_writers import RunFiles, open_files
from fedpax.training.spikes import RepeatedSpikesError
from fedpax.training.startup_report import check_processes
from fedpax.training.tracker import track


class StorageError(FedpaxError, OSError):
    """A run's folder cannot be written, for example because the disk is full."""

    exit_status = 1


class TrainingResult(NamedTuple):
    """The result of a call of `train`."""

    rounds: int  # number of completed rounds of the run; all of them are saved
    finished: bool  # whether these are all rounds of the experiment, or the run has stopped early
    # number of rounds that this call trained; 0 if the run was finished already
    rounds_trained: int
    signal: signal.Signals | None
    evaluation: dict[str, float] | None
    # why the run ended before its last round (`training.stop_after`), or None
    stopped_early: str | None = None


def train(
    experiment: Experiment,
    job_log_dir: str | Path,
    *,
    exp: str = "",
    allow_config_change: Collection[str] = (),
    participant_states: ParticipantRule = "average",
    membership: Membership | None = None,
) -> TrainingResult:
    """Train an experiment in a folder, or resume the run that the folder holds.

    A run that is killed at any moment resumes from its last checkpoint, and its final parameters
    equal the parameters of an uninterrupted run bit by bit. SIGTERM and Ctrl-C save after the
    current round.

    Args:
        experiment: the experiment.
        job_log_dir: the run's folder, which every process sees unless `training.checkpoint_dir` is
            set.
        exp: the experiment's name on the command line, recorded in `config.json`.
        allow_config_change: as of `fedpax.train`.
        participant_states: how to make participants' states when the run resumes with another
            number of participants: "average" or "copy" (`fedpax.checkpoints.resize_weights`).
        membership: the part of this process in an elastic job (`fedpax train --elastic`).

    Returns:
        The progress. `fedpax.checkpoints.saved_state.load_params` loads the model.

    Raises:
        ConfigurationError: the folder holds another configuration, or another process trains there.
        DamagedCheckpointError: the newest checkpoint is damaged.
        ValueError: there are too few devices, the algorithm breaks its contract, or it does not
            allow another number of participants.
        NonFiniteError: the loss or the state is not finite.
        RepeatedSpikesError: the loss spikes again and again.
        StorageError: the folder or its `training.checkpoint_dir` cannot be written, for example
            because the disk is full.
    """
    return train_with(
        _train, experiment, job_log_dir, exp, allow_config_change, participant_states, membership
    )


def train_with(
    work: Callable[[TrainingJob], TrainingResult],
    experiment: Experiment,
    job_log_dir: str | Path,
    exp: str,
    allow_config_change: Collection[str],
    participant_states: ParticipantRule = "average",
    membership: Membership | None = None,
) -> TrainingResult:
    """Train in a folder by a function that runs the rounds which are left."""
    if isinstance(allow_config_change, str):
        allow_config_change = allow_config_change.split(",")
    check_integer_fields(experiment)
    check_rule(participant_states)
    check_profile_at(experiment.training.profile_at, experiment.training.rounds)
    folder = resolve_job_log_dir(job_log_dir)
    saved_in = resolve_checkpoint_dir(folder, experiment.training.checkpoint_dir)
    lock = lock_run(folder, experiment, exp, allow_config_change, saved_in)
    with lock, ExitStack() as stack:
        experiment.read_inputs(folder)
        checkpoint_dir = None
        if saved_in != folder:
            check_configuration(
                saved_in,
                experiment,
                exp,
                allow_config_change=allow_config_change,
                flag="--training.checkpoint_dir",
            )
            checkpoint_dir = stack.enter_context(CheckpointDir(saved_in, folder))
        options = ResumeOptions(allow_config_change, participant_states, membership)
        job = TrainingJob(experiment, folder, saved_in, checkpoint_dir, exp, options)
        done = latest_round(saved_in) or 0
        if done >= experiment.training.rounds:
            check_latest_round(saved_in)
            if jax.process_index() == 0 and read_configuration_json(folder) is None:
                write_configuration(folder, experiment, exp)  # it was lost, and commands need it
            # A kill can have prevented the last one.
            with _exports(job):
                _send_rest(job)
            return TrainingResult(done, True, rounds_trained=0, signal=None, evaluation=None)
        if (stopped := _stopped_early(job, done)) is not None:
            check_latest_round(saved_in)
            _send_rest(job)
            return TrainingResult(done, True, 0, None, None, stopped)
        try:
            return work(job)
        except (NonFiniteError, RepeatedSpikesError) as error:
            raise type(error)(_stopped(job, *_reason_and_remedy(error))) from None
        except Exception as error:
            if (reason := _storage_failure(error, saved_in)) is None:
                raise
            raise StorageError(_stopped(job, *reason)) from error


def _train(job: TrainingJob) -> TrainingResult:
    training = job.experiment.training
    with ExitStack() as resources:
        with collect_seldom():
            loop, files, clock = _open_loop(job, resources)
            loop.start()
        # Until here there is nothing to save, and a signal stops the process immediately.
        with PreemptionGuard() as preemption:
            try:
                loop.train(preemption)
            except (NonFiniteError, RepeatedSpikesError):
                files.checkpoints.wait()  # the message names the newest
                raise
        finished = loop.done == training.rounds or loop.stopped_early is not None
        files.tracker.finished = finished
        files.progress.note(describe_goodput(clock.seconds()))
    return TrainingResult(
        loop.done,
        finished=finished,
        rounds_trained=loop.rounds_trained,
        signal=None if finished else preemption.signal,
        evaluation=loop.evaluation,
        stopped_early=loop.stopped_early,
    )


def _open_loop(job: TrainingJob, resources: ExitStack) -> tuple[RoundLoop, RunFiles, GoodputClock]:
    """Build the run, and open what it needs from its start to its end."""
    experiment, folder, training = job.experiment, job.folder, job.experiment.training
    enter, primary = resources.enter_context, jax.process_index() == 0
    membership = job.options.membership
    copy = None if membership is None else membership.find_copy()
    first = (latest_round(job.saved_in) or 0) if copy is None else copy.round
    clock = enter(GoodputClock(folder, after=first, enabled=primary))
    run = build_run(experiment)
    enter(jax.set_mesh(run.mesh))
    if jax.process_count() > 1:  # else the data are opened while the round is compiled
        check_same_data(run.cohorts, run.heldout_fingerprint)
    exports, checkpoint_dir = enter(_exports(job)), job.checkpoint_dir
    files = enter(
        open_files(
            experiment,
            folder,
            job.exp,
            first,
            run.item_unit,
            enabled=primary,
            saved_in=job.saved_in,
            exports=exports,
            before_complete=None if checkpoint_dir is None else checkpoint_dir.before_complete,
        )
    )
    if not first and (line := last_line(folder)) is not None and line["round"]:
        files.progress.note(
            f"no checkpoint of the {count_of(line['round'], 'logged round')}: starting from round 0"
        )
    loop = enter(
        RoundLoop(
            job,
            run,
            files=files,
            clock=clock,
            early_stop=EarlyStop(training, job.saved_in, files.checkpoints, exports),
            copy=copy,
        )
    )
    enter(
        Watchdog(
            clock,
            folder,
            round_number=lambda: loop.current_round,
            hang_after=training.hang_after,
            on_hang=training.on_hang,
        )
    )
    return loop, files, clock


def build_run(experiment: Experiment) -> Run:
    """Build a run, and begin it from the model that the training names."""
    run = experiment.build()
    check_run(run, type(experiment).__name__)
    check_processes(experiment, run)
    return begin_from(run, experiment.training.begin_from)


def _stopped_early(job: TrainingJob, done: int) -> str | None:
    """Return why the run in a folder has stopped early, before anything is compiled."""
    training = job.experiment.training
    if not training.stop_after or not done or jax.process_count() > 1:
        return None  # processes find it out together, once they have started
    log = read_log(job.folder, last_rounds, after=done, keep=lambda line: line["round"] <= done)
    return Evaluations(log.lines, training.keep_best, training.stop_after).reason


def _send_rest(job: TrainingJob) -> None:
    """Send the metrics of a finished run that its tracker has not got."""
    enabled, saved_in = jax.process_index() == 0, job.saved_in
    with track(job.experiment, job.folder, job.exp, saved_in=saved_in, enabled=enabled) as tracker:
        tracker.finished = True
        for line in read_log(job.folder, last_rounds).lines if tracker.enabled else ():
            tracker.add(line, kept=True)


def _exports(job: TrainingJob) -> Exports:
    training = job.experiment.training
    return Exports(
        job.folder,
        run=job.saved_in,
        every=training.export_every,
        last=training.rounds,
        write=functools.partial(job.experiment.write_model, exp=job.exp),
        enabled=jax.process_index() == 0,
    )


def _reason_and_remedy(error: NonFiniteError | RepeatedSpikesError) -> tuple[str, str]:
    if isinstance(error, NonFiniteError):
        return (
            f"{error}, expected finite values",
            "Start again with a smaller learning rate or with clipped gradients, or continue with "
            "--training.on_spike=skip or =roll_back and --allow_config_change=training.on_spike. "
            "If the batches of a participant hold NaN, remove it, or pass a robust aggregator such "
            "as coordinate_median(). "
            "To continue anyway, add --training.stop_on_non_finite=False and "
            "--allow_config_change=training.stop_on_non_finite.",
        )
    return (
        str(error),
        "Look at the loss in its metrics.jsonl. Start again with a smaller learning rate or with "
        "clipped gradients, or continue with a larger --training.spike_deviations or "
        "--training.spike_limit and --allow_config_change=training.",
    )


def _storage_failure(error: BaseException, saved_in: Path) -> tuple[str, str] | None:
    """Return the reason and the remedy if an error says that files cannot be written."""
    if isinstance(error, LostCheckpointDirError):
        remedy = "Keep that run, or stop it and run the same command again to resume."
        return f"{error}".removesuffix("."), remedy
    if is_remote(saved_in) and isinstance(error, CheckpointWriteError):
        return f"{error}".removesuffix("."), "Run the same command again to resume."
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith(str(saved_in)):
        remedy = "Run the same command again: it resumes from the remaining checkpoints."
        return f"{error.filename} was removed while the run trained", remedy
    for number, remedy in NO_ROOM.items():
        # Orbax and TensorStore wrap the error of the operating system in others.
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
            return os.strerror(number), f"{remedy}, then run the same command again to resume."
    return None


def _stopped(job: TrainingJob, reason: str, remedy: str) -> str:
    try:
        kept = latest_round(job.saved_in)
        saved = f"{f'The checkpoint of round {kept}' if kept else 'No checkpoint'} is"
    except Exception:  # the bucket is away
        saved = "Its checkpoints are"
    return f"{job.name} stopped: {reason}. {saved} kept in {job.saved_in}. {remedy}"


def begin_from(run: Run, job_log_dir: str | None) -> Run:
    """Give a run the model of another run as its initial parameters."""
    # Optimizer, schedule and position in the data are a new run's.
    if job_log_dir is None:
        return run
    source = f"training.begin_from={job_log_dir}"
    if run.initial is not None:
        raise ConfigurationError(
            f"{source} and {run.initial.source} are given, expected one of them: both are initial "
            "parameters. Leave one out."
        )
    shapes = jax.eval_shape(run.init, jax.random.key(0))
    like = with_shardings(shapes, run.resolved_shardings.params)

    def load() -> Params:
        try:
            return load_params(job_log_dir, like=like)
        except (FileNotFoundError, ValueError) as error:
            raise ConfigurationError(f"{source}: {error}") from error

    return run._replace(initial=StoredParams(source, like, load))
