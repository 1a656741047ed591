"""What an experiment offers so that its rounds run over sites with their own data."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax

from fedpax.aggregators import PrivacyAccountant
from fedpax.algorithm import FederatedAlgorithm, Params
from fedpax.clients.cohort import Cohort
from fedpax.training.experiment import HeldoutMetrics, StoredParams
from fedpax.training.training_config import TrainingConfig
from fedpax.transforms.stages import Stages

Json = Mapping[str, Any]

SITE_FILE = "site.json"
"""The run of a site's folder."""

FINE_TUNED = "fine_tuned"
"""The folder of a site's own model below its folder, and the prefix of its metrics."""

Finish = Callable[[Mapping[str, float]], Mapping[str, float]]
"""A function from means over examples to metrics, of each part and model: names have prefixes."""


class ClientRange(NamedTuple):
    """The clients of a site among all clients of a run: the first one, and both numbers."""

    first: int
    number: int
    total: int


class Question(NamedTuple):
    """A program that the coordinator runs over the clients before the first round.

    `SiteExperiment.answer` runs a site's part from `settings`, JSON.
    """

    settings: Json
    stages: Stages
    args: tuple[Any, ...]


class ColumnValues(NamedTuple):
    """A question for the values of columns, which a site's `list_values` answers in JSON.

    `check` raises if an answer is malformed. The reply has the answers in the order of the sites.
    """

    columns: Sequence[str]
    check: Callable[[Any], None]


class CoordinatorRun(NamedTuple):
    """A run as its coordinator sees it, without data.

    Attributes:
        sample: `(round, present) -> clients`, the numbers of a round's clients; `present` are
            booleans `[clients]`.
        initial: as of `Run`.
        frozen: types of the round's third argument, which is in no message.
        accountant: tells the epsilon of a site from the number of its private releases.
        batches: types of a batch, `[batch, ...]` for each field. None: what most sites have.
        notes: lines to print at the start.
        finish: makes metrics of the means over the held-out examples of all sites.
    """

    algorithm: FederatedAlgorithm
    init: Callable[[jax.Array], Params]
    cohort_size: int
    sample: Callable[[int, Any], Sequence[int]]
    initial: StoredParams | None = None
    frozen: Params | None = None
    batches: Mapping[str, Any] | None = None
    accountant: PrivacyAccountant | None = None
    notes: Sequence[str] = ()
    finish: Finish = dict


class SiteRun(NamedTuple):
    """A run as one of its sites sees it.

    Attributes:
        draw: `(round, clients) -> cohort` of `cohort_size` rows with batches of own clients; other
            rows have the id -1.
        evaluate: `params -> means` over the site's `num_heldout` held-out examples.
        names: names of the own clients in the order of their numbers, each once; states are kept
            under them.
        evaluate_personal: `state -> metrics` of each client's own model.
        fine_tune: `params -> params`, by one more round of this site's clients.
        heldout_parts: the number of examples of means whose names have a prefix, by prefix.
        label_means: last words of the names of means of labels: of few examples, or of a private
            run, they stay at the site.
    """

    algorithm: FederatedAlgorithm
    init: Callable[[jax.Array], Params]
    cohort_size: int
    draw: Callable[[int, Sequence[int]], Cohort]
    evaluate: Callable[[Params], HeldoutMetrics] | None
    num_heldout: int
    names: Sequence[str]
    frozen: StoredParams | None = None
    evaluate_personal: Callable[[Any], HeldoutMetrics] | None = None
    fine_tune: Callable[[Params], Params] | None = None
    notes: Sequence[str] = ()
    finish: Finish = dict
    heldout_parts: Mapping[str, int] = {}
    label_means: tuple[str, ...] = ()
    is_private: bool = False


@runtime_checkable
class SiteExperiment(Protocol):
    """An experiment whose rounds run over sites.

    `own_fields` are paths of a site's own fields.
    """

    own_fields: tuple[str, ...]
    training: TrainingConfig

    def shared_content(self) -> Mapping[str, str]:
        """Return hashes of the files that must be equal at all sites, by the field of each."""
        ...

    def describe_site(self) -> Json:
        """Return JSON that is disclosed to the coordinator, with `"clients"`, their number."""
        ...

    def shared_properties(self, description: Json) -> Mapping[str, str | None]:
        """Return what must be equal at all sites, in words by name; raise if it is malformed."""
        ...

    def stated_properties(self) -> Mapping[str, str]:
        """Return the properties that the coordinator itself states, and no site can change."""
        ...

    def agree(self, descriptions: Sequence[Json]) -> Generator[Question | ColumnValues, Any, Json]:
        """Return the inputs that all sites share, from their descriptions and from questions."""
        ...

    def answer(self, settings: Json, clients: ClientRange) -> tuple[Stages, tuple[Any, ...]]:
        """Return the stages of a question, and its arguments with the values of own clients."""
        ...

    def with_inputs(self, inputs: Json) -> Self:
        """Return the experiment with the inputs that the sites share."""
        ...

    def coordinate(self, num_clients: int) -> CoordinatorRun:
        """Make the coordinator's run for a number of clients. It reads no data."""
        ...

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run."""
        ...
