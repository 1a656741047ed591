"""FedAvg on images: cohorts of a population whose clients differ in labels and in size."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedpax.algorithms import fedavg, server_adagrad, server_adam, server_yogi
from fedpax.clients.cohort_stream import CohortStream
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    Partition,
    Source,
    cohort_rounds,
    example_batches,
    load,
    read_examples,
)
from fedpax.experiments.populations import (
    DirichletPopulation,
    NaturalPopulation,
    PopulationConfig,
    SyntheticPopulation,
    check_has_fields,
)
from fedpax.experiments.ranges import COUNT, DECAY, POSITIVE, check_ranges
from fedpax.models.classifiers import CNNConfig, cnn
from fedpax.models.losses import classification_loss
from fedpax.parallel.axes import shardings
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.training.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.training.evaluation import evaluator
from fedpax.training.experiment import Experiment, Run, Shardings, TrainingConfig


@dataclasses.dataclass(frozen=True)
class CohortConfig:
    """The clients of a round and their local training.

    Attributes:
        size: number of clients in a round.
        batch_size: examples in a local step of a client.
        local_epochs: passes of a client over its examples in a round.
        max_steps: largest number of local steps of a client in a round. Default None: no limit.
        chunk_size: number of clients that a device runs at once. With 1, a client runs only its
            own steps. With more, every client of a chunk takes as long as the longest. "auto" is
            not supported, because clients of similar size share a chunk.
        seed: random seed of the population, the cohorts and the order of each client's examples.
    """

    size: int
    batch_size: int = 20
    local_epochs: int = 1
    max_steps: int | None = None
    chunk_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        names = ("size", "batch_size", "local_epochs", "max_steps", "chunk_size")
        check_ranges(self, "cohort", **dict.fromkeys(names, COUNT))


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The server optimizer: FedAvg's or FedAvgM's SGD, or one of FedOpt's adaptive optimizers.

    Attributes:
        optimizer: "sgd" with learning rate 1 and b1 = 0 is FedAvg, with b1 > 0 FedAvgM. "adagrad",
            "adam" and "yogi" are FedAdagrad, FedAdam and FedYogi as Reddi et al. define them.
        learning_rate: learning rate of the server.
        b1: decay rate of the first moment; the momentum of "sgd".
        b2: decay rate of the second moment of "adam" and "yogi".
        tau: degree of adaptivity, added to the square root of the second moment.
    """

    optimizer: Literal["sgd", "adagrad", "adam", "yogi"] = "sgd"
    learning_rate: float = 1.0
    b1: float = 0.0
    b2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "server", learning_rate=POSITIVE, b1=DECAY, b2=DECAY, tau=POSITIVE)

    def make(self) -> optax.GradientTransformation:
        """Make the optimizer."""
        match self.optimizer:
            case "sgd":
                return optax.sgd(self.learning_rate, momentum=self.b1 or None)
            case "adagrad":
                return server_adagrad(self.learning_rate, b1=self.b1, tau=self.tau)
            case "adam":
                return server_adam(self.learning_rate, b1=self.b1, b2=self.b2, tau=self.tau)
            case "yogi":
                return server_yogi(self.learning_rate, b1=self.b1, b2=self.b2, tau=self.tau)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgImages(Experiment):
    """A convolutional network trained by FedAvg on clients of different sizes.

    With `mesh.clients=-1`, a round uses the largest number of devices that divides the cohort. A
    run can resume on another number of devices: cohorts depend on the seed and the round alone.

    Attributes:
        dataset: a name for `fedpax.data.load`; its examples have fields `image` and `label`.
        heldout_split: the split to evaluate on.
        heldout_batch_size: examples in a batch of the evaluation.
        data_dir: the folder of prepared data sets. Default None: that of TensorFlow Datasets.
        in_memory: keep the training split in memory. If False, the examples of a cohort are read
            from files (about 10,000 examples per second) while the previous cohort trains.
        model: the network.
        population: the clients that exist.
        cohort: the clients of a round and their local training.
        client_learning_rate: learning rate of the clients' SGD.
        server: the server optimizer.
    """

    dataset: str
    heldout_split: str = "test"
    heldout_batch_size: int = 256
    data_dir: str | None = None
    in_memory: bool = True
    model: CNNConfig
    population: PopulationConfig
    cohort: CohortConfig
    client_learning_rate: float
    server: ServerConfig = ServerConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(clients=-1))

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "", heldout_batch_size=COUNT, client_learning_rate=POSITIVE)

    def read_population(self) -> tuple[Partition, NDArray[np.integer]]:
        """Return the indices of each client's examples, and the label of each example."""
        source = self._read_source()
        return self.population.make(source, self.cohort.seed), read_examples(source)["label"]

    def _read_source(self) -> Source:
        source = load(self.dataset, "train", data_dir=self.data_dir)
        check_has_fields(source, "image", "label")
        return source

    def make_sampler(self, population: Partition) -> ClientSampler:
        """Make the sampler of the clients of each round."""
        return ClientSampler(len(population), self.cohort.size, self.cohort.seed)

    def make_algorithm(self, loss_fn: LossFn) -> FederatedAlgorithm:
        """Make the federated algorithm."""
        return fedavg(
            loss_fn,
            cohort_size=self.cohort.size,
            client_optimizer=optax.sgd(self.client_learning_rate),
            server_optimizer=self.server.make(),
            chunk_size=self.cohort.chunk_size,
        )

    def make_stream(self, rounds: CohortRounds, sampler: ClientSampler) -> CohortStream:
        """Make the stream of cohorts from the rounds of the sampled clients."""
        del sampler
        return rounds

    def build(self) -> Run:
        """Load the images, and make the population, cohorts, model, algorithm and mesh."""
        cohort = self.cohort
        mesh_config = resolve_clients_axis(self.mesh, cohort.size)
        mesh = mesh_config.make(available_devices()[: mesh_config.size])
        num_devices = mesh.shape.get("clients", 1)
        source = self._read_source()
        population = self.population.make(source, cohort.seed)
        sampler = self.make_sampler(population)
        rounds = cohort_rounds(
            read_examples(source) if self.in_memory else source,
            population,
            sampler,
            batch_size=cohort.batch_size,
            local_epochs=cohort.local_epochs,
            max_steps=cohort.max_steps,
            seed=cohort.seed,
            num_devices=num_devices,
            chunk_size=cohort.chunk_size,
        )
        heldout = load(self.dataset, self.heldout_split, data_dir=self.data_dir)
        model = cnn(self.model)
        loss_fn = classification_loss(model.apply)
        over_clients = NamedSharding(
            mesh, PartitionSpec("clients" if "clients" in mesh.axis_names else None)
        )

        # Made at the first evaluation: `fedpax plan` compiles for devices that cannot hold data.
        @functools.cache
        def heldout_evaluator() -> Callable[[Params], dict[str, float]]:
            return evaluator(
                loss_fn,
                example_batches(read_examples(heldout), self.heldout_batch_size),
                placement="clients",
                num_participants=num_devices,
                sharding=over_clients,
            )

        return Run(
            algorithm=self.make_algorithm(loss_fn),
            init=model.init,
            cohorts=self.make_stream(rounds, sampler),
            evaluate=lambda params: heldout_evaluator()(params),
            mesh=mesh,
            shardings=Shardings(
                params=shardings(
                    model.logical_axes, jax.eval_shape(lambda: model.init(jax.random.key(0))), mesh
                ),
                cohort=over_clients,
            ),
            items_per_round=rounds.items_per_round,
            item_unit="examples",
            placement="clients",
            cohort_shapes=rounds.shapes,
        )


def resolve_clients_axis(mesh: MeshConfig, cohort_size: int) -> MeshConfig:
    """Replace `clients=-1` by the largest axis that divides the cohort and fits the devices.

    Args:
        mesh: the sizes of the mesh.
        cohort_size: number of clients in a round.

    Raises:
        ValueError: `clients` is a number that does not divide the cohort.

    Example:
        >>> resolve_clients_axis(MeshConfig(clients=2), cohort_size=10).clients
        2
    """
    if mesh.clients != -1:
        if cohort_size % mesh.clients:
            raise ValueError(
                f"--mesh.clients={mesh.clients} does not divide --cohort.size={cohort_size}. Set "
                f"--cohort.size to a multiple of {mesh.clients}, or --mesh.clients=-1 for the "
                "largest axis that divides the cohort."
            )
        return mesh
    available = len(available_devices()) // dataclasses.replace(mesh, clients=1).size
    size = max(d for d in range(1, max(available, 1) + 1) if cohort_size % d == 0)
    return dataclasses.replace(mesh, clients=size)


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
    learning rate 10^-1.5, server learning rate 1, b1 = 0.9, b2 = 0.99, tau = 0.1. The network is
    not the paper's ResNet-18 with group normalization but the smaller one that it uses for EMNIST,
    and images are neither cropped nor flipped: the accuracy is below the paper's.

    Reference:
        Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, section 5 and appendix.
    """
    return FedAvgImages(
        dataset="federated_cifar100",
        population=NaturalPopulation(field="client"),
        model=CNNConfig(image_height=32, image_width=32, num_channels=3, num_classes=100),
        cohort=CohortConfig(size=10, batch_size=20),
        client_learning_rate=10**-1.5,
        server=ServerConfig(optimizer="yogi", learning_rate=1.0, b1=0.9, tau=0.1),
        training=TrainingConfig(rounds=4000, evaluate_every=100, checkpoint_every=100),
    )
