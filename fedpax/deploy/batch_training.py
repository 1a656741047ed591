"""Training by an engine for batch jobs: several rounds a job, in the folder of a run."""

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from fedpax.algorithm import LossFn, Params, loss_and_metrics
from fedpax.clients.cohort import MASK, Cohort
from fedpax.deploy.batch_work import Clients
from fedpax.errors import ConfigurationError
from fedpax.primitives import federated_map, federated_sum
from fedpax.run_files.configuration import to_json
from fedpax.run_files.goodput import GoodputClock
from fedpax.run_files.paths import latest_round
from fedpax.training.client_metrics import ClientMetrics
from fedpax.training.compiled_round import init_state, run_state_shardings, with_shardings
from fedpax.training.experiment import Experiment, Run
from fedpax.training.resume_checks import TrainingJob
from fedpax.training.round_logger import EMPTY, RoundLogger
from fedpax.training.run_writers import open_files
from fedpax.training.spikes import FiniteCheck, SpikeHistory, report_update_norm
from fedpax.training.startup_report import describe_aggregator
from fedpax.training.trainer import TrainingResult, build_run, train_with
from fedpax.training.training_config import is_due
from fedpax.transforms.program import program

RunRounds = Callable[..., list[Any]]
"""`(program, state, clients=..., rounds=..., first_round=...) -> results`, as `run_beam`."""

_READ = (
    "keep_checkpoints",
    "begin_from",
    "stop_on_non_finite",
    "update_norm",
    "tracker",
    "track_checkpoints",
)


def open_cohorts(experiment: Experiment) -> Clients:
    """Open the clients of an experiment; pickled with the experiment for workers."""
    # A copy: else data that the experiment has opened would be pickled.
    cohorts: Any = copy.copy(experiment).build().cohorts
    if not hasattr(cohorts, "read_clients"):
        raise ConfigurationError(
            f"{type(experiment).__name__} has cohorts of the type {type(cohorts).__name__}, whose "
            "clients cannot be read one by one, expected fedpax.data.cohort_rounds. Train without "
            "--engine, or without augmentation, dropout and simulated time."
        )
    clients: Clients = cohorts
    return clients


def for_workers(experiment: Experiment, folder: Path) -> Experiment:
    """Return an experiment to be pickled: without the data that it has opened."""
    fresh: Experiment = dataclasses.replace(experiment)
    fresh.read_inputs(folder)
    return fresh


def train_in_batches(
    experiment: Experiment,
    job_log_dir: str | Path,
    run_rounds: RunRounds,
    *,
    exp: str = "",
    allow_config_change: Collection[str] = (),
) -> TrainingResult:
    """Train an experiment, or resume its run, with the rounds up to the next save in one job."""
    experiment.training.check_read(
        _READ, "rounds in batch jobs", "Leave it out, or train without --engine."
    )

    def run_jobs(job: TrainingJob) -> TrainingResult:
        with ExitStack() as resources:
            return _BatchLoop(job, run_rounds, resources).train()

    return train_with(run_jobs, experiment, job_log_dir, exp, allow_config_change)


class _BatchLoop:
    """The jobs of a run, from a checkpoint on."""

    def __init__(self, job: TrainingJob, run_rounds: RunRounds, resources: ExitStack) -> None:
        experiment, folder, exp = job.experiment, job.folder, job.exp
        self.experiment, self.training = experiment, experiment.training
        self.folder, self.run_rounds = folder, run_rounds
        self.first = self.done = done = latest_round(folder) or 0
        enter = resources.enter_context
        self.clock = enter(GoodputClock(folder, after=done))
        self.run = self._build()
        round = self.run.algorithm.round
        self.round = report_update_norm(round) if self.training.update_norm else round
        files = enter(open_files(experiment, folder, exp, done, self.run.item_unit))
        self.progress, self.tracker, self.checkpoints, metrics = files
        self.size = jax.tree.leaves(self.run.cohort_shapes)[0].shape[0]
        self.state = self._restore()
        self.metrics = enter(metrics)
        self.logger = RoundLogger(
            metrics,
            self.progress,
            clock=self.clock,
            history=SpikeHistory(metrics.kept, self.training),
            items_per_round=self.run.items_per_round,
            bytes_across_placement=float("nan"),
            stop_on_non_finite=self.training.stop_on_non_finite,
        )
        experiment.write_configuration(folder, exp)
        num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self.like.params))
        self.logger.log_run(num_parameters, self.size, self.run.item_unit)
        shapes = self.like, self.run.cohort_shapes
        with jax.set_mesh(self.run.mesh):
            _, named = jax.eval_shape(self.run.algorithm.round, *shapes)
        for line in (*self.run.notes, *describe_aggregator(self.run, self.like, named, self.size)):
            if not line.startswith("simulated in one program"):
                self.progress.note(line)

    def train(self) -> TrainingResult:
        training, evaluation = self.training, None
        clients = functools.partial(open_cohorts, for_workers(self.experiment, self.folder))
        while self.done < training.rounds:
            periods = (training.evaluate_every, training.checkpoint_every)
            last = self.done + 1
            while not is_due(last, training.rounds, *periods):
                last += 1
            self._train_until(last, clients)
            if is_due(last, training.rounds, training.evaluate_every):
                self.clock.enter("evaluate")
                with jax.set_mesh(self.run.mesh):
                    metrics = self.run.evaluate(self.state.params)
                evaluation = self.logger.log_evaluation(last, metrics)
            if is_due(last, training.rounds, training.checkpoint_every):
                self._save()
        self.checkpoints.wait()
        self.tracker.finished = True
        return TrainingResult(
            self.done,
            finished=True,
            rounds_trained=self.done - self.first,
            signal=None,
            evaluation=evaluation,
        )

    def _build(self) -> Run:
        run = build_run(self.experiment)
        if run.frozen is not None or run.cohort_shapes is None:
            obstacle, remedy = "reads frozen parameters", "Train it"
            if run.frozen is None:
                obstacle = "states no cohort_shapes"
                remedy = "Set Run.cohort_shapes in build(), as docs/plan.md shows, or train it"
            raise ConfigurationError(
                f"{type(self.experiment).__name__} {obstacle}, expected a run whose round is "
                f"(state, cohort), with cohorts of known shapes. {remedy} without --engine."
            )
        return run

    def _restore(self) -> Any:
        run = self.run
        params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
        with jax.set_mesh(run.mesh):
            shapes = jax.eval_shape(run.algorithm.init, params)
            self.like = with_shardings(shapes, run_state_shardings(run, params, shapes, self.size))
            if self.done:
                return self.checkpoints.restore_state(self.like, self.size)
            initial = None if run.initial is None else run.initial.load()
            return init_state(run, self.like, self.training.seed, initial)

    def _train_until(self, last: int, clients: Callable[[], Clients]) -> None:
        """Run the job of the rounds up to the last one, and log them."""
        rounds = last - self.done
        self.progress.note(f"running rounds {self.done + 1} to {last} in one job")
        self.clock.enter("step")
        start = time.perf_counter()
        results = self.run_rounds(
            self.round,
            self.state,
            clients=clients,
            rounds=rounds,
            first_round=self.done,
        )
        seconds = time.perf_counter() - start
        cohorts: Any = self.run.cohorts
        for number, (_, values) in enumerate(results, self.done + 1):
            values = {**values, EMPTY: not cohorts.num_steps(cohorts.client_ids(number - 1)).any()}
            self.logger.restart_clock(time.perf_counter() - seconds / rounds)
            self.logger.log_round(number, values, idle_seconds=0.0)
            self.logger.flush()
        self.state = jax.device_put(
            results[-1][0], jax.tree.map(lambda leaf: leaf.sharding, self.like)
        )
        self.done = last

    def _save(self) -> None:
        self.clock.enter("save")
        self.logger.check_state(self.done, self.state, FiniteCheck(self.state))
        self.metrics.sync()
        cohorts: Any = self.run.cohorts
        position = {**cohorts.get_state(), "round": self.done}  # nothing is drawn here
        self.checkpoints.save(self.done, self.state, position, to_json(self.experiment), self.size)
        self.checkpoints.wait()
        self.clock.mark_checkpoint(self.done)


# ---- evaluation by an engine for batch jobs: held-out examples are read where they are evaluated

NEW = "new_clients/"
"""Before the names of metrics on clients that are held out with all their examples."""


class HeldoutClients(NamedTuple):
    """The held-out examples of a run by client; `is_new` are held out with all of theirs."""

    clients: Any
    names: Sequence[str]
    is_new: Bool[np.ndarray, " clients"]
    loss_fn: LossFn
    finish: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


def open_heldout(experiment: Any) -> Clients:
    """Open the held-out clients of an experiment; pickled with the experiment for workers."""
    clients: Clients = copy.copy(experiment).open_heldout_clients().clients
    return clients


def evaluate_in_batches(
    heldout: HeldoutClients,
    params: Params,
    run_rounds: Callable[..., list[Any]],
    open_clients: Callable[[], Clients],
    *,
    by_client: bool = False,
) -> tuple[dict[str, float], ClientMetrics | None]:
    """Evaluate a model in one job; only sums leave the workers, but for `by_client`."""
    ids = heldout.clients.client_ids(0)
    groups = np.stack([~heldout.is_new, heldout.is_new], axis=1)[ids].astype(np.float32)
    evaluate = _program(heldout.loss_fn, len(ids), by_client)
    (result,) = run_rounds(evaluate, params, groups, clients=open_clients)
    totals, shown = jax.tree.map(np.asarray, result)
    metrics: dict[str, float] = {}
    is_split = not heldout.is_new.all()
    for group, prefix in enumerate(("", NEW if is_split else "")):
        means = _means({name: x[group] for name, x in totals.items()})
        if totals["weight"][group] > 0:
            finished = heldout.finish(means)
            metrics |= {f"{prefix}{name}": float(x) for name, x in finished.items()}
    if shown is None:
        return metrics, None
    in_order = {name: x[np.argsort(ids)].astype(np.float64) for name, x in shown.items()}
    finished = {name: np.asarray(x) for name, x in heldout.finish(_means(in_order)).items()}
    return metrics, ClientMetrics(heldout.names, in_order["weight"], finished)


def _means(sums: Mapping[str, Any]) -> dict[str, Any]:
    names = ["loss", *(name for name in sums if name not in ("loss", "weight"))]
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN
        return {name: sums[name] / sums["weight"] for name in names}


def _program(loss_fn: LossFn, num_clients: int, by_client: bool) -> Callable[..., Any]:
    """Make the program of the sums of metrics by group, and of each client if asked."""

    @program(clients=num_clients)
    def evaluate(params: Params, groups: jax.Array, cohort: Cohort) -> Any:
        def measure(
            group: jax.Array, batches: Any, num_steps: jax.Array
        ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
            def sums_of(step: Any) -> dict[str, jax.Array]:
                batch = jax.tree.map(lambda x: x[step], batches)
                batch = {**batch, MASK: batch[MASK].astype(jnp.float32)}
                weight = jnp.sum(batch[MASK])
                _, metrics = loss_and_metrics(loss_fn, params, batch)
                # Padding may have NaN as its metrics.
                sums = {
                    name: jnp.where(weight > 0, weight * jnp.asarray(x, jnp.float32), 0)
                    for name, x in metrics.items()
                }
                return {**sums, "weight": weight}

            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(sums_of, 0))
            sums = jax.lax.fori_loop(
                0, num_steps, lambda i, s: jax.tree.map(jnp.add, s, sums_of(i)), zeros
            )
            return jax.tree.map(lambda x: x * group, sums), sums

        grouped, sums = federated_map(measure, groups, cohort.batches, cohort.num_steps)
        return federated_sum(grouped), sums if by_client else None

    return evaluate
