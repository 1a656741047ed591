"""Logistic regression on the synthetic clients of FedProx or of LEAF."""

import abc
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedpax.algorithm import LossFn
from fedpax.checks import CheckedConfig, Count, NonNegative
from fedpax.data import Partition, example_batches
from fedpax.data.rounds.labeled_examples import Arrays, Preprocess, preprocess_images
from fedpax.experiments.client_experiment import ClientExperiment
from fedpax.experiments.parts.client_evaluation import EvaluateClients
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.populations.synthetic_clients import leaf_clients, logistic_clients
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.function_settings import documented_by
from fedpax.training.client_metrics import ExampleOwners, classification_by_client
from fedpax.training.evaluation import Batch, map_examples
from fedpax.training.training_config import TrainingConfig

HELDOUT_EVERY = 10
"""Of this number of a client's examples, the first one is held out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@documented_by(logistic_clients)
class SyntheticClients(CheckedConfig, abc.ABC):
    """Synthetic clients, each with its own linear model and inputs."""

    group = "population"
    num_clients: Count
    num_features: Count = 60
    num_classes: Count = 10

    @abc.abstractmethod
    def make(self, seed: int) -> tuple[Arrays, Partition]:
        """Generate the examples, and the indices of each client's examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@documented_by(logistic_clients)
class FedProxClients(SyntheticClients):
    """The clients of FedProx, synthetic(alpha, beta)."""

    num_clients: Count = 30
    alpha: NonNegative = 1.0
    beta: NonNegative = 1.0

    def make(self, seed: int) -> tuple[Arrays, Partition]:
        """Generate the examples, and the indices of each client's examples."""
        return logistic_clients(seed=seed, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
@documented_by(leaf_clients)
class LeafClients(SyntheticClients):
    """The clients of LEAF, whose models are in clusters."""

    num_clients: Count = 1_000
    num_classes: Count = 5
    cluster_probabilities: tuple[float, ...] = (1.0,)

    def make(self, seed: int) -> tuple[Arrays, Partition]:
        """Generate the examples, and the indices of each client's examples."""
        return leaf_clients(seed=seed, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgSynthetic(ClientExperiment):
    """Logistic regression on synthetic clients. A tenth of each client's examples is held out.

    Attributes:
        population: the clients that exist. Their seed is `cohort.seed`.
    """

    population: SyntheticClients

    def read_clients(self) -> tuple[Arrays, Partition]:
        """Return all examples, and the indices of each client's training examples."""
        examples, population = self.population.make(self.cohort.seed)
        return examples, [np.delete(part, np.s_[::HELDOUT_EVERY]) for part in population]

    def read_population(self) -> tuple[Partition, NDArray[np.integer]]:
        """Return the indices of each client's training examples, and the label of each example."""
        examples, population = self.read_clients()
        return population, examples["label"]

    def open_heldout(self, preprocess: Preprocess) -> Callable[[], Sequence[Batch]]:
        """Return the function that makes the batches of all clients' held-out examples."""

        def read_heldout() -> Sequence[Batch]:
            examples, population = self.population.make(self.cohort.seed)
            chosen = np.concatenate([part[::HELDOUT_EVERY] for part in population])
            heldout = preprocess({name: values[chosen] for name, values in examples.items()})
            return example_batches(heldout, self.heldout_batch_size)

        return read_heldout

    def make_client_evaluation(self, model: FunctionalModel) -> EvaluateClients:
        """Make the evaluation by client, on its held-out examples."""
        examples, population = self.population.make(self.cohort.seed)
        parts = [part[::HELDOUT_EVERY] for part in population]
        chosen = np.concatenate(parts)
        owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        clients = ExampleOwners([f"client {k}" for k in range(len(parts))], owners)
        logits = map_examples(
            lambda params, batch: model.apply(params, batch["image"])[0],
            {"image": examples["image"][chosen].astype(np.float32)},
        )
        labels = examples["label"][chosen]
        return lambda params: classification_by_client(logits(params), labels, clients)

    def make_preprocess(self) -> Preprocess:
        """Make the function from the fields of examples to the fields of batches."""
        return preprocess_images  # floats stay as they are

    def make_model(self) -> FunctionalModel:
        """Make the logistic regression."""
        sizes = (self.population.num_features, self.population.num_classes)
        return mlp(MLPConfig(layer_sizes=sizes))

    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the cross-entropy."""
        return classification_loss(model.apply)


def fedavg_synthetic() -> FedAvgSynthetic:
    """FedAvg on FedProx's synthetic(1, 1), logistic regression of 30 clients. Takes seconds.

    Reference:
        Li et al., arXiv:1812.06127, section 5.1.
    """
    return FedAvgSynthetic(
        population=FedProxClients(),
        cohort=CohortConfig(size=10, batch_size=10, max_steps=20),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=200, evaluate_every=10, checkpoint_every=100),
    )


def fedavg_leaf_synthetic() -> FedAvgSynthetic:
    """FedAvg on LEAF's synthetic data, logistic regression of 1,000 clients. Takes seconds.

    Reference:
        Caldas et al., LEAF, arXiv:1812.01097; the authors' code, TalwalkarLab/leaf, data/synthetic.
    """
    return dataclasses.replace(fedavg_synthetic(), population=LeafClients())
