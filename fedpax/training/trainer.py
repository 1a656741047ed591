"""The training loop of every experiment."""

import errno
import math
import os
import shlex
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.clients.cohort_stream import CohortStream
from fedpax.training.agreement import check_agreement
from fedpax.training.checkpoint import Checkpoints
from fedpax.training.compiled_round import compile_round, init_state
from fedpax.training.configuration import (
    resolve_job_log_dir,
    to_json,
    write_configuration,
)
from fedpax.training.console import print_error
from fedpax.training.experiment import Experiment, Run
from fedpax.training.job_dir import JobDirLock, check_configuration
from fedpax.training.logging import NonFiniteError, RoundLogger
from fedpax.training.metrics import SCALARS, MetricsWriter
from fedpax.training.participant_states import ParticipantRule, check_rule
from fedpax.training.preemption import PreemptionGuard
from fedpax.training.prefetch import Prefetch
from fedpax.training.progress import Progress, describe_devices
from fedpax.training.saved_rounds import check_latest_round, latest_round


class StorageError(OSError):
    """A run's folder cannot be written, for example because the disk is full."""


class TrainingResult(NamedTuple):
    """The result of a call of `train`.

    Attributes:
        rounds: number of completed rounds of the run; all of them are saved.
        finished: whether these are all rounds of the experiment.
        rounds_trained: number of rounds that this call trained; 0 if the run was finished already.
        signal: the signal that stopped the call, or None.
        evaluation: the newest held-out metrics of this call, or None.
    """

    rounds: int
    finished: bool
    rounds_trained: int
    signal: signal.Signals | None
    evaluation: dict[str, float] | None


def train(
    experiment: Experiment,
    job_log_dir: str | Path,
    *,
    exp: str = "",
    allow_config_change: Collection[str] = (),
    participant_states: ParticipantRule = "average",
) -> TrainingResult:
    """Train an experiment in a folder, or resume the run that the folder holds.

    The folder gets `config.json`, `metrics.jsonl`, `tensorboard/` and `checkpoints/`. A run that is
    killed at any moment resumes from its last checkpoint, and its final parameters equal those of
    an uninterrupted run bit by bit. SIGTERM and Ctrl-C save after the current round.

    Throughput is measured from the end of one round to the end of the next. It includes the round
    and the wait for its cohort, but not compilation, evaluation and saving.
    `input_wait_fraction` is an upper bound on the fraction of this time in which the devices were
    idle because the next cohort was not ready.

    Args:
        experiment: the experiment.
        job_log_dir: the run's folder, on a file system that every process sees.
        exp: the experiment's name on the command line, recorded in `config.json`.
        allow_config_change: paths of fields that may differ from the folder's configuration, such
            as `["mesh", "optimizer.learning_rate"]`. A path allows all fields below it. Default:
            only `training.rounds` may grow, once the run is finished.
        participant_states: how to make the states that participants keep between rounds, such as
            islands' inner optimizers, when the run resumes with another number of participants:
            "average" keeps their mean, "copy" gives participant i the state of saved participant
            i mod n (`fedpax.training.participant_states`). The model and the state of the outer
            optimizer are those of the checkpoint in any case.

    Returns:
        The progress. `fedpax.training.checkpoint.load_params` loads the model.

    Raises:
        ConfigurationError: the folder holds another configuration, or another process trains there.
        DamagedCheckpointError: the newest checkpoint is damaged.
        ValueError: there are too few devices, the algorithm breaks its contract, or it does not
            allow another number of participants.
        NonFiniteError: the loss or a parameter is not finite.
        StorageError: the folder cannot be written, for example because the disk is full.
    """
    if isinstance(allow_config_change, str):
        allow_config_change = allow_config_change.split(",")
    check_rule(participant_states)
    folder = resolve_job_log_dir(job_log_dir)
    with JobDirLock(folder):
        check_agreement(folder, experiment)
        check_configuration(folder, experiment, exp, allow_config_change=allow_config_change)
        done = latest_round(folder) or 0
        if done >= experiment.training.rounds:
            check_latest_round(folder)
            return TrainingResult(done, True, rounds_trained=0, signal=None, evaluation=None)
        try:
            return _train(experiment, folder, exp, allow_config_change, participant_states)
        except Exception as error:
            if (reason := _storage_failure(error)) is None:
                raise
            raise StorageError(_stopped(exp, experiment, folder, reason)) from error


def _train(
    experiment: Experiment,
    folder: Path,
    exp: str,
    allow_config_change: Collection[str],
    participant_states: ParticipantRule,
) -> TrainingResult:
    started = time.perf_counter()
    training = experiment.training
    primary = jax.process_index() == 0
    first = done = saved = latest_round(folder) or 0
    run = experiment.build()
    if not isinstance(run, Run):
        raise ValueError(
            f"{type(experiment).__name__}.build returns a {type(run).__name__}, expected a "
            "fedpax.training.experiment.Run. Return one from build."
        )
    configuration = to_json(experiment)
    evaluation: dict[str, float] | None = None
    with (
        jax.set_mesh(run.mesh),
        Checkpoints(
            folder, keep=training.keep_checkpoints, keep_every=training.keep_every
        ) as checkpoints,
        MetricsWriter(folder, after=first, enabled=primary) as metrics,
        Progress(
            exp or type(experiment).__name__,
            rounds_done=first,
            rounds=training.rounds,
            item_unit=run.item_unit,
            enabled=primary,
        ) as progress,
    ):
        if first:
            _restore_stream(run.cohorts, checkpoints.restore_stream_state(), allow_config_change)
        with Prefetch(run.cohorts, run.shardings.cohort, training.rounds - first) as prefetch:
            cohort = prefetch.peek()
            _announce(progress, run, folder, first)
            # Before the compilation, which takes long: these folders can be missing or damaged.
            frozen = () if run.frozen is None else (run.frozen.load(),)
            initial = None if first or run.initial is None else run.initial.load()
            progress.note("compiling")
            compiled = compile_round(run, cohort)
            if first:
                participants = compiled.num_participants
                state = checkpoints.restore_state(compiled.state, participants, participant_states)
                before = checkpoints.saved_participants()
                if before not in (None, participants):
                    progress.note(
                        f"{participants} {run.placement} continue from the states of {before} "
                        f"(--participant_states={participant_states})"
                    )
            else:
                state = init_state(run, compiled, training.seed, initial)
            logger = RoundLogger(
                metrics,
                progress,
                started=started,
                items_per_round=run.items_per_round,
                bytes_across_placement=compiled.bytes_across_placement,
                stop_on_non_finite=training.stop_on_non_finite,
            )
            # Only now, because a configuration that cannot run must not bind the folder.
            if primary:
                write_configuration(folder, experiment, exp)
            logger.log_run(compiled.num_parameters, compiled.num_participants, run.item_unit)

            def save() -> None:
                # The metrics first: a run that resumes from a checkpoint must find its lines.
                logger.flush()
                logger.check_params(done, state.params)
                metrics.sync()
                checkpoints.save(
                    done, state, stream_state, configuration, compiled.num_participants
                )

            # Until here there is nothing to save, and a signal stops the process immediately.
            with PreemptionGuard() as preemption:
                try:
                    while done < training.rounds and not preemption.should_stop(done):
                        asked = time.perf_counter()
                        cohort, stream_state = prefetch.next()
                        busy = logger.is_device_busy()
                        idle_seconds = 0.0 if busy else time.perf_counter() - asked
                        state, values = compiled.round(state, cohort, *frozen)
                        done += 1
                        logger.log_round(done, values, idle_seconds)
                        if _is_due(done, training.evaluate_every, training.rounds):
                            logger.flush()
                            evaluation = run.evaluate(state.params)
                            logger.log_evaluation(done, evaluation)
                        if _is_due(
                            done, training.checkpoint_every, training.rounds, training.keep_every
                        ):
                            save()
                            logger.restart_clock()
                            saved = done
                    if done > saved:
                        save()
                except NonFiniteError as error:
                    checkpoints.wait()
                    remedy = (
                        "Start again with a smaller learning rate or with clipped gradients. To "
                        "continue anyway, add --training.stop_on_non_finite=False and "
                        "--allow_config_change=training.stop_on_non_finite."
                    )
                    reason = f"{error}, expected finite values"
                    raise NonFiniteError(
                        _stopped(exp, experiment, folder, reason, remedy)
                    ) from None
                checkpoints.wait()
    return TrainingResult(
        done,
        finished=done == training.rounds,
        rounds_trained=done - first,
        signal=preemption.signal if done < training.rounds else None,
        evaluation=evaluation,
    )


def _announce(progress: Progress, run: Run, folder: Path, first: int) -> None:
    """Tell the user what is about to run, and where to see it, before the compilation."""
    params = jax.eval_shape(run.init, jax.random.key(0))
    num_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    progress.note(f"{num_parameters:,} parameters on {describe_devices(run.mesh)}")
    progress.note(
        f"folder {folder}; live view: tensorboard --logdir {shlex.quote(str(folder / SCALARS))}"
    )
    if run.frozen is not None:
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.frozen.shapes))
        progress.note(f"reading {size:,} frozen parameters, {run.frozen.source}")
    if first:
        kept = "" if run.initial is None else f"; not reading {run.initial.source} again"
        progress.note(f"resuming from round {first}{kept}")
    elif run.initial is not None:
        progress.note(f"reading the initial parameters, {run.initial.source}")


def _restore_stream(stream: CohortStream, saved: Any, allow_config_change: Collection[str]) -> None:
    """Move a stream to a saved position, or to the same round if its settings were changed.

    A stream whose cohorts depend on its settings and the round alone has the round in its state.
    Another stream has no position that corresponds to the saved one: it restarts.
    """
    try:
        stream.set_state(saved)
    except ValueError as error:
        if not allow_config_change:
            raise
        fresh = stream.get_state()
        if isinstance(fresh, dict) and isinstance(saved, dict) and "round" in fresh.keys() & saved:
            stream.set_state({**fresh, "round": saved["round"]})
            print_error(f"The data continue after round {saved['round']}, but differ: {error}")
        else:
            print_error(f"The data start again from their first round: {error}")


def _is_due(round_number: int, every: int, rounds: int, also_every: int = 0) -> bool:
    """Return whether an action that runs every few rounds, and after the last, runs now."""
    periods = [period for period in (every, also_every) if period > 0]
    return round_number == rounds or any(round_number % period == 0 for period in periods)


def _storage_failure(error: BaseException) -> str | None:
    """Return the reason if an error says that files cannot be written."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in numbers:
        return os.strerror(error.errno)
    # Orbax and TensorStore wrap the error of the operating system in others.
    found = [os.strerror(number) for number in numbers if os.strerror(number) in str(error)]
    return found[0] if found else None


def _stopped(
    exp: str, experiment: Experiment, folder: Path, reason: str, remedy: str | None = None
) -> str:
    kept = latest_round(folder)
    return (
        f"{exp or type(experiment).__name__} stopped: {reason}. "
        f"{f'The checkpoint of round {kept}' if kept else 'No checkpoint'} is kept in {folder}. "
        + (remedy or "Make room on the disk, then run the same command again to resume.")
    )
