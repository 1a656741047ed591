"""The one loop that trains every experiment."""

import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.training.checkpoint import Checkpoints, latest_round
from fedpax.training.compiled_round import compile_round, fresh_state
from fedpax.training.configuration import claim, to_json
from fedpax.training.experiment import BatchStream, Experiment
from fedpax.training.logging import NonFiniteError, Recorder
from fedpax.training.metrics import MetricsWriter
from fedpax.training.preemption import Interruption
from fedpax.training.prefetch import Prefetch
from fedpax.training.progress import Progress


class Outcome(NamedTuple):
    """How a call of :func:`train` ended.

    Attributes:
        rounds: how many rounds the run has now.
        finished: whether these are all.
        trained: how many of them this call did; 0 if the run was finished already.
        signal: the signal that stopped it, if one did.
        evaluation: the newest held-out metrics of this call.
    """

    rounds: int
    finished: bool
    trained: int
    signal: signal.Signals | None
    evaluation: dict[str, float] | None


def train(
    experiment: Experiment,
    job_log_dir: str | Path,
    *,
    exp: str = "",
    accept_changes: bool = False,
) -> Outcome:
    """Trains an experiment in a folder, or goes on where the folder stands.

    The folder gets ``config.json``, ``metrics.jsonl``, ``tensorboard/`` and ``checkpoints/``. A
    run that was killed at any moment goes on from its last checkpoint, and its parameters are in
    the end bitwise those of an unbroken run. SIGTERM and Ctrl-C save after the current round.

    Throughput counts from one round's end to the next, so it holds the rounds and the waiting for
    data, but neither compilation nor evaluation nor saving. ``input_wait_fraction`` is the part of
    that time in which the devices had nothing to do but wait for the batches, which a thread
    prepares meanwhile; at most so, as what they still did while the loop waited is not known.

    Args:
        experiment: what to train.
        job_log_dir: the folder, on a file system that every process sees.
        exp: the experiment's name on the command line, recorded in ``config.json``.
        accept_changes: go on in a folder of another configuration: another mesh, more rounds, or
            another number of participants. Where the data are dealt out otherwise, they begin anew.

    Returns:
        How far it came. :func:`fedpax.training.checkpoint.load_params` loads the model.

    Raises:
        ConfigurationError: if the folder belongs to another configuration.
        ValueError: if there are too few devices, or the algorithm breaks its contract.
        NonFiniteError: if the loss or the parameters are not finite any more.
    """
    started = time.perf_counter()
    training = experiment.training
    name = exp or type(experiment).__name__
    primary = jax.process_index() == 0
    claim(job_log_dir, experiment, exp, accept_changes=accept_changes, writes=False)
    first = done = latest_round(job_log_dir) or 0
    if done >= training.rounds:
        return Outcome(done, finished=True, trained=0, signal=None, evaluation=None)
    run = experiment.build()
    configuration = to_json(experiment)
    evaluation: dict[str, float] | None = None
    with (
        Interruption() as interruption,
        jax.set_mesh(run.mesh),
        Checkpoints(job_log_dir, keep=training.keep_checkpoints) as checkpoints,
        MetricsWriter(job_log_dir, after=first, writes=primary) as metrics,
        Progress(name, first=first, rounds=training.rounds, shows=primary) as progress,
    ):
        if first:
            _go_on(run.batches, checkpoints.restore_batches(), accept_changes)
        with Prefetch(run.batches, run.shardings.batches, training.rounds - first) as prefetch:
            program = compile_round(run, prefetch.peek())
            if first:
                state = checkpoints.restore_state(program.state, program.participants)
            else:
                state = fresh_state(run, program, training.seed)
            recorder = Recorder(
                metrics,
                progress,
                started=started,
                tokens=run.items_per_round,
                bytes_across_placement=program.bytes_across_placement,
                stop_on_non_finite=training.stop_on_non_finite,
            )
            # Now that it can run: a run that is refused leaves the folder to another.
            claim(job_log_dir, experiment, exp, accept_changes=accept_changes, writes=primary)
            recorder.run(program.parameters, program.participants)

            def save() -> None:
                # The lines first: a run that goes on from a checkpoint must find all of them.
                recorder.flush()
                recorder.check_params(done, state.params)
                metrics.sync()
                checkpoints.save(done, state, position, configuration)
                recorder.restart_clock()

            try:
                while done < training.rounds and not interruption.reached(done):
                    asked = time.perf_counter()
                    batches, position = prefetch.next()
                    idle = 0.0 if recorder.busy() else time.perf_counter() - asked
                    state, values = program.round(state, batches)
                    done += 1
                    recorder.dispatched(done, values, idle)
                    if _due(done, training.evaluate_every, training.rounds):
                        recorder.flush()
                        evaluation = run.evaluate(state.params)
                        recorder.evaluation(done, evaluation)
                    if _due(done, training.checkpoint_every, training.rounds):
                        save()
                if done > (checkpoints.latest_round() or 0):
                    save()
            except NonFiniteError as error:
                kept = checkpoints.latest_round()
                raise NonFiniteError(
                    f"{name} stopped: {error}. "
                    f"{f'The checkpoint of round {kept}' if kept else 'No checkpoint'} is kept. "
                    "Start anew with a smaller learning rate or clipped gradients, or go on "
                    "regardless with --training.stop_on_non_finite=False --accept_changes."
                ) from None
    return Outcome(
        done,
        finished=done == training.rounds,
        trained=done - first,
        signal=interruption.signal if done < training.rounds else None,
        evaluation=evaluation,
    )


def _go_on(stream: BatchStream, position: Any, accept_changes: bool) -> None:
    """Goes to where the stream of batches stood, unless it is another stream now."""
    try:
        stream.set_state(position)
    except ValueError as error:
        if not accept_changes:
            raise
        print(f"The data begin anew. {error}", file=sys.stderr)


def _due(round_number: int, every: int, rounds: int) -> bool:
    """Whether something that happens every so many rounds, and after the last, happens now."""
    return round_number == rounds or (every > 0 and round_number % every == 0)
