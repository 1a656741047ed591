"""Methods for personal models on digits: the accuracy of the clients' own models.

    python -m fedpax.experiments.benchmarks.personal_methods --rates=0.1,0.3,1 --seeds=0,1,2

The methods are the experiments of the group `personal_digits`, on the same cohorts, each with the
client learning rate and the one of three values of its own setting that have the best median over
seeds. `fedavg` evaluates the shared model, and `alone` models that clients train in the same rounds
without sharing them. A seed sets the data, the model and the cohorts. Accuracy is that after the
last round, on held-out examples that are weighted so that labels have the shares that they have
among the client's training examples (`fedpax.experiments.personal_images`).
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Row, command, option
from fedpax.experiments.benchmarks.methods import Tuned, seeded_runs, with_seed
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.catalog import find_group
from fedpax.experiments.client_methods import MethodConfig, method
from fedpax.experiments.personal_images import PersonalImages

BASELINES: Mapping[str, MethodConfig] = {
    "fedavg": method("fedavg"),
    "alone": method("apfl", mixing=1.0),
}
SETTINGS: Mapping[str, tuple[str, Sequence[float]]] = {
    "ditto": ("lam", (0.3, 1.0, 3.0)),
    "apfl": ("mixing", (0.25, 0.5, 0.75)),
    "hypcluster": ("num_clusters", (2, 3, 5)),
    "per_fedavg": ("adaptation_learning_rate", (0.03, 0.1, 0.3)),
    "reptile": ("meta_learning_rate", (0.25, 0.5, 1.0)),
}


class PersonalMethods(Tuned):
    rates: list[float] = option("0.1,0.3,1", "client learning rates", harness.numbers)
    columns = (
        "method {method} | setting {setting} | client rate {learning_rate:g} "
        "| accuracy of the clients' models {accuracy} | shared model {shared:.3f}"
    )

    def experiments(self) -> dict[str, Any]:
        of_group: dict[str, Any] = dict(find_group("personal_digits").experiments)
        first = next(iter(of_group.values()))
        return of_group | {
            name: changed(first, method=config) for name, config in BASELINES.items()
        }

    def variants(self, name: str, experiment: PersonalImages) -> dict[str, PersonalImages]:
        if name in BASELINES:
            return {"": experiment}
        field, values = SETTINGS[name]
        return {f"{field} = {v:g}": changed(experiment, method={field: v}) for v in values}

    def train(self, name: str, setting: str, experiment: PersonalImages, rounds: int) -> Row:
        personal, shared = list[float](), list[float]()
        server = changed(experiment, method=BASELINES["fedavg"])
        for seed, (_, states) in zip(self.seeds, seeded_runs(experiment, self.seeds), strict=True):
            state = next(itertools.islice(states, rounds - 1, None))
            personal.append(with_seed(experiment, seed).evaluate_clients()(state)["accuracy"])
            if name not in BASELINES and experiment.method.has_shared_model:
                shared.append(with_seed(server, seed).evaluate_clients()(state)["accuracy"])
        return make_row(name, setting, experiment.client_learning_rate, personal, shared)

    def order(self, row: Row) -> float:
        return -float(row.score)


def make_row(
    method: str, setting: str, rate: float, personal: list[float], shared: list[float]
) -> Row:
    """Make a row of the accuracies for each seed."""
    score = statistics.median(personal)
    return Row(
        method=method,
        setting=setting or "-",
        learning_rate=rate,
        personal=personal,
        shared=shared,
        score=score,
        accuracy=f"{score:.3f} ({min(personal):.3f} to {max(personal):.3f})",
        _result=f"{score:.3f}",
    )


main = command(PersonalMethods)
