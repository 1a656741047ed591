"""FedAvg on users' tables: linear and logistic regression, and multilayer perceptrons."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.checks import COUNT
from fedpax.comma_lists import escape_commas
from fedpax.console import first_ten
from fedpax.data.rounds.labeled_examples import Arrays
from fedpax.data.tables import Label, TableFeatures
from fedpax.data.tables.prepared_table import PreparedTable, encode_table, fit_table, split_label
from fedpax.errors import ArgumentError
from fedpax.experiments.parts.file_experiments import saved_content
from fedpax.experiments.parts.tables_over_sites import TablesOverSites
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.table_data import TableConfig
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgTable(TablesOverSites):
    """A model of a table's columns, trained on clients of different sizes.

    With `hidden_sizes=()` it is linear regression, or logistic regression for two or more classes,
    and begins from 0. A number to predict is standardized; the loss is its mean squared error, and
    the metric `rmse` is in the label's own unit.

    Attributes:
        data: the files, and what becomes of their columns.
        hidden_sizes: sizes of the hidden layers of a multilayer perceptron.
    """

    data: TableConfig = dataclasses.field(default_factory=TableConfig)
    hidden_sizes: tuple[int, ...] = ()
    field = "features"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(size in COUNT for size in self.hidden_sizes):
            raise ArgumentError(
                f"hidden_sizes={self.hidden_sizes}, expected sizes of at least 1. Set for example "
                "--hidden_sizes 64 32."
            )

    @functools.cached_property
    def prepared(self) -> PreparedTable:
        """The table as arrays."""
        data, table = self.data, self.opened
        if (saved := self.saved_inputs) is not None:
            label = Label.from_json(saved["label"])
            features = TableFeatures.from_json(saved["columns"])
            for column in features.columns:
                if (name := column.treatment.name) not in {*table.columns}:
                    raise ArgumentError(
                        f"data.files={' '.join(data.files)} has no column {name!r}, which the "
                        "model was trained with. Add it, or set --data.optional_columns "
                        f"'{escape_commas(name)}': its values are then missing."
                    )
            return encode_table(table, features, label)
        label = data.label_of(table)
        treatments = data.with_label(data.treatments_of(table), label)
        combine = self.aggregator.for_statistics(self.cohort.seed, len(self.training_parts))
        fitted = fit_table(
            table,
            treatments,
            **combine._asdict(),
            standardize=data.standardize,
            min_clients=data.category_clients,
        )
        features, label = split_label(fitted, label, f"data.files={' '.join(data.files)} has")
        return encode_table(table, features, label, treatments)

    @property
    def features(self) -> TableFeatures:
        """The features, which a coordinator without data knows from its sites."""
        if (saved := self.saved_inputs) is None:
            return self.prepared.features
        return TableFeatures.from_json(saved["columns"])

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The columns and classes, as `saved_content` has them."""
        return saved_content(self.data, self.prepared.label, self.prepared.features)

    def blank_example(self) -> Arrays:
        """Return the features and the label of one example."""
        is_class = self.label.task == "classification"
        return {
            "features": np.zeros((1, len(self.features.names)), np.float32),
            "label": np.zeros(1, np.int32 if is_class else np.float32),
        }

    @property
    def releases_before(self) -> int:
        """The release of means and variances before the first round, if there are any."""
        kinds = {column.treatment.kind for column in self.features.columns}
        has_numbers = not kinds.isdisjoint(("number", "date")) or self.label.task == "regression"
        return int(self.data.standardize == "federated" and has_numbers)

    @property
    def disclosures(self) -> Sequence[str]:
        """Lines on what clients of a private run tell of their columns, and how to state it."""
        data, label, lines = self.data, self.label, []
        if self.releases_before:
            lines.append(
                "the means and variances are one more private release, which epsilon counts"
            )
        treatments = [column.treatment for column in self.features.columns]
        if guessed := [t for t in treatments if t.reason != "stated"]:
            lines.append(
                f"not private: the kinds of {first_ten(repr(t.name) for t in guessed)}, which "
                "follow from values; state them: --data.columns "
                f"'{guessed[0].name}={guessed[0].kind}'"
            )
        if data.stated_label is None and data.task is None:
            lines.append(
                f"not private: whether {label.name!r} is a class or a number, which follows from "
                f"values; state it: --data.task={label.task}"
            )
        open_ = [t.name for t in treatments if t.kind == "category" and not t.values]
        if label.classes and (data.stated_label is None or data.stated_label.values is None):
            open_.append(label.name)
        if open_ := sorted(open_):
            lines.append(
                f"not private: the set of values of {first_ten(map(repr, open_))}, which clients "
                f"disclose; state it: --data.columns '{open_[0]}=category(A|B)'"
            )
        columns = self.features.columns
        if optional := [c for c in columns if c.treatment.missing != "error"]:
            having = [c.treatment.name for c in optional if c.has_missing]
            first, shown = optional[0].treatment, f"{len(having) or 'none'} of {len(optional)}"
            shown += f": {first_ten(map(repr, having))}" if having else ""
            lines.append(
                f"not private: which columns have missing values ({shown}), which clients "
                "disclose; to disclose none, fill in all values, and state --data.columns "
                f"'{first.name}={first._replace(missing='error').describe()}'"
            )
        return lines

    def make_model(self) -> FunctionalModel:
        """Make the regression, which begins from 0, or the multilayer perceptron."""
        sizes = (len(self.features.names), *self.hidden_sizes, self.label.num_outputs)
        model = mlp(MLPConfig(layer_sizes=sizes))
        if self.hidden_sizes:
            return model
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        return model._replace(
            init=lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        )


def fedavg_table() -> FedAvgTable:
    """FedAvg on tables of your own, such as CSV files: regression or classes. Needs files.

    Set `--data.files` and `--data.label`. Each file is a client, or `--data.client` names the
    column of clients. `--hidden_sizes 64 32` makes a multilayer perceptron.
    """
    return FedAvgTable(
        cohort=CohortConfig(size=100, batch_size=16),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=100, evaluate_every=10, checkpoint_every=50),
    )
