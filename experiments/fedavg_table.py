"""FedAvg on users' tables: linear and logistic regression, and multilayer perceptrons.

`fedpax train --exp=fedavg_table --data.files='hospitals/*.csv' --data.label=outcome`
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fedpax.checks import COUNT
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_clients import CohortConfig
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.experiments.table_data import (
    PreparedTable,
    TableConfig,
    apply_saved_table,
    prepare_table,
)
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.training.experiment import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgTable(FedAvgFiles):
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
        """Check the ranges."""
        super().__post_init__()
        if not all(size in COUNT for size in self.hidden_sizes):
            raise ArgumentError(
                f"hidden_sizes={self.hidden_sizes}, expected sizes of at least 1. Set for example "
                "--hidden_sizes 64 32."
            )

    @functools.cached_property
    def prepared(self) -> PreparedTable:
        """The table as arrays."""
        if self.saved_inputs is not None:
            return apply_saved_table(self.data, self.opened, self.saved_inputs)
        return prepare_table(self.data, self.opened, self.aggregator, self.cohort.seed)

    def make_model(self) -> FunctionalModel:
        """Make the regression, which begins from 0, or the multilayer perceptron."""
        prepared = self.prepared
        sizes = (len(prepared.features.names), *self.hidden_sizes, prepared.label.num_outputs)
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
