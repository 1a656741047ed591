"""Federated methods on one problem: rounds, bytes and client FLOPs to a target accuracy.

    python -m fedpax.experiments.benchmarks.methods --group=methods_digits --plot=digits.png
    python -m fedpax.experiments.benchmarks.methods --group=methods_synthetic --rates=0.03,0.1,0.3

The methods are the experiments of a group (`fedpax list methods_digits`): the same model on the
same cohorts. A seed sets the data, the model and the cohorts. With `--rates`, each method has the
client learning rate with the smallest median of its rounds to the target. Accuracy is measured with
the server's model on held-out examples of all clients, after every round. Bytes are what the
clients of a round receive and send, and FLOPs count their valid steps, by `fedpax.cost`.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.catalog import find_group
from fedpax.experiments.listing import GROUPS
from fedpax.reports.table import format_bytes, markdown_table
from fedpax.reports.target import (
    MetricTrajectory,
    Target,
    cost_to_target,
    parse_target,
    trajectory_of,
)
from fedpax.reports.target_report import draw_trajectories


class Methods(Benchmark):
    group: str = option("methods_digits", "group of experiments", choices=sorted(GROUPS))
    rounds: int | None = option(None, "rounds to train; default: the experiment's", int)
    rates: list[float] | None = option(
        None, "client learning rates to try; default: the experiment's", harness.numbers
    )
    seeds: list[int] = option("0", "seeds, such as 0,1,2", harness.seeds)
    target: str | None = option(None, "METRIC=VALUE; default: the group's")
    methods: list[str] | None = harness.some(",")

    def __post_init__(self) -> None:
        if self.rounds is not None:
            harness.check_at_least(1, rounds=self.rounds)
        harness.check_names("methods", self.methods, find_group(self.group).experiments)
        self.goal()

    def goal(self) -> Target:
        """Return the target."""
        return parse_target(self.target or find_group(self.group).target or "accuracy=0.85")

    def measure(self) -> Iterator[Row]:
        """Train each method with each rate, and keep the fastest."""
        experiments: Any = find_group(self.group).experiments
        for name in self.methods or experiments:
            experiment, tried = experiments[name], []
            for rate in self.rates or [experiment.client_learning_rate]:
                variant = changed(experiment, client_learning_rate=rate)
                tried.append(self.train(name, variant))
                print(f"{name}, rate {rate:g}: rounds {tried[-1].rounds}", flush=True)
            yield min(tried, key=speed)

    def train(self, name: str, experiment: Any) -> Row:
        """Train a method with each seed."""
        target, trajectories = self.goal(), []
        for run, states in seeded_runs(experiment, self.seeds):
            beginning, evaluations = run.cohorts.get_state(), []
            for number in range(1, (self.rounds or experiment.training.rounds) + 1):
                evaluations.append({"round": number, **run.evaluate(next(states).params)})
            run.cohorts.set_state(beginning)
            trajectories.append(trajectory_of(run, evaluations, target.metric))
        costs = [cost_to_target(trajectory, target) for trajectory in trajectories]
        rounds = [cost.rounds for cost in costs]
        return Row(
            method=name,
            learning_rate=experiment.client_learning_rate,
            rounds=rounds,
            num_bytes=[cost.num_bytes for cost in costs],
            flops=[cost.flops for cost in costs],
            best=[cost.best for cost in costs],
            trajectories=[trajectory._asdict() for trajectory in trajectories],
            # Infinite if most seeds do not reach the target.
            median_rounds=statistics.median(np.inf if n is None else n for n in rounds),
        )

    def summary(self, rows: list[Row]) -> str:
        """Format the medians over seeds, the fastest method first, with the range of the rounds."""
        target = self.goal()
        goal = f"rounds to {target.metric} {target.value:g}"
        head = ["method", "client rate", goal, "bytes", "client FLOPs", f"best {target.metric}"]
        cells = []
        for row in sorted(rows, key=speed):
            reached = np.isfinite(row.median_rounds)
            costs = [format_bytes(_median(row.num_bytes)), f"{_median(row.flops):.3g}"]
            cells.append(
                [
                    row.method,
                    f"{row.learning_rate:g}",
                    *([_with_range(row.rounds), *costs] if reached else ["not reached", "-", "-"]),
                    f"{statistics.median(row.best):.3f}",
                ]
            )
        return markdown_table(head, cells)

    def draw(self, rows: list[Row]) -> Figure:
        """Draw the metric of the first seed over rounds, bytes and FLOPs."""
        trajectories = {row.method: MetricTrajectory(**row.trajectories[0]) for row in rows}
        return draw_trajectories(trajectories, self.goal())


def with_seed(experiment: Any, seed: int) -> Any:
    """Return an experiment with a seed of its data, its model and its cohorts."""
    return changed(experiment, cohort={"seed": seed}, training={"seed": seed})


def seeded_runs(experiment: Any, seeds: Sequence[int]) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Yield the run of each seed with its states after each round, compiled for the first alone."""
    algorithm = None
    for seed in seeds:
        run = with_seed(experiment, seed).build()
        if algorithm is None:
            algorithm = run.algorithm
            step = jax.jit(algorithm.round, donate_argnums=0)
        run = run._replace(algorithm=algorithm)
        with jax.set_mesh(run.mesh):
            yield run, _states(run, step, seed)


def _states(run: Any, step: Any, seed: int) -> Iterator[Any]:
    state = jax.jit(lambda key: run.algorithm.init(run.init(key)))(jax.random.key(seed))
    while True:
        state, _ = step(state, next(run.cohorts))
        yield state


def speed(row: Row) -> tuple[float, float]:
    """Return the key that sorts rows, the fastest method first."""
    return row.median_rounds, -statistics.median(row.best)


def _median(values: Sequence[float]) -> float:
    return statistics.median(np.inf if np.isnan(value) else value for value in values)


def _with_range(rounds: Sequence[int | None]) -> str:
    known = [np.inf if number is None else number for number in rounds]
    ends = [f"{end:.0f}" if np.isfinite(end) else "never" for end in (min(known), max(known))]
    middle = f"{statistics.median(known):.0f}"
    return middle if len(known) == 1 else f"{middle} ({ends[0]} to {ends[1]})"


main = command(Methods)
