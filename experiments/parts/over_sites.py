"""Experiments over sites: clients of each site, and tables with one treatment of the columns."""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

import fedpax
from fedpax.clients.cohort import Cohort, CohortStream
from fedpax.comma_lists import escape_commas
from fedpax.data import ClientSampler, CohortRounds, Partition
from fedpax.data.open_client_files import OpenFiles
from fedpax.data.tables.features import (
    assemble_features,
    numeric_bounds,
    numeric_columns,
    numeric_values,
)
from fedpax.data.tables.labels import Label
from fedpax.data.tables.moments import (
    Averages,
    Moments,
    Scaling,
    averages_program,
    client_averages,
    moments_of_ranges,
    moments_steps,
)
from fedpax.data.tables.prepared_table import split_label
from fedpax.data.tables.shared_treatment import (
    CLASSES,
    KIND,
    LABEL,
    NUMBERS,
    agree_on_table,
    column_property,
    describe_kind,
    describe_table,
    table_properties,
)
from fedpax.data.tables.treatments import Treatment, parse_treatment
from fedpax.errors import ArgumentError
from fedpax.experiments.parts.file_experiments import saved_content
from fedpax.populations.client_arrays import ComputedPartition
from fedpax.settings.client_aggregators import AggregatorConfig
from fedpax.settings.table_data import TableConfig
from fedpax.sites.agreement import Needed
from fedpax.sites.site_experiment import ClientRange, Question
from fedpax.transforms.stages import Stages

Json = Mapping[str, Any]


def describe_site_table(data: TableConfig, table: OpenFiles) -> dict[str, Any]:
    """Return what a site tells of the columns of its training examples."""
    label = data.label_of(table, min_classes=1)
    treatments = data.treatments_of(table)
    stated = data.stated_label
    has_classes = stated is not None and stated.values is not None
    training, owners = _training_examples(table, table.columns)
    return describe_table(training, treatments, owners, label, has_classes)


def _training_examples(
    table: OpenFiles, names: Iterable[str]
) -> tuple[dict[str, Any], Int[np.ndarray, " examples"]]:
    """Return columns of the training examples, and the client of each, from 0."""
    chosen = table.training
    _, owners = np.unique(table.owners[chosen], return_inverse=True)
    return {name: table.columns[name].filter(chosen) for name in names}, owners


def shared_table_properties(description: Json) -> dict[str, str | None]:
    """Return what the tables of sites must share, and the columns that all of them need."""
    properties: dict[str, str | None] = {**table_properties(description)}
    for column in description["columns"]:
        name = column_property(column["name"])
        if column["kind"] == "left_out" and column["reason"] != "no values":
            continue
        value = properties.pop(name, None)  # None: without a value it is of any kind
        properties[_needed(column["name"])] = value
    return properties


def _needed(column: str) -> Needed:
    return Needed(
        column_property(column),
        "add it, or start a site that lacks it with --data.optional_columns "
        f"'{escape_commas(column)}': its values are then missing there",
    )


def stated_properties(data: TableConfig) -> dict[str, str]:
    """Return what `table_properties` returns of the label and columns that are stated."""
    label, treatments = data.stated_label, map(parse_treatment, data.columns)
    stated = {
        column_property(t.name): describe_kind(t)
        for t in treatments
        if "*" not in t.name and t.name != data.label
    }
    if data.task == "regression":
        stated[KIND] = NUMBERS
    classes = "none" if label is None or label.values is None else "|".join(label.values)
    return {**stated, LABEL: data.label or "", CLASSES: classes}


def agree_on_features(
    data: TableConfig, config: AggregatorConfig, seed: int, descriptions: Sequence[Json]
) -> Generator[Question, Any, Json]:
    """Agree on the features of tables, and ask for the means and deviations of numbers."""
    agreed = agree_on_table(
        descriptions,
        max_categories=data.max_categories,
        min_clients=data.category_clients,
        task=data.task,
    )
    used = [t for t in agreed.treatments if t.kind != "left_out"]
    columns = data.with_label(used, agreed.label)
    num_clients = sum(int(d["clients"]) for d in descriptions)
    combine = config.for_statistics(seed, num_clients)
    numeric = numeric_columns(columns)
    needed = combine.limit is not None or data.standardize == "range"
    bounds = numeric_bounds(numeric, needed=needed)
    if data.standardize == "range":
        moments = moments_of_ranges(bounds)
    elif not numeric:
        moments = Moments(np.zeros(0), np.zeros(0))
    else:
        steps, combined = (
            moments_steps(
                len(numeric),
                bounds,
                limit=combine.limit,
                least_deviation=combine.least_deviation,
            ),
            None,
        )
        while True:
            try:
                scaling = steps.send(combined)
            except StopIteration as end:
                moments = end.value
                break
            settings = {"columns": [t._asdict() for t in numeric], "scaling": _to_json(scaling)}
            divided, types = _moments_stages(config, seed, num_clients, len(numeric), scaling)
            combined = yield Question(settings, divided, types)
    features = assemble_features(columns, moments, agreed.categories, agreed.missing)
    features, label = split_label(features, agreed.label)
    if not features.names:
        raise ArgumentError(
            "The tables of the sites have no column that is a feature, expected at least one "
            f"beside {data.label!r}. State treatments: --data.columns NAME=category."
        )
    return saved_content(data, label, features) | {"sites": len(descriptions)}


def answer_on_features(
    data: TableConfig,
    table: OpenFiles,
    config: AggregatorConfig,
    seed: int,
    settings: Json,
    clients: ClientRange,
) -> tuple[Stages, tuple[Any, ...]]:
    """Average the columns that the coordinator asks for, for each client of this site."""
    numeric = [*map(Treatment.from_json, settings["columns"])]
    scaling = _from_json(settings["scaling"])
    _check_question(data, table, numeric, scaling)
    training, owners = _training_examples(table, {t.name for t in numeric} & {*table.columns})
    values = numeric_values(numeric, training, len(owners))
    counts = np.bincount(owners, minlength=clients.number)
    averages = client_averages(scaling.apply(values), owners, counts)
    divided, types = _moments_stages(config, seed, clients.total, len(numeric), scaling)

    def place(type_: Any, rows: Any) -> Any:
        everyone = np.zeros(type_.shape, type_.dtype)
        everyone[clients.first : clients.first + clients.number] = rows
        return everyone

    return divided, jax.tree.map(place, types, (averages, np.float32(counts)))


def _check_question(
    data: TableConfig, table: OpenFiles, numeric: Sequence[Treatment], scaling: Scaling
) -> None:
    """Refuse a question that would tell more than means and mean squares of numbers.

    Values that are clipped to chosen bounds would tell single values.
    """
    known = {t.name: t for t in (*data.treatments_of(table), data.number_label)}
    for place, treatment in enumerate(numeric):
        here = known.get(treatment.name)
        if here is not None and here.reason == "no values":
            continue
        if here is not None and here.kind != treatment.kind:
            raise ArgumentError(
                f"The syncer asks for the mean of {treatment.name!r} as {treatment.kind}, but it "
                f"is {here.kind} at this site. State --data.columns at the syncer and at each site."
            )
        asked = None
        if scaling.low is not None and scaling.high is not None:
            asked = scaling.low[place], scaling.high[place]
        if asked is not None and (here is None or here.bounds != tuple(map(float, asked))):
            raise ArgumentError(
                f"The syncer asks for the mean of {treatment.name!r} within {asked}, expected the "
                "range that this site states. State --data.columns at the syncer and at each site."
            )
        if here is not None and (treatment.bounds or None) != here.bounds:
            raise ArgumentError(
                f"The syncer states another range of {treatment.name!r} than this site. State "
                "--data.columns at the syncer and at each site."
            )


def _moments_stages(
    config: AggregatorConfig, seed: int, num_clients: int, num_columns: int, scaling: Scaling
) -> tuple[Stages, tuple[Any, ...]]:
    combine = config.for_statistics(seed, num_clients).aggregator
    rows: Any = jax.ShapeDtypeStruct((num_clients, num_columns), jnp.float32)
    types = Averages(rows, rows, rows), jax.ShapeDtypeStruct((num_clients,), jnp.float32)
    program = averages_program(num_clients, combine, scaling.factor)
    return fedpax.stages(program, *types), types


def _to_json(scaling: Scaling) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in scaling._asdict().items()
    }


def _from_json(fields: Json) -> Scaling:
    center, half, low, high, factor = (fields[name] for name in Scaling._fields)
    if low is not None:
        low, high = np.array(low), np.array(high)
    return Scaling(np.array(center), np.array(half), low, high, factor)


# ---- client experiments over sites: a site's clients among the clients of all sites


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
    ) -> Generator[Question, Any, Mapping[str, Any]]:
        """Return the inputs that all sites share, by default none."""
        del descriptions
        yield from ()
        return {}

    @property
    def agreed(self) -> Sequence[str]:
        """Lines on what sites agreed on: the label and its classes, if there is one."""
        label: Label | None = getattr(self, "label", None)
        return () if label is None else (label.describe(),)

    def answer(self, settings: Mapping[str, Any], clients: ClientRange) -> Any:
        """Answer a question of `agree`."""
        raise NotImplementedError(f"{type(self).__name__} asks no questions")

    def with_inputs(self, inputs: Mapping[str, Any]) -> Self:
        """Return the experiment with the inputs that the sites share."""
        del inputs
        return self

    def sized(self, num_clients: int) -> Self:
        """Return the experiment with at most as many clients in a round as there are."""
        experiment: Any = self
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
