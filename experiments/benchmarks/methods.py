"""Federated methods on one problem: rounds, bytes and client FLOPs to a target accuracy.

    python -m fedpax.experiments.benchmarks.methods --group=methods_digits --plot=digits.png
    python -m fedpax.experiments.benchmarks.methods --group=methods_synthetic --rates=0.03,0.1,0.3

The methods are the experiments of a group (`fedpax list methods_digits`), with the learning rates
that they have there. All train the same model on the same cohorts. A seed is that of the data, the
model and the cohorts. With `--rates`, the client learning rate of each method is the one with which
the median of its rounds to the target is smallest. Accuracy is that of the server's model on
held-out examples of all clients, after every round. Bytes are those that the clients of a round
receive and send, and FLOPs those of their valid steps, by `fedpax.cost`.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.algorithm import FederatedAlgorithm
from fedpax.experiments.benchmarks.arguments import numbers, several
from fedpax.experiments.catalog import find_group, groups
from fedpax.experiments.fedavg_clients import ClientExperiment
from fedpax.reports.table import format_bytes, markdown_table
from fedpax.reports.target import (
    Course,
    Target,
    cost_to_target,
    course_of,
    parse_target,
    plot_courses,
)


class Row(NamedTuple):
    """A method with one client learning rate.

    Attributes:
        method: its name.
        learning_rate: the client learning rate.
        rounds: for each seed the rounds until the target; None if it was not reached.
        num_bytes: for each seed the bytes until then, NaN if it was not reached.
        flops: for each seed the clients' FLOPs until then, NaN if it was not reached.
        best: for each seed the best value of all rounds.
        courses: for each seed the metric after each round.
    """

    method: str
    learning_rate: float
    rounds: list[int | None]
    num_bytes: list[float]
    flops: list[float]
    best: list[float]
    courses: list[Course]

    @property
    def median_rounds(self) -> float:
        """The median of the rounds; infinite if most seeds do not reach the target."""
        return statistics.median(np.inf if found is None else found for found in self.rounds)


def measure(
    name: str, experiment: ClientExperiment, target: Target, seeds: Sequence[int], num_rounds: int
) -> Row:
    """Train a method with each seed.

    Args:
        name: the method's name.
        experiment: the method's experiment.
        target: the target.
        seeds: the seeds of data, model and cohorts.
        num_rounds: number of rounds to train.
    """
    algorithm, courses = None, []
    for seed in seeds:
        seeded = dataclasses.replace(
            experiment,
            cohort=dataclasses.replace(experiment.cohort, seed=seed),
            training=dataclasses.replace(experiment.training, seed=seed),
        )
        if algorithm is None:
            algorithm = seeded.build().algorithm  # compiled for the first seed alone
            step = jax.jit(algorithm.round, donate_argnums=0)
        courses.append(_train(seeded, algorithm, step, target.metric, num_rounds))
    found = [cost_to_target(course, target) for course in courses]
    return Row(
        method=name,
        learning_rate=experiment.client_learning_rate,
        rounds=[one.rounds for one in found],
        num_bytes=[one.num_bytes for one in found],
        flops=[one.flops for one in found],
        best=[one.best for one in found],
        courses=courses,
    )


def _train(
    experiment: ClientExperiment,
    algorithm: FederatedAlgorithm,
    step: Any,
    metric: str,
    num_rounds: int,
) -> Course:
    run = experiment.build()._replace(algorithm=algorithm)
    beginning, evaluations = run.cohorts.get_state(), []
    with jax.set_mesh(run.mesh):
        key = jax.random.key(experiment.training.seed)
        state = jax.jit(lambda key: algorithm.init(run.init(key)))(key)
        for number in range(1, num_rounds + 1):
            state, _ = step(state, next(run.cohorts))
            evaluations.append({"round": number, **run.evaluate(state.params)})
        run.cohorts.set_state(beginning)
        return course_of(run, evaluations, metric)


def table(rows: Sequence[Row], target: Target) -> str:
    """Format the medians over seeds as a Markdown table, the fastest method first.

    Cells of rounds show the least and the largest number of rounds behind the median.
    """
    goal = f"rounds to {target.metric} {target.value:g}"
    head = ["method", "client rate", goal, "bytes", "client FLOPs", f"best {target.metric}"]
    cells = []
    for row in sorted(rows, key=lambda row: (row.median_rounds, -statistics.median(row.best))):
        reached = np.isfinite(row.median_rounds)
        cells.append(
            [
                row.method,
                f"{row.learning_rate:g}",
                _with_range(row.rounds) if reached else "not reached",
                format_bytes(_median(row.num_bytes)) if reached else "-",
                f"{_median(row.flops):.3g}" if reached else "-",
                f"{statistics.median(row.best):.3f}",
            ]
        )
    return markdown_table(head, cells)


def _median(values: Sequence[float]) -> float:
    return statistics.median(np.inf if np.isnan(value) else value for value in values)


def _with_range(rounds: Sequence[int | None]) -> str:
    known = [np.inf if found is None else found for found in rounds]
    ends = [f"{end:.0f}" if np.isfinite(end) else "never" for end in (min(known), max(known))]
    middle = f"{statistics.median(known):.0f}"
    return middle if len(known) == 1 else f"{middle} ({ends[0]} to {ends[1]})"


def main() -> None:
    """Train the methods, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", choices=sorted(groups()), default="methods_digits")
    parser.add_argument("--rounds", type=int, help="rounds to train; default: the experiment's")
    parser.add_argument(
        "--rates", type=numbers, help="client learning rates to try; default: the experiment's"
    )
    parser.add_argument("--seeds", type=_seeds, default="0", help="seeds, such as 0,1,2")
    parser.add_argument("--target", help="METRIC=VALUE; default: the group's")
    parser.add_argument("--methods", help="names separated by commas; default: all")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--plot", help="file for the figure, such as methods.png")
    options = parser.parse_args()
    group = find_group(options.group)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1")
    chosen = list(group.experiments) if options.methods is None else options.methods.split(",")
    if unknown := set(chosen) - set(group.experiments):
        parser.error(
            f"unknown methods {sorted(unknown)}; choose from {', '.join(group.experiments)}"
        )
    try:
        target = parse_target(options.target or group.target or "accuracy=0.85")
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for name in chosen:
        experiment: Any = group.experiments[name]
        tried = []
        for rate in options.rates or [experiment.client_learning_rate]:
            variant = dataclasses.replace(experiment, client_learning_rate=rate)
            num_rounds = options.rounds or experiment.training.rounds
            tried.append(measure(name, variant, target, options.seeds, num_rounds))
            print(f"{name}, rate {rate:g}: rounds {tried[-1].rounds}", flush=True)
        rows.append(min(tried, key=lambda row: (row.median_rounds, -statistics.median(row.best))))
    print(table(rows, target))
    if options.json:
        settings = {"group": options.group, "target": target._asdict(), "seeds": options.seeds}
        content = {
            "settings": settings,
            "rows": [
                row._asdict() | {"courses": [course._asdict() for course in row.courses]}
                for row in rows
            ],
        }
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot_courses({row.method: row.courses[0] for row in rows}, target, options.plot)


def _seeds(text: str) -> list[int]:
    return several(text, int, "integers", "0,1,2")


if __name__ == "__main__":
    main()
