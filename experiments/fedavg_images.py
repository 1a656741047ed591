"""FedAvg on images: cohorts of a population whose clients differ in what and how much they have."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithms import fedavg, server_adam, server_yogi
from fedpax.data import (
    ClientSampler,
    DirichletClients,
    Source,
    cohort_rounds,
    load,
    partition_dirichlet,
    partition_natural,
    read_examples,
)
from fedpax.data.populations.partition import Partition
from fedpax.data.rounds.example_rounds import example_batches
from fedpax.models.classifiers import CNNConfig, cnn
from fedpax.models.losses import classification_loss
from fedpax.parallel.axes import shardings
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.training.algorithm import Params
from fedpax.training.evaluation import evaluator
from fedpax.training.experiment import Experiment, Run, Shardings, TrainingConfig


@dataclasses.dataclass(frozen=True)
class CohortConfig:
    """Who trains in a round, and on how much.

    Attributes:
        size: clients in a round.
        batch: examples in a step of a client.
        epochs: how often a client goes through its examples in a round.
        max_steps: the most steps of a client in a round; None cuts nobody short.
        chunk_size: how many clients a device runs at once. With 1 each costs its own steps.
            A number, never "auto": which clients share a step depends on how many do.
        seed: chooses the cohorts and the orders of the examples.
    """

    size: int
    batch: int = 20
    epochs: int = 1
    max_steps: int | None = None
    chunk_size: int = 1
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The server's optimizer.

    Attributes:
        optimizer: which one; with SGD at rate 1 and no momentum the method is FedAvg itself.
        learning_rate: its learning rate.
        b1: decay of the first moment; for SGD the momentum.
        b2: decay of the second moment.
        tau: degree of adaptivity, added to the root of the second moment.
    """

    optimizer: Literal["sgd", "adam", "yogi"] = "sgd"
    learning_rate: float = 1.0
    b1: float = 0.0
    b2: float = 0.99
    tau: float = 1e-3

    def make(self) -> optax.GradientTransformation:
        """Makes the optimizer."""
        if self.optimizer == "sgd":
            return optax.sgd(self.learning_rate, momentum=self.b1 or None)
        make = {"adam": server_adam, "yogi": server_yogi}[self.optimizer]
        return make(self.learning_rate, b1=self.b1, b2=self.b2, tau=self.tau)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgImages(Experiment):
    """A convolutional network, trained by FedAvg on clients of unequal size.

    With `mesh.clients=-1` the round runs on as many devices as there are and share the cohort
    evenly.

    Attributes:
        dataset: a name for `fedpax.data.load`, of images with labels.
        heldout_split: the split to evaluate on.
        heldout_batch: examples that a device evaluates at once.
        data_dir: the folder of prepared data sets; None is the data sets' own default.
        in_memory: read the training split once and keep it; otherwise a cohort's examples are
            read from the files, some 10,000 a second, while the cohort before it trains.
        model: the network.
        cohort: who trains in a round.
        client_learning_rate: of the clients' SGD.
        server: the server's optimizer.
    """

    dataset: str
    heldout_split: str = "test"
    heldout_batch: int = 256
    data_dir: str | None = None
    in_memory: bool = True
    model: CNNConfig
    cohort: CohortConfig
    client_learning_rate: float
    server: ServerConfig = ServerConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(clients=-1))

    @abc.abstractmethod
    def population(self, source: Source) -> Partition:
        """Says which examples of the training split each client has."""

    def build(self) -> Run:
        """Loads the images, and makes population, cohorts, model, algorithm and mesh."""
        settings = self.cohort
        sizes = sharing(self.mesh, settings.size)
        mesh = sizes.make(available_devices()[: sizes.size])
        devices = mesh.shape.get("clients", 1)
        source = load(self.dataset, "train", data_dir=self.data_dir)
        _check_fields(self.dataset, source, "image", "label")
        population = self.population(source)
        rounds = cohort_rounds(
            read_examples(source) if self.in_memory else source,
            population,
            ClientSampler(len(population), settings.size, settings.seed),
            batch=settings.batch,
            epochs=settings.epochs,
            max_steps=settings.max_steps,
            seed=settings.seed,
            devices=devices,
            chunk_size=settings.chunk_size,
        )
        heldout = load(self.dataset, self.heldout_split, data_dir=self.data_dir)
        model = cnn(self.model)
        loss_fn = classification_loss(model.apply)
        method = fedavg(
            loss_fn,
            cohort_size=settings.size,
            client_optimizer=optax.sgd(self.client_learning_rate),
            server_optimizer=self.server.make(),
            chunk_size=settings.chunk_size,
        )

        over_clients = NamedSharding(
            mesh, PartitionSpec("clients" if "clients" in mesh.axis_names else None)
        )

        # Later, since a plan's devices hold no data.
        @functools.cache
        def heldout_evaluator() -> Callable[[Params], dict[str, float]]:
            return evaluator(
                loss_fn,
                example_batches(read_examples(heldout), self.heldout_batch),
                placement="clients",
                num_participants=devices,
                sharding=over_clients,
            )

        return Run(
            algorithm=method,
            init=model.init,
            cohorts=rounds,
            evaluate=lambda params: heldout_evaluator()(params),
            mesh=mesh,
            shardings=Shardings(
                params=shardings(
                    model.logical_axes, jax.eval_shape(model.init, jax.random.key(0)), mesh
                ),
                cohort=over_clients,
            ),
            items_per_round=rounds.examples_per_round,
            item_unit="examples",
            placement="clients",
            cohort_shapes=rounds.shapes,
        )


def _check_fields(dataset: str, source: Source, *fields: str) -> None:
    found = source[0]
    if missing := [field for field in fields if field not in found]:
        raise ValueError(
            f"--dataset={dataset} has no field {' or '.join(map(repr, missing))}, but "
            f"{', '.join(map(repr, found))}: this experiment needs "
            f"{' and '.join(map(repr, fields))}."
        )


def sharing(mesh: MeshConfig, clients: int) -> MeshConfig:
    """Gives a mesh of `clients=-1` the largest `clients` axis that shares a cohort evenly."""
    if mesh.clients != -1:
        return mesh
    available = len(available_devices()) // dataclasses.replace(mesh, clients=1).size
    even = max(d for d in range(1, max(available, 1) + 1) if clients % d == 0)
    return dataclasses.replace(mesh, clients=even)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgDirichlet(FedAvgImages):
    """Clients that share the training split, each with labels of its own.

    Attributes:
        clients: how many there are.
        alpha: Dirichlet's; small for clients of few labels.
    """

    clients: int
    alpha: float

    def population(self, source: Source) -> Partition:
        """Deals the examples out by label."""
        return partition_dirichlet(
            read_examples(source)["label"], self.clients, alpha=self.alpha, seed=self.cohort.seed
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgSynthetic(FedAvgImages):
    """A large population over few examples: clients have labels and sizes of their own.

    Attributes:
        clients: how many there are.
        alpha: Dirichlet's; small for clients of few labels.
        median_examples: the median number of a client's examples.
        sigma: the standard deviation of the logarithm of that number.
        max_examples: the largest number of a client's examples.
    """

    clients: int
    alpha: float
    median_examples: float
    sigma: float
    max_examples: int

    def population(self, source: Source) -> Partition:
        """Makes each client when it is drawn."""
        return DirichletClients(
            read_examples(source)["label"],
            self.clients,
            alpha=self.alpha,
            median_examples=self.median_examples,
            sigma=self.sigma,
            max_examples=self.max_examples,
            seed=self.cohort.seed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgNatural(FedAvgImages):
    """Clients as the data has them.

    Attributes:
        field: the field that names an example's client.
    """

    field: str = "client"

    def population(self, source: Source) -> Partition:
        """Reads the source through once, to find whose the examples are."""
        _check_fields(self.dataset, source, self.field)
        return partition_natural(source, self.field)[0]


def fedavg_digits() -> FedAvgDirichlet:
    """FedAvg: 30 clients share handwritten digits, few labels each; takes seconds."""
    return FedAvgDirichlet(
        dataset="digits",
        clients=30,
        alpha=0.3,
        model=CNNConfig(image_height=8, image_width=8, filters=(8, 16), hidden_dim=32),
        cohort=CohortConfig(size=10, batch=10, epochs=2),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=60, evaluate_every=10, checkpoint_every=30),
    )


def fedavg_population() -> FedAvgSynthetic:
    """FedAvg: 1,000 clients a round of a population of 100,000 over handwritten digits."""
    return FedAvgSynthetic(
        dataset="digits",
        clients=100_000,
        alpha=0.3,
        median_examples=12.0,
        sigma=1.0,
        max_examples=200,
        model=CNNConfig(image_height=8, image_width=8, filters=(8, 16), hidden_dim=32),
        cohort=CohortConfig(size=1_000, batch=10, max_steps=20),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=30, evaluate_every=5, checkpoint_every=15),
    )


def fedadam_emnist() -> FedAvgNatural:
    """FedAdam on EMNIST by writer, 62 classes: 10 of 3,400 writers a round; downloads once.

    Reference: Reddi et al., Adaptive Federated Optimization, arXiv:2003.00295, section 5 and
    appendix: 10 clients a round, batches of 20, one epoch, 1,500 rounds, client rate 10^-1.5,
    server rate 10^-2.5, b1 0.9, b2 0.99, epsilon 10^-3. The network has no dropout here.
    """
    return FedAvgNatural(
        dataset="federated_emnist",
        in_memory=False,
        model=CNNConfig(num_classes=62),
        cohort=CohortConfig(size=10, batch=20),
        client_learning_rate=10**-1.5,
        server=ServerConfig("adam", learning_rate=10**-2.5, b1=0.9),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )
