"""Federated methods on one problem: rounds, bytes and client FLOPs to a target accuracy.

    python -m fedpax.experiments.benchmarks.methods --group=methods_digits --plot=digits.png
    python -m fedpax.experiments.benchmarks.methods --group=methods_synthetic --rates=0.03,0.1,0.3

The methods are the experiments of a group (`fedpax list methods_digits`): the same model on the
same cohorts. A seed sets the data, the model and the cohorts. With `--rates`, each method has the
client learning rate with the smallest median of its rounds to the target. Accuracy is measured with
the server's model on held-out examples of all clients, after every round. Bytes are what the
clients of a round receive and send, and FLOPs count their valid steps, by `fedpax.cost`.
"""

import abc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.catalog import find_group
from fedpax.experiments.listing import GROUPS
from fedpax.reports.target import (
    MetricTrajectory,
    Target,
    cost_to_target,
    draw_trajectories,
    parse_target,
    trajectory_of,
)


class Tuned(Benchmark):
    """A benchmark that trains experiments with several settings: a row has the best of each."""

    rates: list[float] | None = option(
        None, "client learning rates to try; default: the experiment's", harness.numbers
    )
    seeds: list[int] = option("0", "seeds, such as 0,1,2", harness.seeds)
    rounds: int | None = option(None, "rounds to train; default: the experiment's", int, least=1)
    methods: list[str] | None = harness.some(",", lambda tuned: tuned.experiments())

    @abc.abstractmethod
    def experiments(self) -> Mapping[str, Any]:
        """Return the experiments by name."""

    def variants(self, name: str, experiment: Any) -> Mapping[str, Any]:
        """Return the experiment with each value of a setting, such as `lam = 0.3`."""
        return {"": experiment}

    @abc.abstractmethod
    def train(self, name: str, setting: str, experiment: Any, rounds: int) -> Row:
        """Train an experiment with each seed. Its row has the result in words, `_result`."""

    def measure(self) -> Iterator[Row]:
        """Train each experiment with each setting and each rate, and keep the best."""
        known = self.experiments()
        for name in self.methods or known:
            tried = []
            for setting, variant in self.variants(name, known[name]).items():
                for rate in self.rates or [variant.client_learning_rate]:
                    changed_rate = changed(variant, client_learning_rate=rate)
                    rounds = self.rounds or variant.training.rounds
                    tried.append(self.train(name, setting, changed_rate, rounds))
                    label = ", ".join(filter(None, (name, setting, f"rate {rate:g}")))
                    print(f"{label}: {tried[-1]._result}", flush=True)
            yield min(tried, key=self.order)


class Methods(Tuned):
    group: str = option("methods_digits", "group of experiments", choices=sorted(GROUPS))
    target: str | None = option(None, "METRIC=VALUE; default: the group's")

    @property
    def columns(self) -> str:  # type: ignore[override]
        goal = self.goal()
        return (
            "method {method} | client rate {learning_rate:g} "
            f"| rounds to {goal.metric} {goal.value:g} {{reached}} | bytes {{num_bytes:bytes}} "
            f"| client FLOPs {{flops:.3g}} | best {goal.metric} {{best:.3f}}"
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.goal()

    def goal(self) -> Target:
        """Return the target."""
        return parse_target(self.target or find_group(self.group).target or "accuracy=0.85")

    def experiments(self) -> Mapping[str, Any]:
        return find_group(self.group).experiments

    def train(self, name: str, setting: str, experiment: Any, rounds: int) -> Row:
        target, trajectories = self.goal(), []
        for run, states in seeded_runs(experiment, self.seeds):
            beginning, evaluations = run.cohorts.get_state(), []
            for number in range(1, rounds + 1):
                evaluations.append({"round": number, **run.evaluate(next(states).params)})
            run.cohorts.set_state(beginning)
            trajectories.append(trajectory_of(run, evaluations, target.metric))
        costs = [cost_to_target(trajectory, target) for trajectory in trajectories]
        # Infinite if most seeds do not reach the target.
        needed, num_bytes, flops = (
            [np.inf if not n or np.isnan(n) else n for n in values]
            for values in zip(*((c.rounds, c.num_bytes, c.flops) for c in costs), strict=True)
        )
        median = statistics.median(needed)
        reached = np.isfinite(median)
        return Row(
            method=name,
            learning_rate=experiment.client_learning_rate,
            rounds=[cost.rounds for cost in costs],
            reached=_with_range(needed) if reached else "not reached",
            num_bytes=num_bytes if reached else None,
            flops=flops if reached else None,
            best=[cost.best for cost in costs],
            trajectories=[trajectory._asdict() for trajectory in trajectories],
            median_rounds=median,
            _result=f"rounds {[cost.rounds for cost in costs]}",
        )

    def order(self, row: Row) -> tuple[float, float]:
        return row.median_rounds, -statistics.median(row.best)

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


def _with_range(rounds: Sequence[float]) -> str:
    middle = f"{statistics.median(rounds):.0f}"
    ends = (f"{n:.0f}" if np.isfinite(n) else "never" for n in (min(rounds), max(rounds)))
    return middle if len(rounds) == 1 else f"{middle} ({' to '.join(ends)})"


main = command(Methods)
