"""Populations of clients as configuration: how the training examples belong to clients."""

import abc
import dataclasses

from fedpax.checks import CheckedConfig, Count, NonNegative, Positive
from fedpax.data import (
    DirichletClients,
    Source,
    partition_dirichlet,
    partition_natural,
    read_examples,
)
from fedpax.errors import ArgumentError
from fedpax.experiments.parts.settings import documented_by
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.populations.partition import Partition


@dataclasses.dataclass(frozen=True)
class PopulationConfig(CheckedConfig, abc.ABC):
    """The clients that exist, of which each round samples a cohort."""

    group = "population"

    @abc.abstractmethod
    def make(self, source: Source, seed: int) -> Partition:
        """Return the indices of each client's examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirichletPopulation(PopulationConfig):
    """A partition of the training split among clients with different label distributions.

    Attributes:
        num_clients: number of clients in the population.
        alpha: concentration of the Dirichlet distribution of each client's labels. Smaller values
            give each client fewer labels.
    """

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
        # A source without `client_starts`, or another field, takes one pass over the source.
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
