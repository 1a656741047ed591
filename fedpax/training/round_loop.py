"""The loop of rounds from a checkpoint on, which rolls back to one where a loss spikes."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithm import Params, State
from fedpax.checkpoints.run_position import gather_stream_state, restore_stream
from fedpax.clients.cohort import Cohort
from fedpax.elastic.host_copies import HostCopy
from fedpax.elastic.membership import CopiesOfRounds
from fedpax.preemption import PreemptionGuard
from fedpax.processes.communication import gather_json
from fedpax.run_files.configuration import to_json
from fedpax.run_files.goodput import GoodputClock, line_values
from fedpax.run_files.metrics import MetricsWriter
from fedpax.training.agreement import check_same_state
from fedpax.training.compiled_round import CompiledLengths, CompiledRound, compile_round, init_state
from fedpax.training.diagnostics import Profile
from fedpax.training.early_stop import EarlyStop
from fedpax.training.evaluation import heldout_metrics
from fedpax.training.experiment import Run
from fedpax.training.flops_utilization import utilization_of
from fedpax.training.prefetch import Prefetch, put_on_mesh
from fedpax.training.resume_checks import TrainingJob, describe_end_of_schedule
from fedpax.training.round_logger import EMPTY, RoundLogger, is_empty
from fedpax.training.run_writers import RunFiles
from fedpax.training.spikes import FiniteCheck, Spike, SpikeHistory
from fedpax.training.startup_report import UNREAD_MASK, announce, describe_aggregator
from fedpax.training.training_config import is_due, last_due_before


class RoundLoop(AbstractContextManager["RoundLoop"]):
    """The rounds of a run, from the newest checkpoint in its folder on."""

    # Resuming and rolling back both call `start`, so a kill after a roll back changes no result.

    def __init__(
        self,
        job: TrainingJob,
        run: Run,
        *,
        files: RunFiles,
        clock: GoodputClock,
        early_stop: EarlyStop,
        copy: HostCopy | None = None,
    ) -> None:
        self._experiment, self._folder, self._exp = job.experiment, job.folder, job.exp
        self._run = run
        self._progress, self._tracker, self._checkpoints, self._metrics = files
        self._options, self._early_stop, self._clock = job.options, early_stop, clock
        training = self._training = job.experiment.training
        self._configuration = to_json(job.experiment)
        kept = training.checkpoint_every, training.keep_every
        self._saving_periods = (*kept, training.export_every)
        self._skips = training.on_spike == "skip"
        self._replicated = NamedSharding(run.mesh, PartitionSpec())
        self._copy, self._copies = copy, CopiesOfRounds(job.options.membership)
        first = self._checkpoints.latest_round() if copy is None else copy.round
        self.done = self._first = first or 0
        self._current = self._first + 1
        self._dispatched = self._first  # unlike `done`, it never decreases
        self.evaluation: dict[str, float] | None = None
        self._rounds: CompiledLengths | None = None
        self._frozen: tuple[Any, ...] = ()
        # Taken before any cohort is drawn: the position of round 0, for a roll back to it.
        rolls_back = self._training.on_spike == "roll_back" or copy is not None
        self._beginning = gather_stream_state(run.cohorts.get_state()) if rolls_back else None
        self._utilization = utilization_of(run)
        self._resources = ExitStack()

    @property
    def rounds_trained(self) -> int:
        """Number of rounds that this process has added to the run."""
        return max(0, self.done - self._first)

    @property
    def current_round(self) -> int:
        """The round that this process waits for, evaluates, saves or prepares."""
        # The devices can be a round behind `done`.
        logger: RoundLogger | None = getattr(self, "_logger", None)  # made by `start`
        waits_for = None if logger is None else logger.waits_for
        return self._current if waits_for is None else waits_for

    def start(self) -> None:
        """Move state, data and metrics to round `done`; compile the round the first time."""
        self._resources = ExitStack()
        self._read_metrics()
        self._open_data()
        # Before the long compilation: these folders can be missing or damaged.
        initial = None if self.done or self._run.initial is None else self._run.initial.load()
        if self._rounds is None:
            self._compile()
        state = self._restore(self._compiled_round, initial)
        if state is None:
            self._restart_from_checkpoint()
        else:
            check_same_state(state, self.done)
            self._early_stop.check_metric(functools.partial(heldout_metrics, self._run, state))
            self._open(state)

    def _read_metrics(self) -> None:
        """Read the metrics that are kept, and the spikes and evaluations among them."""
        primary = jax.process_index() == 0
        if self._rounds is not None:  # the run begins again
            self._metrics = MetricsWriter(
                self._folder, after=self.done, enabled=primary, listener=self._tracker.add
            )
        if jax.process_count() > 1:  # hosts need not share the folder
            self._metrics.kept = gather_json(self._metrics.kept if primary else [])[0]
        self._early_stop.start(self._metrics.kept)
        self._history = SpikeHistory(self._metrics.kept, self._training)

    def _open_data(self) -> None:
        """Move the data to round `done`, and start to draw the cohorts that are left."""
        self._move_stream()
        rounds_left = self._training.rounds - self.done
        prefetch = Prefetch(self._run.cohorts, self._run.resolved_shardings.cohort, rounds_left)
        self._prefetch = self._resources.enter_context(prefetch)

    def _compile(self) -> None:
        """Announce the run, load its frozen values, and compile its round."""
        run, cohort = self._run, self._prefetch.peek()
        announce(
            self._progress,
            self._experiment,
            run,
            jax.tree.leaves(cohort)[0].shape[0],
            self._folder,
            self.done,
            self._utilization,
        )
        self._frozen = () if run.frozen is None else (run.frozen.load(),)
        self._progress.note("compiling")
        norm = self._training.update_norm
        compile = functools.partial(compile_round, run, skip_spikes=self._skips, update_norm=norm)
        self._rounds = CompiledLengths(run.cohorts, cohort, compile)
        first = self._rounds.first
        if first.ignores_mask:
            self._progress.note(UNREAD_MASK)
        for line in describe_aggregator(run, first.state, first.metrics, first.num_participants):
            self._progress.note(line)

    @property
    def _compiled_round(self) -> CompiledRound:
        assert self._rounds is not None
        return self._rounds.first

    def _round_of(self, number: int, cohort: Cohort) -> CompiledRound:
        """Return the compiled round of a cohort, which can be the first of its length."""
        assert self._rounds is not None
        return self._rounds.of(number, cohort, self._compiling)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Count the time of a block as compilation, and not as a step."""
        self._logger.flush()
        self._clock.enter("compile")
        yield
        self._clock.enter("step")
        self._logger.restart_clock()

    def _restore(self, compiled: CompiledRound, initial: Params | None) -> State | None:
        """Restore or make the state of round `done`; None if copies lack a part of it."""
        if self._copy is not None:
            assert self._options.membership is not None
            return self._options.membership.restore(self._copy, compiled.state)
        if self.done:
            return self._restore_checkpoint(compiled)
        return init_state(self._run, compiled.state, self._training.seed, initial)

    def _open(self, state: State) -> None:
        """Open the run's folder, which a run that cannot train does not change."""
        compiled, run = self._compiled_round, self._run
        self._state, self._finite = state, FiniteCheck(state)
        self._resources.enter_context(self._metrics)
        self._logger = RoundLogger(
            self._metrics,
            self._progress,
            clock=self._clock,
            history=self._history,
            items_per_round=run.items_per_round,
            bytes_across_placement=compiled.bytes_across_placement,
            stop_on_non_finite=self._training.stop_on_non_finite,
            utilization=self._utilization,
        )
        if jax.process_index() == 0:
            self._experiment.write_configuration(self._folder, self._exp)
        self._logger.log_run(compiled.num_parameters, compiled.num_participants, run.item_unit)
        self._saved = self.done
        self._clock.mark_checkpoint(self.done)

    def _move_stream(self) -> None:
        """Move the data to round `done`, and past the cohorts that led to spikes from there."""
        stream = self._run.cohorts
        if self._copy is not None:
            saved = self._copy.stream_state
            restore_stream(stream, saved, must_fit=False, beginning=self._beginning)
        elif self.done:
            saved = self._checkpoints.restore_position().stream
            must_fit = not self._is_changed()
            restore_stream(stream, saved, must_fit=must_fit, beginning=self._beginning)
        elif self._dispatched:
            stream.set_state(self._beginning)
        for _ in range(self._history.cohorts_left_out(self.done)):
            next(stream)

    def _is_changed(self) -> bool:
        """Return whether a change of the configuration since the checkpoint was allowed."""
        # An earlier process can have been allowed to make it.
        saved = self._checkpoints.restore_position().configuration
        now = self._configuration
        fields = (saved.keys() | now.keys()) - {"training"}
        differs = any(saved.get(field) != now.get(field) for field in fields)
        return differs or bool(self._options.allow_config_change)

    def _restore_checkpoint(self, compiled: CompiledRound) -> State:
        participants, rule = compiled.num_participants, self._options.participant_states
        state = self._checkpoints.restore_state(compiled.state, participants, rule, self._numbers)
        saved, membership = self._checkpoints.restore_position(), self._options.membership
        if membership is not None and saved.numbers is not None:
            state = membership.rejoin(state, list(saved.numbers))
        if self._checkpoints.is_resized and saved.participants is not None:
            self._progress.note(
                f"{participants} {self._run.placement} continue from the states of "
                f"{saved.participants} (--participant_states={rule})"
            )
        end = describe_end_of_schedule(self._experiment, self.done, state)
        if end and self._dispatched == self._first:  # a roll back does not repeat it
            self._progress.note(end)
        return state

    @property
    def _numbers(self) -> list[int] | None:
        return getattr(self._options.membership, "participants", None)

    def train(self, preemption: PreemptionGuard) -> None:
        """Train until the last round or a signal, and save; roll back at spikes if configured."""
        profile_at, note = self._training.profile_at, self._progress.note
        with Profile(profile_at, self._folder, note, done=self.done) as profile:
            while True:
                try:
                    self._train_rounds(preemption, profile)
                    break
                except Spike as spike:
                    self._roll_back(spike)
        self._clock.enter("save")
        while not self._checkpoints.is_saved():
            self._save()
            self._clock.enter("save")
        self._checkpoints.wait()
        self._clock.mark_checkpoint(self.done)

    def _train_rounds(self, preemption: PreemptionGuard, profile: Profile) -> None:
        training, logger, clock = self._training, self._logger, self._clock
        logger.restart_clock()
        while not self._is_finished and not preemption.should_stop(self._dispatched):
            number = self._current = self.done + 1
            profile.before(number, wait=logger.flush)
            clock.enter("input")
            with self._saved_if_raises():
                cohort, self._stream_state = self._prefetch.next()
            busy = logger.is_device_busy()
            waited = clock.enter("step")
            if busy:
                clock.move(waited, "input", "step")
            compiled = self._round_of(number, cohort)
            # Before the round, which may overwrite its memory.
            ids = getattr(cohort, "client_ids", None)
            empty = {} if ids is None else {EMPTY: is_empty(ids, cohort.num_examples)}
            threshold = (self._spike_threshold(number),) if self._skips else ()
            with jax.profiler.StepTraceAnnotation("round", step_num=number):
                self._state, values = compiled.round(self._state, *threshold, cohort, *self._frozen)
            self.done = number
            self._dispatched += 1
            logger.log_round(number, values | empty, idle_seconds=0.0 if busy else waited)
            if self.rounds_trained == 1:
                self._open_checkpoints()
            profile.after(number, wait=logger.flush)
            evaluates = is_due(number, training.rounds, training.evaluate_every)
            is_best = evaluates and self._evaluate()
            if is_best or is_due(number, training.rounds, *self._saving_periods):
                self._save()
            if self._copies.is_due(number):
                self._copy_to_host()
        if (reason := self.stopped_early) is not None:
            self._progress.note(f"stops after round {self.done}: {reason}")
            self._early_stop.log(self.done, self._metrics, line_values(clock.seconds()))
        if self.done > self._saved:
            self._save()

    @contextmanager
    def _saved_if_raises(self) -> Iterator[None]:
        """Save the completed rounds if the data raise; other processes would not save with it."""
        try:
            yield
        except (OSError, ValueError, TypeError, LookupError):
            if jax.process_count() == 1 and self.done > self._saved:
                self._save()
                self._checkpoints.wait()
                self._progress.note(f"the data end here; saved round {self.done}")
            raise

    def _open_checkpoints(self) -> None:
        """Open the folder of the checkpoints early: a failure must not wait for the first save."""
        self._logger.flush()
        self._clock.enter("save")
        self._checkpoints.open()
        self._clock.enter("step")
        self._logger.restart_clock()

    @property
    def stopped_early(self) -> str | None:
        """Why the run stops before its last round; None: it does not."""
        return self._early_stop.reason(self.done)

    @property
    def _is_finished(self) -> bool:
        return self.done >= self._training.rounds or self.stopped_early is not None

    def _copy_to_host(self) -> None:
        self._logger.flush()
        self._clock.enter("save")
        self._logger.check_state(self.done, self._state, self._finite)
        self._copies.save(self.done, self._state, self._stream_state)
        self._clock.mark_checkpoint(self.done)
        self._clock.enter("step")

    def _spike_threshold(self, number: int) -> jax.Array:
        """Return the threshold of a round, on the devices."""
        threshold: Any = np.asarray(self._history.threshold(number), np.float32)
        return put_on_mesh(threshold, self._replicated)

    def _evaluate(self) -> bool:
        """Evaluate; return whether to save the model as the best one so far."""
        self._logger.flush()
        self._clock.enter("evaluate")
        metrics = heldout_metrics(self._run, self._state)
        self.evaluation = self._logger.log_evaluation(self.done, metrics)
        is_best = self._early_stop.add(self.done, self.evaluation)
        self._clock.enter("step")
        return is_best

    def _save(self) -> None:
        self._logger.flush()
        self._clock.enter("save")
        self._logger.check_state(self.done, self._state, self._finite)
        # The metrics first: a run that resumes from a checkpoint must find its lines.
        self._metrics.sync()
        participants, numbers = self._compiled_round.num_participants, self._numbers
        position = (self._stream_state, self._configuration, participants, numbers)
        self._checkpoints.save(self.done, self._state, *position)
        self._saved = self.done
        self._clock.mark_checkpoint(self.done)
        self._clock.enter("step")
        self._logger.restart_clock()

    def _restart_from_checkpoint(self) -> None:
        """Begin at the newest checkpoint: the copies of the processes lack a part of the state."""
        self._resources.close()
        self._copy = None
        self.done = self._checkpoints.latest_round() or 0
        self._clock.lose_since(self.done)
        self._progress.restart(
            self.done, f"a lost process had a part of the state; resuming from round {self.done}"
        )
        self.start()

    def _roll_back(self, spike: Spike) -> None:
        """Return to a checkpoint before a spike, and leave out the cohorts up to the spike."""
        self._checkpoints.wait()
        # The checkpoint of a signal is the last choice: a run must not depend on signals.
        scheduled = last_due_before(spike.round, *self._saving_periods)
        to = self._checkpoints.delete_after(scheduled)
        self._clock.lose_since(to)
        record = self._history.roll_back(to, spike)
        self._metrics.write("spike", to, record | line_values(self._clock.seconds()))
        self._metrics.sync()
        self._resources.close()
        del self._state  # its memory is needed for the restored one
        self._copy = None
        self._copies.clear()  # a restart must not undo the roll back
        self.done = to
        self._progress.restart(to, f"{spike}; rolled back to round {to}")
        self.start()

    def __exit__(self, *error: Any) -> None:
        """Close the metrics and stop drawing cohorts."""
        self._resources.__exit__(*error)
