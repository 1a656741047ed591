"""FedAvg on images: cohorts of a population whose clients differ in labels and in size."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedpax.data import Partition, Source, example_batches, read_examples
from fedpax.data.populations.partition import Examples
from fedpax.data.rounds.preprocess import Arrays, Preprocess, preprocess_images
from fedpax.experiments.fedavg_clients import CohortConfig, FedAvgExperiment, ServerConfig
from fedpax.experiments.populations import (
    DirichletPopulation,
    NaturalPopulation,
    SyntheticPopulation,
    check_has_fields,
)
from fedpax.models.classifiers import CNNConfig, cnn
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.resnet import ResNetConfig, resnet
from fedpax.training.algorithm import LossFn
from fedpax.training.evaluation import Batch
from fedpax.training.experiment import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgImages(FedAvgExperiment):
    """A convolutional network trained by FedAvg on clients of different sizes.

    The examples of `dataset` have fields `image` and `label`.

    Attributes:
        in_memory: keep the training split in memory. If False, the examples of a cohort are read
            from files (about 10,000 examples per second) while the previous cohort trains.
        model: the network.
    """

    in_memory: bool = True
    model: CNNConfig | ResNetConfig

    def read_population(self) -> tuple[Partition, NDArray[np.integer]]:
        """Return the indices of each client's examples, and the label of each example."""
        source = self.read_source()
        return self.population.make(source, self.cohort.seed), read_examples(source)["label"]

    def read_source(self) -> Source:
        """Open the training split, and check its fields."""
        source = super().read_source()
        check_has_fields(source, "image", "label")
        return source

    def read_training(self, source: Source) -> Examples | Arrays:
        """Return the training examples."""
        return read_examples(source) if self.in_memory else source

    def make_preprocess(self) -> Preprocess:
        """Make the function from the fields of examples to those of batches."""
        return preprocess_images

    def read_heldout(self, heldout: Source, preprocess: Preprocess) -> Sequence[Batch]:
        """Read the batches of the evaluation."""
        del preprocess
        return example_batches(read_examples(heldout), self.heldout_batch_size)

    def make_model(self) -> FunctionalModel:
        """Make the network."""
        return resnet(self.model) if isinstance(self.model, ResNetConfig) else cnn(self.model)

    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the cross-entropy."""
        return classification_loss(model.apply)


def fedavg_digits() -> FedAvgImages:
    """FedAvg on handwritten digits, 30 clients with few labels each. Takes seconds."""
    return FedAvgImages(
        dataset="digits",
        population=DirichletPopulation(num_clients=30, alpha=0.3),
        model=CNNConfig(image_height=8, image_width=8, filters=(8, 16), hidden_dim=32),
        cohort=CohortConfig(size=10, batch_size=10, local_epochs=2),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=60, evaluate_every=10, checkpoint_every=30),
    )


def fedavg_population() -> FedAvgImages:
    """FedAvg on handwritten digits, 1,000 clients per round of a population of 100,000."""
    return FedAvgImages(
        dataset="digits",
        population=SyntheticPopulation(
            num_clients=100_000, alpha=0.3, median_examples=12.0, sigma=1.0, max_examples=200
        ),
        model=CNNConfig(image_height=8, image_width=8, filters=(8, 16), hidden_dim=32),
        cohort=CohortConfig(size=1_000, batch_size=10, max_steps=20),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=30, evaluate_every=5, checkpoint_every=15),
    )


def fedadam_emnist() -> FedAvgImages:
    """FedAdam on EMNIST by writer, 62 classes, 10 of 3,400 writers per round. Downloads once.

    The settings of the paper: 10 clients per round, batches of 20, one epoch, 1,500 rounds, client
    learning rate 10^-1.5, server learning rate 10^-2.5, b1 = 0.9, b2 = 0.99, tau = 10^-4, the best
    of the authors' grid. Unlike the paper's, the network has no dropout.

    Reference:
        Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, section 5 and appendix. The
        best learning rates and tau: the authors' code, google-research/federated,
        optimization/docs/hyperparameters.md.
    """
    return FedAvgImages(
        dataset="federated_emnist",
        in_memory=False,
        population=NaturalPopulation(field="client"),
        model=CNNConfig(num_classes=62),
        cohort=CohortConfig(size=10, batch_size=20),
        client_learning_rate=10**-1.5,
        server=ServerConfig(optimizer="adam", learning_rate=10**-2.5, b1=0.9, tau=1e-4),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )


def fedyogi_cifar100() -> FedAvgImages:
    """FedYogi on CIFAR-100 by client, 10 of 500 clients per round. Downloads once.

    The settings of the paper: 10 clients per round, batches of 20, one epoch, 4,000 rounds, client
    learning rate 10^-1.5, server learning rate 1, b1 = 0.9, b2 = 0.99, tau = 0.1; ResNet-18 with
    group normalization, 11,227,812 parameters. Unlike the paper's, images are neither cropped,
    flipped nor standardized: the accuracy is below the paper's.

    Reference:
        Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, section 5 and appendix.
    """
    return FedAvgImages(
        dataset="federated_cifar100",
        population=NaturalPopulation(field="client"),
        model=ResNetConfig(num_channels=3, num_classes=100),
        cohort=CohortConfig(size=10, batch_size=20),
        client_learning_rate=10**-1.5,
        server=ServerConfig(optimizer="yogi", learning_rate=1.0, b1=0.9, tau=0.1),
        training=TrainingConfig(rounds=4000, evaluate_every=100, checkpoint_every=100),
    )
