"""The settings of populations, cohorts and the server, which experiments with clients share."""

import abc
import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, Protocol, Self, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from fedpax.algorithm import LossFn, Params
from fedpax.algorithms import server_adagrad, server_adam, server_yogi
from fedpax.checks import (
    CheckedConfig,
    Count,
    CountOrZero,
    Decay,
    NonNegative,
    Positive,
    Probability,
)
from fedpax.console import count_of
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    DirichletClients,
    Partition,
    Source,
    cohort_rounds,
    partition_dirichlet,
    partition_natural,
    read_examples,
)
from fedpax.data.rounds.labeled_examples import Arrays, Preprocess
from fedpax.errors import ArgumentError
from fedpax.parallel.mesh import MeshConfig, MeshSizeError, available_devices
from fedpax.parallel.mesh_sizes import ShardedSize
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.primitives.device_loop import equal_chunks
from fedpax.primitives.participant_loop import largest_auto_chunk
from fedpax.settings.function_settings import documented_by
from fedpax.sources.source import Examples

_Experiment = TypeVar("_Experiment")


@dataclasses.dataclass(frozen=True)
@documented_by(cohort_rounds)
class CohortConfig(CheckedConfig):
    """The clients of a round and their local training.

    Attributes:
        size: number of clients in a round.
        max_steps: largest number of local steps of a client in a round. Default None: no limit.
        chunk_size: number of clients that a device runs at once. With 1, a client runs only its own
            steps. With more, every client of a chunk takes as long as the longest. "auto" is 1 on
            CPU and for adapters. On GPU and TPU it is the number of clients whose training fits in
            a sixteenth of the chip's memory, or in 1 GiB if that is more.
        sampling_probability: probability that a client joins a round, independently of others
            (Poisson sampling); `size` is then the largest number of clients. Default None: a round
            has `size` clients.
        seed: random seed of a simulated population, the cohorts, the order of each client's
            examples, and what the aggregator draws; `data.partition` of files has its own. Noise
            from a known seed protects no client.
    """

    group = "cohort"
    size: Count
    batch_size: Count = 20
    local_epochs: Count = 1
    max_steps: Count | None = None
    chunk_size: Count | Literal["auto"] = "auto"
    sampling_probability: Probability | None = None
    seed: CountOrZero = 0

    @property
    def at_once(self) -> int:
        """The clients that a device runs at once; 1 for "auto", until `fit` has replaced it."""
        return 1 if self.chunk_size == "auto" else self.chunk_size

    def fit(self, mesh: Mesh, loss_fn: LossFn, params: Params, batches: chex.ArrayTree) -> Self:
        """Replace "auto" by the number of clients that fit on a device, from types of a round."""
        device, clients = mesh.devices.flat[0], -(-self.size // mesh.shape.get("clients", 1))
        if self.chunk_size != "auto" or device.platform == "cpu":
            return self

        def train(params: Params, batches: chex.ArrayTree) -> Params:
            def step(params: Params, batch: chex.ArrayTree) -> tuple[Params, None]:
                gradient = jax.grad(lambda params: loss_fn(params, batch)[0])(params)
                return jax.tree.map(jnp.subtract, params, gradient), None

            return jax.tree.map(jnp.subtract, jax.lax.scan(step, params, batches)[0], params)

        of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        shared = [True] * len(jax.tree.leaves(params)) + [False] * len(jax.tree.leaves(of_one))
        with use_abstract_mesh(mesh.abstract_mesh):
            jaxpr = jax.make_jaxpr(train)(params, of_one)
        largest = largest_auto_chunk(jaxpr, shared, device.device_kind)
        return dataclasses.replace(self, chunk_size=equal_chunks(clients, largest))

    def note_left_out(self, sizes: Iterable[int]) -> list[str]:
        """Tell how many examples `max_steps` leaves out, for clients with numbers of examples."""
        if self.max_steps is None:
            return []
        counts = np.array([*sizes])
        rest = np.maximum(counts - self.max_steps * self.batch_size, 0)
        return [
            f"cohort.max_steps={self.max_steps}: {np.count_nonzero(rest):,} of {len(counts):,} "
            f"clients leave out {rest.sum():,} of {counts.sum():,} examples in a round"
        ]

    def note_all_clients(self, number: int) -> str:
        """Tell which clients a round has if `size` exceeds their number."""
        if self.sampling_probability is not None:
            each = f"each of all {number} clients with probability {self.sampling_probability:g}"
            return f"cohort.size={self.size}: a round has {each}"
        return f"cohort.size={self.size}: a round has all {count_of(number, 'client')}"

    def rounds(
        self,
        examples: Examples | Arrays,
        population: Partition,
        sampler: ClientSampler,
        preprocess: Preprocess,
        **layout: Any,
    ) -> CohortRounds:
        """Make the rounds of the sampled clients; `layout` are arguments of `cohort_rounds`."""
        names = ("batch_size", "local_epochs", "max_steps", "seed")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names} | layout
        return cohort_rounds(examples, population, sampler, preprocess=preprocess, **settings)


def with_cohort(experiment: _Experiment, cohort: CohortConfig) -> _Experiment:
    """Replace the field `cohort` of an experiment, which keeps what it has read."""
    other = copy.copy(experiment)
    object.__setattr__(other, "cohort", cohort)
    return other


@dataclasses.dataclass(frozen=True)
class ServerConfig(CheckedConfig):
    """The server optimizer: FedAvg's or FedAvgM's SGD, or one of FedOpt's adaptive optimizers.

    Attributes:
        optimizer: "sgd" with learning rate 1 and b1 = 0 is FedAvg, with b1 > 0 FedAvgM. "adagrad",
            "adam" and "yogi" are FedAdagrad, FedAdam and FedYogi as Reddi et al. define them.
        learning_rate: learning rate of the server.
        b1: decay rate of the first moment; the momentum of "sgd". Default None: 0.9 for "adam" and
            "yogi", 0 for the others.
        b2: decay rate of the second moment of "adam" and "yogi".
        tau: degree of adaptivity, added to the square root of the second moment.
    """

    group = "server"
    optimizer: Literal["sgd", "adagrad", "adam", "yogi"] = "sgd"
    learning_rate: Positive = 1.0
    b1: Decay | None = None
    b2: Decay = 0.99
    tau: Positive = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.b1 == 0 and self.optimizer in ("sgd", "adagrad"):  # one form of their default
            object.__setattr__(self, "b1", None)

    def make(self) -> optax.GradientTransformation:
        """Make the optimizer."""
        given = {} if self.b1 is None else {"b1": self.b1}
        match self.optimizer:
            case "sgd":
                return optax.sgd(self.learning_rate, momentum=self.b1 or None)
            case "adagrad":
                return server_adagrad(self.learning_rate, **given, tau=self.tau)
            case "adam":
                return server_adam(self.learning_rate, **given, b2=self.b2, tau=self.tau)
            case "yogi":
                return server_yogi(self.learning_rate, **given, b2=self.b2, tau=self.tau)


# ---- the mesh of an experiment with clients: the largest axis of devices that divides the cohort


class _WithCohort(Protocol):
    """The fields that `OnClientsMesh` reads."""

    @property
    def cohort(self) -> CohortConfig: ...
    @property
    def mesh(self) -> MeshConfig: ...


class OnClientsMesh:
    """An experiment with the fields `cohort` and `mesh`."""

    def sharded_sizes(self: _WithCohort) -> list[ShardedSize]:
        """Return the size that the axis of clients divides."""
        return [ShardedSize("cohort.size", self.cohort.size, ("clients",))]

    def make_mesh(self: _WithCohort) -> Mesh:
        """Make the mesh of the largest number of devices that divides the cohort."""
        return clients_mesh(self.mesh, self.cohort.size)


def over_clients(mesh: Mesh) -> NamedSharding:
    """Return the sharding of cohorts over a mesh."""
    return NamedSharding(mesh, PartitionSpec("clients" if "clients" in mesh.axis_names else None))


def clients_mesh(mesh: MeshConfig, cohort_size: int) -> Mesh:
    """Make a mesh whose axis of clients divides the cohort, with equal parts of all processes."""
    devices = available_devices()
    processes = sorted({device.process_index for device in devices})
    sizes = resolve_clients_axis(mesh, cohort_size, len(processes))
    if sizes.size % len(processes):
        rest = dataclasses.replace(mesh, clients=1).size
        raise MeshSizeError(
            f"{len(processes)} processes cannot share --cohort.size={cohort_size} clients equally. "
            f"Set --cohort.size={len(devices) // rest} for all {len(devices)} devices."
        )
    each = sizes.size // len(processes)
    return sizes.make(
        [
            device
            for process in processes
            for device in [d for d in devices if d.process_index == process][:each]
        ]
    )


def resolve_clients_axis(mesh: MeshConfig, cohort_size: int, processes: int = 1) -> MeshConfig:
    """Replace `clients=-1`, or no size, by the largest one that divides cohort and fits devices."""
    if mesh.clients not in (None, -1):
        if cohort_size % mesh.clients:
            raise ArgumentError(
                f"--mesh.clients={mesh.clients} does not divide --cohort.size={cohort_size}. Set "
                f"--cohort.size to a multiple of {mesh.clients}, or --mesh.clients=-1 for the "
                "largest axis that divides the cohort."
            )
        return mesh
    rest = dataclasses.replace(mesh, clients=1).size
    available = max(len(available_devices()) // rest, 1)
    sizes = [d for d in range(1, available + 1) if cohort_size % d == 0]
    even = [d for d in sizes if d * rest % processes == 0]
    return dataclasses.replace(mesh, clients=max(even or sizes))


@dataclasses.dataclass(frozen=True)
class PopulationConfig(CheckedConfig, abc.ABC):
    """The clients that exist, of which each round samples a cohort."""

    group = "population"

    @abc.abstractmethod
    def make(self, source: Source, seed: int) -> Partition:
        """Return the indices of each client's examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@documented_by(DirichletClients)
class DirichletPopulation(PopulationConfig):
    """A partition of the training split among clients with different label distributions."""

    num_clients: Count
    alpha: Positive

    def make(self, source: Source, seed: int) -> Partition:
        """Partition the examples by label."""
        labels = read_examples(source)["label"]
        return partition_dirichlet(labels, self.num_clients, alpha=self.alpha, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
@documented_by(DirichletClients)
class SyntheticPopulation(PopulationConfig):
    """A large population over few examples. Clients differ in label distribution and in size."""

    num_clients: Count
    alpha: Positive
    median_examples: Positive
    sigma: NonNegative
    max_examples: Count

    def make(self, source: Source, seed: int) -> Partition:
        """Make a population that generates a client when it is sampled."""
        return DirichletClients(read_examples(source)["label"], seed=seed, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NaturalPopulation(PopulationConfig):
    """The clients that the data set itself names.

    Attributes:
        field: the field of an example that names its client.
        max_examples: a client has its first `max_examples` examples. Default None: all of them.
    """

    field: str = "client"
    max_examples: Count | None = None

    def make(self, source: Source, seed: int) -> Partition:
        """Group the examples by client."""
        del seed
        check_has_fields(
            source,
            self.field,
            remedy="Set --population.field to the field that names an example's client",
        )
        if self.field == "client" and source.client_starts is not None:
            return ContiguousClients(source.client_starts, max_examples=self.max_examples)
        parts = partition_natural(source, self.field)
        return [part[: self.max_examples] for part in parts]


def check_has_fields(
    source: Source, *fields: str, remedy: str = "Rename its fields when it is prepared"
) -> None:
    """Check that the examples of a source have the fields that an experiment reads."""
    example = source[0]
    if missing := [field for field in fields if field not in example]:
        raise ArgumentError(
            f"The data set {source.name} has no field {' or '.join(map(repr, missing))}, only "
            f"{', '.join(map(repr, example))}. {remedy}, or choose another --dataset."
        )
