"""Experiments over sites: the clients of a site among the clients of all sites."""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from fedpax.algorithm import LossFn, Params
from fedpax.algorithms import fedavg
from fedpax.clients.cohort import Cohort, CohortStream
from fedpax.data import ClientSampler, CohortRounds, Partition
from fedpax.data.tables.labels import Label
from fedpax.populations.client_arrays import ComputedPartition
from fedpax.sites.site_experiment import ClientRange, ColumnValues, Question


class OverSites:
    """An experiment over sites that agree on nothing before the first round, by default."""

    def shared_content(self) -> dict[str, str]:
        """Return hashes of the files that must be equal at all sites, by default none."""
        return {}

    def shared_properties(self, description: Mapping[str, Any]) -> Mapping[str, str | None]:
        """Return what must be equal at all sites, by default nothing beside the identity."""
        del description
        return {}

    def stated_properties(self) -> Mapping[str, str]:
        """Return the shared properties that the configuration states, by default none."""
        return {}

    def agree(
        self, descriptions: Sequence[Mapping[str, Any]]
    ) -> Generator[Question | ColumnValues, Any, Mapping[str, Any]]:
        """Return the inputs that all sites share, by default none."""
        del descriptions
        yield from ()
        return {}

    @property
    def least_clients(self) -> int:
        """The fewest clients of a round: with fewer, no sum is opened, or it would be 0."""
        experiment: Any = self
        if not hasattr(self, "aggregator"):
            return 1
        least: int = experiment.aggregator.least_clients(experiment.cohort.size)
        return max(least, getattr(experiment.aggregator, "min_participants", None) or 1)

    @property
    def agreed(self) -> Sequence[str]:
        """Lines on what sites agreed on: the label and its classes, if there is one."""
        label: Label | None = getattr(self, "label", None)
        return () if label is None else (label.describe(),)

    @property
    def note_values(self) -> str:
        """A line on the values of text that `list_values` returns, by default none."""
        return ""

    def list_values(self, columns: Sequence[str]) -> Mapping[str, Any]:
        """Return the values of columns of text that are categories here, by default none."""
        del columns
        return {}

    def answer(self, settings: Mapping[str, Any], clients: ClientRange) -> Any:
        """Answer a question of `agree`."""
        raise NotImplementedError(f"{type(self).__name__} asks no questions")

    def with_inputs(self, inputs: Mapping[str, Any]) -> Self:
        """Return the experiment with the inputs that the sites share."""
        del inputs
        return self

    def finish_metrics(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Make metrics of means over held-out examples, by default the means."""
        return means

    def sized(self, num_clients: int) -> Self:
        """Return the experiment with at most as many clients in a round as there are."""
        experiment: Any = self
        if hasattr(self, "aggregator") and num_clients < experiment.cohort.size:
            experiment.aggregator.check_cohort(num_clients, of_all=True)
        cohort = dataclasses.replace(
            experiment.cohort, size=min(experiment.cohort.size, num_clients)
        )
        resized: Self = dataclasses.replace(experiment, cohort=cohort)
        return resized


def sample_present(sampler: ClientSampler) -> Callable[[int, Any], list[int]]:
    """Return the function `(round, present) -> clients` of a coordinator."""

    def sample(round_number: int, present: Any) -> list[int]:
        chosen = sampler
        if not present.all():
            chosen = dataclasses.replace(sampler, available=lambda _: present)
        return list(map(int, chosen.sample(round_number)))

    return sample


class SitePopulation(ComputedPartition):
    """The `total` clients of all sites: `own` from `first` on, others without examples."""

    def __init__(self, own: Partition, first: int, total: int) -> None:
        self._own, self._first, self._total = own, first, total

    def __len__(self) -> int:
        return self._total

    def indices_of(self, participant: int) -> NDArray[np.int64]:
        """Return the indices of a client's examples."""
        place = participant - self._first
        if 0 <= place < len(self._own):
            return np.asarray(self._own[place])
        return np.zeros(0, np.int64)


class ChosenClients(ClientSampler):
    """A sampler whose clients the coordinator has chosen."""

    chosen: Sequence[int] = ()

    def sample(self, round_number: int) -> NDArray[np.int64]:
        """Return the chosen clients."""
        return np.array(self.chosen, np.int64)


def batch_shapes(rounds: CohortRounds) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the types of a batch of some rounds."""
    batches = rounds.shapes.batches
    return {n: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for n, x in batches.items()}


def drawer(
    rounds: CohortRounds, stream: CohortStream, sampler: ChosenClients
) -> Callable[[int, Sequence[int]], Cohort]:
    """Return the function `(round, clients) -> cohort` of a site."""
    start: Any = stream.get_state()

    def draw(round_number: int, clients: Sequence[int]) -> Cohort:
        object.__setattr__(sampler, "chosen", tuple(clients))
        stream.set_state({**start, "round": round_number})
        return next(stream)

    return draw


def fine_tuner(
    draw: Callable[[int, Sequence[int]], Cohort],
    clients: ClientRange,
    cohort_size: int,
    loss_fn: LossFn,
    learning_rate: float,
) -> Callable[[Params], Params]:
    """Return the function that takes one more round of FedAvg with a site's clients alone."""
    ids = range(clients.first, clients.first + clients.number)
    optimizer = optax.sgd(learning_rate)
    alone = fedavg(loss_fn, cohort_size=cohort_size, client_optimizer=optimizer, chunk_size=1)
    step = jax.jit(alone.round)

    def fine_tune(params: Params) -> Params:
        cohorts = (draw(0, ids[k : k + cohort_size]) for k in range(0, len(ids), cohort_size))
        parts = [
            (step(alone.init(params), c)[0].params, np.asarray(c.num_examples).sum())
            for c in cohorts
        ]
        models, examples = zip(*parts, strict=True)
        weights = np.maximum(examples, 1e-9)  # without examples the model stays
        return jax.tree.map(lambda *x: np.average(x, 0, weights).astype(x[0].dtype), *models)

    return fine_tune
