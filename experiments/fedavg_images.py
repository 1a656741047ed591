"""FedAvg on image data sets; `fedavg_image_files.py` is for images of your own."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax import Cohort
from fedpax.algorithm import LossFn, Params
from fedpax.checks import Count, NonNegative
from fedpax.clients.cohort import CohortStream
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    Partition,
    Source,
    example_batches,
    read_examples,
)
from fedpax.data.rounds.augmentation import (
    DROPOUT_SEED,
    add_dropout_seeds,
    augment_cohort,
    central_crop,
    standardize,
)
from fedpax.data.rounds.labeled_examples import Arrays, Preprocess, preprocess_images
from fedpax.data.rounds.scheduled_rounds import ScheduledRounds
from fedpax.errors import ArgumentError
from fedpax.experiments.client_experiment import FedAvgExperiment
from fedpax.experiments.parts.client_evaluation import (
    EvaluateClients,
    label_weights,
    owners_by_field,
)
from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.losses import classification_loss, l2_regularized
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.resnet import ResNetConfig, resnet
from fedpax.settings.client_aggregators import aggregator
from fedpax.settings.cohort_settings import (
    CohortConfig,
    DirichletPopulation,
    NaturalPopulation,
    ServerConfig,
    SyntheticPopulation,
    check_has_fields,
)
from fedpax.sources.source import Examples
from fedpax.training.client_metrics import EvaluatedClients, LabelWeights, classification_by_client
from fedpax.training.evaluation import Batch, map_examples
from fedpax.training.experiment import Run
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgImages(FedAvgExperiment):
    """An image classifier trained on clients of different sizes.

    The examples of `dataset` have fields `image` and `label`.

    Attributes:
        in_memory: keep the training split in memory. If False, the examples of a cohort are read
            from files (about 10,000 examples per second) while the previous cohort trains.
        crop_size: height and width of crops, standardized one by one: in training at random places,
            half of them flipped, in the evaluation the centers. Default None: whole images, pixels
            from 0 to 1.
        l2_factor: factor of the squared weights in the training loss. Default 0: none.
        model: the network.
    """

    in_memory: bool = True
    crop_size: Count | None = None
    l2_factor: NonNegative = 0.0
    model: CNNConfig | ResNetConfig | MLPConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_size is None or not isinstance(self.model, CNNConfig):
            return
        height, width = self.model.image_height, self.model.image_width
        if not height == width == self.crop_size:
            raise ArgumentError(
                f"crop_size={self.crop_size}, expected the size of the network's images, {height} "
                f"x {width}. Set --model.image_height={self.crop_size} and "
                f"--model.image_width={self.crop_size}."
            )

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
        """Make the function from the fields of examples to the fields of batches."""
        return preprocess_images

    def read_heldout(self, heldout: Source, preprocess: Preprocess) -> Sequence[Batch]:
        """Read the batches of the evaluation."""
        del preprocess
        examples = read_examples(heldout)
        if self.crop_size is not None:
            crops = standardize(central_crop(examples["image"], self.crop_size))
            examples = {**examples, "image": crops}
        return example_batches(examples, self.heldout_batch_size)

    def make_stream(self, rounds: CohortRounds, sampler: ClientSampler) -> CohortStream:
        """Augment the images of each round, and add the seeds of dropout, where these are set."""
        stream: CohortStream = super().make_stream(rounds, sampler)
        seed = self.cohort.seed
        if self.crop_size is not None:
            augment = functools.partial(augment_cohort, size=self.crop_size, seed=seed)
            stream = ScheduledRounds(stream, augment)
        if self._has_dropout:
            stream = ScheduledRounds(stream, functools.partial(add_dropout_seeds, seed=seed))
        return stream

    def make_client_evaluation(self, model: FunctionalModel) -> EvaluateClients:
        """Make the evaluation by client, on the client's held-out images or weighted ones."""
        # If the population is not the data set's, held-out images are weighted for each client: a
        # label has its share among the client's training examples.
        heldout = self.read_heldout_source()
        batches = self.read_heldout(heldout, self.make_preprocess())
        examples = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(heldout)], *batches)
        labels = examples["label"]
        clients: EvaluatedClients
        if isinstance(self.population, NaturalPopulation):
            check_has_fields(heldout, self.population.field)
            clients = owners_by_field(heldout, self.population.field)
        else:
            population, of_training = self.read_population()
            parts = [of_training[np.asarray(part)] for part in population]
            names = [f"client {k}" for k in range(len(parts))]
            clients = LabelWeights(names, labels, label_weights(parts, labels))
        logits = map_examples(
            lambda params, batch: model.apply(params, batch["image"])[0],
            {"image": examples["image"]},
        )
        return lambda params: classification_by_client(logits(params), labels, clients)

    def build(self) -> Run:
        """Make the run, with the shapes of the crops and of the seeds."""
        run, size = super().build(), self.crop_size
        shapes = run.cohort_shapes
        assert isinstance(shapes, Cohort)
        batches = dict(shapes.batches)
        if size is not None:
            whole = batches["image"]
            batches["image"] = jax.ShapeDtypeStruct(
                (*whole.shape[:-3], size, size, whole.shape[-1]), whole.dtype
            )
        if self._has_dropout:
            batches[DROPOUT_SEED] = jax.ShapeDtypeStruct(batches["label"].shape, np.uint32)
        return run._replace(cohort_shapes=shapes._replace(batches=batches))

    @property
    def _has_dropout(self) -> bool:
        return isinstance(self.model, CNNConfig) and any(self.model.dropout_rates)

    def make_model(self) -> FunctionalModel:
        """Make the network."""
        match self.model:
            case ResNetConfig():
                return resnet(self.model)
            case MLPConfig():
                return mlp(self.model)
        return cnn(self.model)

    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the cross-entropy, regularized if `l2_factor` is set."""
        loss_fn = classification_loss(model.apply)
        return l2_regularized(loss_fn, self.l2_factor) if self.l2_factor else loss_fn

    def make_evaluation(
        self, evaluate: Callable[..., Callable[[Params], dict[str, float]]], model: FunctionalModel
    ) -> Callable[[Params], dict[str, float]]:
        """Evaluate the cross-entropy, without the squared weights."""
        return evaluate(classification_loss(model.apply))


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


def private_population() -> FedAvgImages:
    """DP-FedAvg on fedavg_population: each client joins a round with probability 1%.

    The guarantee is for clients, with central differential privacy. Over the 30 rounds, epsilon is
    0.74 for delta 1e-6:

        privacy_spent(
            noise_multiplier=1.0, num_rounds=30, delta=1e-6, sampling_probability=0.01
        )
    """
    base = fedavg_population()
    return dataclasses.replace(
        base,
        # 6 standard deviations above the average of 1,000: `poisson_cohort_size`.
        cohort=dataclasses.replace(base.cohort, size=1_200, sampling_probability=0.01),
        aggregator=aggregator("private_mean", max_norm=0.5, noise_multiplier=1.0),
    )


def fedadam_emnist() -> FedAvgImages:
    """FedAdam on EMNIST by writer, 62 classes, 10 of 3,400 writers per round. Downloads once.

    The settings of the paper, with the learning rates and tau that are best in the authors' grid.

    Reference:
        Reddi et al., arXiv:2003.00295, section 5 and appendix. Learning rates and tau:
        google-research/federated.
    """
    return FedAvgImages(
        dataset="federated_emnist",
        in_memory=False,
        population=NaturalPopulation(field="client"),
        model=CNNConfig(num_classes=62, dropout_rates=(0.25, 0.5)),
        cohort=CohortConfig(size=10, batch_size=20),
        client_learning_rate=10**-1.5,
        server=ServerConfig(optimizer="adam", learning_rate=10**-2.5, b1=0.9, tau=1e-4),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )


def fedyogi_cifar100() -> FedAvgImages:
    """FedYogi on CIFAR-100 by client, 10 of 500 clients per round. Downloads once.

    The settings of the paper: ResNet-18 with group normalization, 11,227,812 parameters. The places
    of crops differ within a batch, unlike in the authors' code.

    Reference:
        Reddi et al., arXiv:2003.00295, section 5 and appendix. The crops and the squared weights:
        google-research/federated.
    """
    return FedAvgImages(
        dataset="federated_cifar100",
        crop_size=24,
        l2_factor=1e-4,
        population=NaturalPopulation(field="client"),
        model=ResNetConfig(num_channels=3, num_classes=100),
        cohort=CohortConfig(size=10, batch_size=20),
        client_learning_rate=10**-1.5,
        server=ServerConfig(optimizer="yogi", learning_rate=1.0, b1=0.9, tau=0.1),
        training=TrainingConfig(rounds=4000, evaluate_every=100, checkpoint_every=100),
    )
