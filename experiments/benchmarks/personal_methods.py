"""Methods for personal models on digits: the accuracy of the clients' own models.

    python -m fedpax.experiments.benchmarks.personal_methods --rates=0.1,0.3,1 --seeds=0,1,2

The methods are the experiments of the group `personal_digits`, on the same cohorts. Each method is
trained with each client learning rate and with three values of its own setting, and the pair with
the best median over seeds is kept. The baselines have no setting: `fedavg` evaluates the shared
model, and `alone` models that clients train in the same rounds without sharing them. A seed is that
of the data, the model and the cohorts.

Accuracy is that after the last round, on held-out examples that are weighted for each client, so
that labels have the shares that they have among the client's training examples
(`fedpax.experiments.personal_images`).
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedpax.experiments.benchmarks.arguments import integer, numbers, several
from fedpax.experiments.catalog import find_group
from fedpax.experiments.client_methods import FedAvg, MethodConfig
from fedpax.experiments.personal_images import PersonalImages
from fedpax.experiments.personal_methods import APFL
from fedpax.reports.table import markdown_table

GROUP = "personal_digits"
BASELINES: Mapping[str, MethodConfig] = {"fedavg": FedAvg(), "alone": APFL(mixing=1.0)}
SETTINGS: Mapping[str, tuple[str, Sequence[float]]] = {
    "ditto": ("lam", (0.3, 1.0, 3.0)),
    "apfl": ("mixing", (0.25, 0.5, 0.75)),
    "hypcluster": ("num_clusters", (2, 3, 5)),
    "per_fedavg": ("adaptation_learning_rate", (0.03, 0.1, 0.3)),
    "reptile": ("meta_learning_rate", (0.25, 0.5, 1.0)),
}


class Row(NamedTuple):
    """A method with one client learning rate and one value of its setting.

    Attributes:
        method: its name.
        setting: the setting and its value; "" for a baseline.
        learning_rate: the client learning rate.
        personal: for each seed the accuracy of the clients' models.
        shared: for each seed the accuracy of the shared model on the clients' labels; empty for a
            baseline, or if there is no shared model.
    """

    method: str
    setting: str
    learning_rate: float
    personal: list[float]
    shared: list[float]

    @property
    def score(self) -> float:
        """The median accuracy of the clients' models."""
        return statistics.median(self.personal)


def variants(name: str, experiment: PersonalImages) -> dict[str, PersonalImages]:
    """Return the experiment with each value of the method's setting, by the setting.

    Args:
        name: the method's name.
        experiment: its experiment.

    Example:
        >>> list(variants("ditto", find_group(GROUP).experiments["ditto"]))
        ['lam = 0.3', 'lam = 1', 'lam = 3']
    """
    if name in BASELINES:
        return {"": experiment}
    field, values = SETTINGS[name]
    return {
        f"{field} = {value:g}": dataclasses.replace(
            experiment, method=dataclasses.replace(experiment.method, **{field: value})
        )
        for value in values
    }


def measure(
    name: str, setting: str, experiment: PersonalImages, seeds: Sequence[int], num_rounds: int
) -> Row:
    """Train a method with each seed.

    Args:
        name: the method's name.
        setting: its setting, in words.
        experiment: its experiment.
        seeds: the seeds of data, model and cohorts.
        num_rounds: number of rounds to train.
    """
    row, algorithm = Row(name, setting, experiment.client_learning_rate, [], []), None
    for seed in seeds:
        seeded = dataclasses.replace(
            experiment,
            cohort=dataclasses.replace(experiment.cohort, seed=seed),
            training=dataclasses.replace(experiment.training, seed=seed),
        )
        run = seeded.build()
        if algorithm is None:
            algorithm = run.algorithm  # compiled for the first seed alone
            step: Any = jax.jit(algorithm.round, donate_argnums=0)
        with jax.set_mesh(run.mesh):
            key = jax.random.key(seed)
            state = jax.jit(lambda key, run=run: run.algorithm.init(run.init(key)))(key)
            for _ in range(num_rounds):
                state, _ = step(state, next(run.cohorts))
            row.personal.append(seeded.evaluate_clients()(state)["accuracy"])
            if name not in BASELINES and seeded.method.has_shared_model:
                shared = dataclasses.replace(seeded, method=FedAvg())
                row.shared.append(shared.evaluate_clients()(state)["accuracy"])
    return row


def table(rows: Sequence[Row]) -> str:
    """Format the medians over seeds, with the least and the largest, as a Markdown table."""
    head = ["method", "setting", "client rate", "accuracy of the clients' models", "shared model"]
    return markdown_table(
        head,
        [
            [
                row.method,
                row.setting or "-",
                f"{row.learning_rate:g}",
                f"{row.score:.3f} ({min(row.personal):.3f} to {max(row.personal):.3f})",
                f"{statistics.median(row.shared):.3f}" if row.shared else "-",
            ]
            for row in sorted(rows, key=lambda row: -row.score)
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train the methods, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    experiments: dict[str, Any] = dict(find_group(GROUP).experiments)
    first = next(iter(experiments.values()))
    experiments |= {
        name: dataclasses.replace(first, method=method) for name, method in BASELINES.items()
    }
    parser.add_argument("--rates", type=numbers, default="0.1,0.3,1", help="client learning rates")
    parser.add_argument("--seeds", type=_seeds, default="0", help="seeds, such as 0,1,2")
    parser.add_argument("--rounds", type=integer, default=first.training.rounds)
    parser.add_argument("--methods", help="names separated by commas; default: all")
    options = parser.parse_args(argv)
    chosen = list(experiments) if options.methods is None else options.methods.split(",")
    if unknown := set(chosen) - set(experiments):
        parser.error(f"unknown methods {sorted(unknown)}; choose from {', '.join(experiments)}")
    rows = []
    for name in chosen:
        tried = []
        for (setting, variant), rate in itertools.product(
            variants(name, experiments[name]).items(), options.rates
        ):
            with_rate = dataclasses.replace(variant, client_learning_rate=rate)
            tried.append(measure(name, setting, with_rate, options.seeds, options.rounds))
            label = ", ".join(filter(None, (name, setting, f"rate {rate:g}")))
            print(f"{label}: {tried[-1].score:.3f}", flush=True)
        rows.append(max(tried, key=lambda row: row.score))
    print(table(rows))


def _seeds(text: str) -> list[int]:
    return several(text, int, "integers", "0,1,2")


if __name__ == "__main__":
    main()
