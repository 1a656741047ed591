"""Tables over sites: one treatment of the columns of all sites."""

import abc
import dataclasses
import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import fedpax
from fedpax.comma_lists import escape_commas
from fedpax.console import first_ten
from fedpax.data.tables.features import (
    assemble_features,
    numeric_bounds,
    numeric_columns,
    numeric_values,
)
from fedpax.data.tables.moments import (
    Averages,
    Scaling,
    averages_program,
    client_averages,
    moments_of_ranges,
    moments_steps,
)
from fedpax.data.tables.prepared_table import PreparedTable, split_label
from fedpax.data.tables.shared_treatment import (
    CLASSES,
    KIND,
    LABEL,
    NUMBERS,
    agree_on_kinds,
    agree_on_table,
    check_categories,
    column_property,
    describe_categories,
    describe_kind,
    describe_table,
    table_properties,
)
from fedpax.data.tables.treatments import Treatment, parse_treatment
from fedpax.data.tables.values import arrow_column, is_missing
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.experiments.parts.file_experiments import saved_content
from fedpax.experiments.parts.received_inputs import check_inputs
from fedpax.settings.table_data import TableConfig
from fedpax.sites.agreement import Needed
from fedpax.sites.site_experiment import ClientRange, ColumnValues, Question, SiteRun
from fedpax.transforms.stages import Stages

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesOverSites(FedAvgFiles):
    """An experiment on tables, for whose features sites agree on one treatment of the columns."""

    data: TableConfig

    @property
    @abc.abstractmethod
    def prepared(self) -> PreparedTable:
        """The table as arrays."""

    def describe_inputs(self) -> dict[str, Any]:
        """Return what a site tells of the columns of its training examples."""
        self.__dict__.pop("_offered", None)  # to sites that agreed without this one
        label = self.data.label_of(self.opened, min_classes=1)
        treatments = self.data.treatments_of(self.opened)
        stated = self.data.stated_label
        has_classes = stated is not None and stated.values is not None
        training, _ = self._training_examples(self.opened.columns)
        return describe_table(training, treatments, label, has_classes)

    @functools.cached_property
    def _categories(self) -> dict[str, Json]:
        treatments = [t for t in self.data.treatments_of(self.opened) if t.kind == "category"]
        training, owners = self._training_examples(t.name for t in treatments)
        return describe_categories(training, treatments, owners)

    def list_values(self, columns: Sequence[str]) -> Json:
        """Return the values of columns that are categories here, and how many clients have each."""
        offered = {name: values for name, values in self._categories.items() if name in columns}
        self.__dict__["_offered"] = offered
        return offered

    def with_inputs(self, inputs: Json) -> Self:
        """Return the experiment with the columns that sites share; a site checks them first."""
        if "_at_site" in self.__dict__:
            offered = self.__dict__.get("_offered", {})
            check_inputs(self.data, self.opened, inputs, offered, self._deviation)
        return super().with_inputs(inputs)

    def _deviation(self, treatment: Treatment) -> float:
        training, owners = self._training_examples([treatment.name])
        values = numeric_values([treatment], training, len(owners))
        known = values[~np.isnan(values)]
        return float(known.std()) if len(known) else 0.0

    @property
    def note_values(self) -> str:
        """A line on the values that a site sends of each category, and how to send none."""
        values = {n: [*x["values"]] for n, x in self._categories.items() if x.get("values")}
        if not values:
            return ""
        shown = [f"{len(v):,} of {n!r} ({', '.join(map(repr, v[:3]))})" for n, v in values.items()]
        return (
            f"sends the syncer, where all sites have categories, the values of text columns: "
            f"{'; '.join(shown)}. To send none: --data.columns '{min(values)}=left_out' at the "
            "syncer and at each site"
        )

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run; it tells its features, and columns that have no value here."""
        run, columns, prepared = super().at_site(clients), self.opened.columns, self.prepared
        assert isinstance(prepared, PreparedTable)
        names = [column.treatment.name for column in prepared.features.columns]
        features = first_ten(map(repr, prepared.features.names))
        run = run._replace(notes=(*run.notes, f"trains on the features {features}"))
        empty = [n for n in names if is_missing(arrow_column(columns[n])).all()]
        if not empty:
            return run
        shown = first_ten(map(repr, empty))
        told = f"no value at this site, so each row counts as missing one: {shown}"
        return run._replace(notes=(*run.notes, told))

    def shared_properties(self, description: Mapping[str, Any]) -> dict[str, str | None]:
        """Return what the tables of sites must share, and the columns that all of them need."""
        properties: dict[str, str | None] = {**table_properties(description)}
        for column in description["columns"]:
            name = column_property(column["name"])
            if column["kind"] == "left_out" and column["reason"] != "no values":
                continue
            value = properties.pop(name, None)  # None: without a value it is of any kind
            properties[_needed(column["name"])] = value
        return properties

    def stated_properties(self) -> dict[str, str]:
        """Return what `table_properties` returns of the label and columns that are stated."""
        label, treatments = self.data.stated_label, map(parse_treatment, self.data.columns)
        stated = {
            column_property(t.name): describe_kind(t)
            for t in treatments
            if "*" not in t.name and t.name != self.data.label
        }
        if self.data.task == "regression":
            stated[KIND] = NUMBERS
        classes = "none" if label is None or label.values is None else "|".join(label.values)
        return {**stated, LABEL: self.data.label or "", CLASSES: classes}

    def agree(
        self, descriptions: Sequence[Mapping[str, Any]]
    ) -> Generator[Question | ColumnValues, Any, Json]:
        """Agree on the features of tables; ask for categories, means and deviations."""
        texts = [t for t in agree_on_kinds(descriptions) if t.kind == "category"]
        values: Any = [{}] * len(descriptions)
        if texts:  # of a text that a site leaves out, no site sends values
            names = [t.name for t in texts]
            values = yield ColumnValues(names, lambda x: check_categories(x, texts))
        agreed = agree_on_table(
            descriptions,
            values,
            max_categories=self.data.max_categories,
            min_clients=self.data.category_clients,
            task=self.data.task,
        )
        used = [t for t in agreed.treatments if t.kind != "left_out"]
        columns = self.data.with_label(used, agreed.label)
        num_clients = sum(int(d["clients"]) for d in descriptions)
        combine = self.aggregator.for_statistics(self.cohort.seed, num_clients)
        numeric = numeric_columns(columns)
        of_ranges = self.data.standardize == "range" or not numeric
        bounds = numeric_bounds(numeric, needed=combine.limit is not None or of_ranges)
        if of_ranges:
            moments = moments_of_ranges(bounds)
        else:
            limit, least = combine.limit, combine.least_deviation
            steps = moments_steps(len(numeric), bounds, limit=limit, least_deviation=least)
            combined = None
            while True:
                try:
                    scaling = steps.send(combined)
                except StopIteration as end:
                    moments = end.value
                    break
                settings = {"columns": [t._asdict() for t in numeric], "scaling": _to_json(scaling)}
                divided, types = self._moments_stages(num_clients, len(numeric), scaling)
                combined = yield Question(settings, divided, types)
        features = assemble_features(columns, moments, agreed.categories, agreed.missing)
        features, label = split_label(features, agreed.label, "The sites' tables have")
        return saved_content(self.data, label, features) | {"sites": len(descriptions)}

    def answer(self, settings: Json, clients: ClientRange) -> tuple[Stages, tuple[Any, ...]]:
        """Average the columns that the coordinator asks for, for each client of this site."""
        try:
            numeric = [*map(Treatment.from_json, settings["columns"])]
            scaling = _from_json(settings["scaling"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"The syncer asks for averages in another form ({type(error).__name__}: {error}). "
                "Use the same version of fedpax on both sides."
            ) from error
        self._check_question(numeric, scaling)
        training, owners = self._training_examples(
            {t.name for t in numeric} & {*self.opened.columns}
        )
        values = numeric_values(numeric, training, len(owners))
        counts = np.bincount(owners, minlength=clients.number)
        averages = client_averages(scaling.apply(values), owners, counts)
        divided, types = self._moments_stages(clients.total, len(numeric), scaling)

        def place(type_: Any, rows: Any) -> Any:
            everyone = np.zeros(type_.shape, type_.dtype)
            everyone[clients.first : clients.first + clients.number] = rows
            return everyone

        return divided, jax.tree.map(place, types, (averages, np.float32(counts)))

    def _check_question(self, numeric: Sequence[Treatment], scaling: Scaling) -> None:
        """Refuse a question that would tell more than means and mean squares of numbers.

        Means of values clipped to chosen bounds tell single values.
        """
        known = {t.name: t for t in (*self.data.treatments_of(self.opened), self.data.number_label)}
        for place, treatment in enumerate(numeric):
            here = known.get(treatment.name)
            if here is not None and here.reason == "no values":
                continue
            if here is not None and here.kind != treatment.kind:
                raise ArgumentError(
                    f"The syncer asks for the mean of {treatment.name!r} as {treatment.kind}, but "
                    f"it is {here.kind} at this site. State --data.columns at the syncer and "
                    "at each site."
                )
            asked = [] if here is None else [treatment.bounds]
            if scaling.low is not None and scaling.high is not None:
                asked.append((float(scaling.low[place]), float(scaling.high[place])))
            if any(here is None or bounds != here.bounds for bounds in asked):
                raise ArgumentError(
                    f"The syncer asks for the mean of {treatment.name!r} within {asked[-1]}, "
                    "expected the range that this site states. State --data.columns at the syncer "
                    "and at each site."
                )

    def _moments_stages(
        self, num_clients: int, num_columns: int, scaling: Scaling
    ) -> tuple[Stages, tuple[Any, ...]]:
        combine = self.aggregator.for_statistics(self.cohort.seed, num_clients).aggregator
        rows: Any = jax.ShapeDtypeStruct((num_clients, num_columns), jnp.float32)
        types = Averages(rows, rows, rows), jax.ShapeDtypeStruct((num_clients,), jnp.float32)
        program = averages_program(num_clients, combine, scaling.factor)
        return fedpax.stages(program, *types), types

    def _training_examples(
        self, names: Iterable[str]
    ) -> tuple[dict[str, Any], Int[np.ndarray, " examples"]]:
        """Return columns of the training examples, and the client of each, from 0."""
        table, chosen = self.opened, self.opened.training
        _, owners = np.unique(table.owners[chosen], return_inverse=True)
        return {name: table.columns[name].filter(chosen) for name in names}, owners


def _needed(column: str) -> Needed:
    return Needed(
        column_property(column),
        "add it, or start a site that lacks it with --data.optional_columns "
        f"'{escape_commas(column)}': its values are then missing there",
    )


def _to_json(scaling: Scaling) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in scaling._asdict().items()}


def _from_json(fields: Json) -> Scaling:
    center, half, low, high, factor = (fields[name] for name in Scaling._fields)
    if low is not None:
        low, high = np.array(low), np.array(high)
    return Scaling(np.array(center), np.array(half), low, high, factor)
