"""Groups of experiments: the methods for clients and the aggregators, on the same problem."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedpax.experiments.catalog import ExperimentGroup
from fedpax.experiments.client_experiment import ClientExperiment
from fedpax.experiments.fedavg_images import FedAvgImages
from fedpax.experiments.fedavg_synthetic import fedavg_synthetic
from fedpax.experiments.personal_images import PersonalImages
from fedpax.models.classifiers import MLPConfig
from fedpax.settings.client_aggregators import AggregatorConfig, aggregator
from fedpax.settings.client_methods import method
from fedpax.settings.cohort_settings import CohortConfig, DirichletPopulation, ServerConfig
from fedpax.training.training_config import TrainingConfig

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"server": ServerConfig(learning_rate=0.3, b1=0.9)},
    "fedadagrad": {"server": ServerConfig(optimizer="adagrad", learning_rate=0.1)},
    "fedadam": {"server": ServerConfig(optimizer="adam", learning_rate=0.03, b1=0.9)},
    "fedyogi": {"server": ServerConfig(optimizer="yogi", learning_rate=0.03, b1=0.9)},
    "self_tuning": {"method": method("self_tuning_fedavg")},
    "fedprox": {"method": method("fedprox")},
    "fednova": {"method": method("fednova")},
    "scaffold": {"method": method("scaffold")},
    "feddyn": {"method": method("feddyn")},
    "mime": {"method": method("mime")},
    "mime_lite": {"method": method("mime_lite")},
    "fedac": {"method": method("fedac")},
    "agnostic": {"method": method("agnostic")},
}
"""The methods that train one shared model: the fields in which their experiments differ."""

# The settings and the client learning rates: the best of three values each over three seeds
# (docs/methods_compared.md).
PERSONAL_METHODS: Mapping[str, Mapping[str, Any]] = {
    "ditto": {"method": method("ditto", lam=0.3)},
    "apfl": {"method": method("apfl", mixing=0.25)},
    "hypcluster": {"method": method("hypcluster", num_clusters=2)},
    "per_fedavg": {"method": method("per_fedavg", adaptation_learning_rate=0.3)},
    "reptile": {"method": method("reptile", meta_learning_rate=1.0)},
}
"""The methods for personal models, likewise."""

# The client learning rates: the best of 0.03, 0.1 and 0.3 over three seeds.
DIGITS_RATES = {name: 0.3 for name in METHODS} | {"mime": 0.1, "mime_lite": 0.03}
SYNTHETIC_RATES = {
    "fedavg": 0.1,
    "fedavgm": 0.03,
    "fedadagrad": 0.03,
    "fedadam": 0.1,
    "fedyogi": 0.1,
    "self_tuning": 0.03,
    "fedprox": 0.3,
    "fednova": 0.3,
    "scaffold": 0.03,
    "feddyn": 0.1,
    "mime": 0.03,
    "mime_lite": 0.3,
    "fedac": 0.3,
    "agnostic": 0.1,
}
PERSONAL_RATES = {name: 0.3 for name in PERSONAL_METHODS}


def methods_digits() -> ExperimentGroup:
    """Methods for clients on digits: 100 clients with few labels each, an MLP.

    The labels are from Dirichlet(0.1), and ten clients train in a round.
    """
    experiments = _each(_digits(FedAvgImages), METHODS, DIGITS_RATES)
    return ExperimentGroup(experiments, target="accuracy=0.85")


def methods_synthetic() -> ExperimentGroup:
    """Methods for clients on FedProx's synthetic(1, 1): 30 clients, logistic regression.

    Ten clients train in a round.
    """
    base = fedavg_synthetic()
    training = dataclasses.replace(base.training, evaluate_every=1)
    base = dataclasses.replace(base, training=training)
    return ExperimentGroup(_each(base, METHODS, SYNTHETIC_RATES), target="accuracy=0.85")


def personal_digits() -> ExperimentGroup:
    """Methods for personal models on the problem of methods_digits.

    The personal accuracy measures the clients' own models, the held-out loss the shared model. For
    HypCluster it measures the models that clients choose.
    """
    base = _digits(PersonalImages)
    # An evaluation of all clients takes as long as several rounds.
    base = dataclasses.replace(base, training=dataclasses.replace(base.training, evaluate_every=5))
    experiments = _each(base, PERSONAL_METHODS, PERSONAL_RATES)
    return ExperimentGroup(experiments, target="personal_accuracy=0.95")


def _digits(experiment_class: type[FedAvgImages]) -> FedAvgImages:
    return experiment_class(
        dataset="digits",
        population=DirichletPopulation(num_clients=100, alpha=0.1),
        model=MLPConfig(layer_sizes=(64, 64, 10)),
        cohort=CohortConfig(size=10, batch_size=10, max_steps=20),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=100, evaluate_every=1, checkpoint_every=100),
    )


def _each(
    base: ClientExperiment, methods: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float]
) -> dict[str, ClientExperiment]:
    return {
        name: dataclasses.replace(base, client_learning_rate=rates[name], **fields)
        for name, fields in methods.items()
    }


# ---- groups of experiments: the aggregators, each with FedAvg on the same problem

AGGREGATORS: Mapping[str, AggregatorConfig] = {
    "mean": aggregator("mean"),
    "clipped_mean": aggregator("clipped_mean", quantile=0.5),
    "private_mean": aggregator("private_mean", noise_multiplier=0.3),
    "secure_mean": aggregator("secure_mean", max_value=0.5),
    "private_secure_mean": aggregator("private_secure_mean", noise_multiplier=0.3),
    "quantized_mean": aggregator("quantized_mean"),
    "uniform": aggregator("compressed_mean"),
    "rotated_uniform": aggregator("compressed_mean", rotated=True),
    "drive": aggregator("compressed_mean", codec="drive"),
    "terngrad": aggregator("compressed_mean", codec="terngrad"),
    "sign": aggregator("compressed_mean", codec="sign", error_feedback=True),
    "e3m0": aggregator("compressed_mean", codec="e3m0", error_feedback=True),
    "top_k": aggregator("compressed_mean", codec="top_k", error_feedback=True),
    "random_k": aggregator("compressed_mean", codec="random_k", error_feedback=True),
    "coordinate_median": aggregator("coordinate_median"),
    "trimmed_mean": aggregator("trimmed_mean"),
    "krum": aggregator("krum"),
    "multi_krum": aggregator("krum", num_selected=5),
    "bulyan": aggregator("bulyan"),
    "geometric_median": aggregator("geometric_median"),
}
"""The aggregators by name."""


def aggregators_digits() -> ExperimentGroup:
    """FedAvg with each aggregator on digits, the problem of methods_digits."""
    group = methods_digits()
    base = group.experiments["fedavg"]
    assert isinstance(base, ClientExperiment)
    experiments = {
        name: dataclasses.replace(base, aggregator=aggregator)
        for name, aggregator in AGGREGATORS.items()
    }
    return group._replace(experiments=experiments)
