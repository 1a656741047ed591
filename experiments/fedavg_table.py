"""FedAvg on tables of one's own: linear and logistic regression, and multilayer perceptrons.

fedpax train --exp=fedavg_table --data.files='hospitals/*.csv' --data.label=outcome
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpax.algorithm import LossFn, Params
from fedpax.checks import COUNT, NON_NEGATIVE, check_ranges
from fedpax.data import ClientSampler, Partition, cohort_rounds, example_batches
from fedpax.data.rounds.preprocess import Arrays, Preprocess
from fedpax.errors import ArgumentError
from fedpax.experiments.client_evaluation import EvaluateClients
from fedpax.experiments.fedavg_clients import ClientExperiment, CohortConfig
from fedpax.experiments.personal_evaluation import own_models, pad_cohort, with_own_models
from fedpax.experiments.table_data import (
    OpenTable,
    PreparedTable,
    TableConfig,
    open_table,
    prepare_table,
)
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.models.losses import (
    ModelLoss,
    classification_loss,
    l2_regularized,
    squared_error_loss,
)
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.parallel.mesh_rule import ShardedSize
from fedpax.training.client_metrics import (
    ExampleOwners,
    classification_by_client,
    regression_by_client,
)
from fedpax.training.evaluation import Batch, map_examples
from fedpax.training.experiment import Run, TrainingConfig

NEW = "new_clients/"
"""Before the names of metrics on clients that are held out with all their examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgTable(ClientExperiment):
    """A model of a table's columns, trained on clients of different sizes.

    With `hidden_sizes=()` it is linear regression, or logistic regression for two or more classes,
    and begins from 0. A number to predict is standardized; the loss is its mean squared error, and
    the metric `rmse` is in the label's own unit. If there are fewer clients than `cohort.size`,
    a round has all of them.

    Attributes:
        data: the files, and what becomes of their columns.
        hidden_sizes: sizes of the hidden layers of a multilayer perceptron.
        l2_factor: factor of the squared weights in the training loss. Default 0: none.
    """

    data: TableConfig = dataclasses.field(default_factory=TableConfig)
    hidden_sizes: tuple[int, ...] = ()
    l2_factor: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        check_ranges(self, "", l2_factor=NON_NEGATIVE)
        if not all(size in COUNT for size in self.hidden_sizes):
            raise ArgumentError(
                f"hidden_sizes={self.hidden_sizes}, expected sizes of at least 1. Set for example "
                "--hidden_sizes 64 32."
            )

    @functools.cached_property
    def table(self) -> OpenTable:
        """The files, read when they are first needed."""
        return open_table(self.data)

    @functools.cached_property
    def prepared(self) -> PreparedTable:
        """The table as arrays."""
        return prepare_table(self.data, self.table, self.aggregator, self.cohort.seed)

    @functools.cached_property
    def training_parts(self) -> dict[str, NDArray[np.int64]]:
        """The training examples of each client."""
        return self.table.parts(self.table.training)

    def fit_cohort(self) -> "FedAvgTable":
        """Return the experiment with at most as many clients in a round as there are."""
        size = min(self.cohort.size, len(self.training_parts))
        if size == self.cohort.size:
            return self
        fitting = dataclasses.replace(self, cohort=dataclasses.replace(self.cohort, size=size))
        fitting.__dict__.update({"table": self.table, "training_parts": self.training_parts})
        return fitting

    def sharded_sizes(self) -> list[ShardedSize]:
        """Return the size that the axis of clients divides."""
        size = min(self.cohort.size, len(self.training_parts))
        return [ShardedSize("cohort.size", size, ("clients",))]

    def read_population(self) -> tuple[Partition, NDArray[np.integer] | None]:
        """Return the indices of each client's examples, and the class of each example."""
        labels = self.prepared.examples["label"]
        is_class = self.prepared.label.task == "classification"
        return list(self.training_parts.values()), labels if is_class else None

    def read_clients(self) -> tuple[Arrays, Partition]:
        """Return all examples, and the indices of each client's training examples."""
        return self.prepared.examples, list(self.training_parts.values())

    def make_preprocess(self) -> Preprocess:
        """Make the function from the fields of examples to those of batches, which are equal."""
        return dict

    def open_heldout(self, preprocess: Preprocess) -> Callable[[], Sequence[Batch]]:
        """Return the function that makes the batches of the held-out examples."""
        del preprocess
        table = self.table
        chosen = table.heldout if table.heldout.any() else table.is_new[table.owners]
        return lambda: self._batches(chosen)

    def _batches(self, chosen: NDArray[np.bool_]) -> Sequence[Batch]:
        examples = {name: values[chosen] for name, values in self.prepared.examples.items()}
        return example_batches(examples, self.heldout_batch_size)

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

    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the cross-entropy or the squared error, regularized if `l2_factor` is set."""
        loss_fn = self._plain_loss(model)
        return l2_regularized(loss_fn, self.l2_factor) if self.l2_factor else loss_fn

    def _plain_loss(self, model: FunctionalModel) -> ModelLoss:
        if self.prepared.label.task == "regression":
            return squared_error_loss(model.apply)
        return classification_loss(model.apply, field="features")

    def make_evaluation(
        self, evaluate: Callable[..., Callable[[Params], dict[str, float]]], model: FunctionalModel
    ) -> Callable[[Params], dict[str, float]]:
        """Evaluate on the held-out examples, and on the held-out clients if there are any."""
        table, loss_fn = self.table, self._plain_loss(model)
        of_new = table.is_new[table.owners]
        parts = {"": table.heldout, NEW: of_new} if table.heldout.any() else {"": of_new}
        evaluations = {
            prefix: (
                evaluate(loss_fn, batches=self._batches(chosen)),
                self.prepared.examples["label"][chosen],
            )
            for prefix, chosen in parts.items()
            if chosen.any()
        }

        def evaluate_parts(params: Params) -> dict[str, float]:
            return {
                f"{prefix}{name}": value
                for prefix, (evaluate_part, labels) in evaluations.items()
                for name, value in self._with_units(evaluate_part(params), labels).items()
            }

        return evaluate_parts

    def _with_units(
        self, metrics: dict[str, float], labels: NDArray[np.floating]
    ) -> dict[str, float]:
        """Add the error in the label's unit, and the share of variance that is explained."""
        label = self.prepared.label
        if label.task == "classification":
            return metrics
        variance = float(np.var(labels, dtype=np.float64))
        r2 = 1 - metrics["loss"] / variance if variance else float("nan")
        return {**metrics, "rmse": metrics["loss"] ** 0.5 * label.scale, "r2": r2}

    def make_client_evaluation(self, model: FunctionalModel) -> EvaluateClients:
        """Make the evaluation by client, on its held-out examples.

        Clients that are held out with all their examples are marked "(new)". A client without a
        held-out example has no metrics.
        """
        table, label = self.table, self.prepared.label
        chosen = np.flatnonzero(table.heldout | table.is_new[table.owners])
        names = [
            name + " (new)" * bool(is_new)
            for name, is_new in zip(table.names, table.is_new, strict=True)
        ]
        clients = ExampleOwners(names, table.owners[chosen])
        examples = {name: values[chosen] for name, values in self.prepared.examples.items()}
        outputs = map_examples(
            lambda params, batch: model.apply(params, batch["features"])[0],
            {"features": examples["features"]},
        )
        if label.task == "classification":
            return lambda params: classification_by_client(
                outputs(params), examples["label"], clients
            )

        def in_units(values: Any) -> NDArray[np.float64]:
            return np.asarray(values, np.float64) * label.scale + label.mean

        return lambda params: regression_by_client(
            in_units(outputs(params)[:, 0]), in_units(examples["label"]), clients
        )

    def build(self) -> Run:
        """Read the files, and make the run; a method's own models are evaluated by client."""
        fitting = self.fit_cohort()
        if fitting is not self:
            run = fitting.build()
            size = f"cohort.size={self.cohort.size}: a round has all {fitting.cohort.size} clients"
            return run._replace(notes=(*run.notes, size))
        run = super().build()._replace(notes=(*self.table.notes, *self.prepared.notes))
        if not own_models(self.method):
            return run
        return with_own_models(run, self.method, functools.cache(self.evaluate_own_models))

    def evaluate_own_models(self) -> Callable[[Any], dict[str, float]]:
        """Make the evaluation of the clients' own models, each on its held-out examples.

        The training batches of all clients are in memory. Clients that are held out with all their
        examples have no model of their own.

        Returns:
            `state -> metrics`, means over the held-out examples; `state` is that of the algorithm.
        """
        examples, population = self.read_clients()
        sampler = ClientSampler(len(population), len(population), self.cohort.seed)
        every_client = next(
            cohort_rounds(
                examples,
                population,
                sampler,
                batch_size=self.cohort.batch_size,
                local_epochs=self.cohort.local_epochs,
                max_steps=self.cohort.max_steps,
                seed=self.cohort.seed,
                preprocess=dict,
            )
        )
        cohort = pad_cohort(every_client, self.make_mesh().shape.get("clients", 1))
        heldout, none = self.table.parts(self.table.heldout), np.zeros(0, np.int64)
        names = [*self.training_parts, None]  # the last one for absent clients, whose id is -1
        own = _padded(
            examples, [heldout.get(names[k] or "", none) for k in np.asarray(cohort.client_ids)]
        )
        model, rate = self.make_model(), self.client_learning_rate
        train_loss, loss_fn = self.make_loss(model), self._plain_loss(model)

        @jax.jit
        def evaluate(state: Any, cohort: Any, own: Any) -> dict[str, jax.Array]:
            models = self.method.personal_models(train_loss, rate, state, cohort)
            loss, metrics = jax.vmap(loss_fn)(models, own)
            weights = own["mask"].sum(axis=1)
            found = {**metrics, "loss": loss}
            return {name: jnp.sum(weights * x) / weights.sum() for name, x in found.items()}

        return lambda state: {
            name: float(value) for name, value in evaluate(state, cohort, own).items()
        }

    def write_inputs(self, folder: Path) -> None:
        """Write `table.json`: the treatments, means, deviations and categories of the columns.

        `fedpax.data.tables.TableFeatures.from_json` and `Label.from_json` read it.
        """
        content = {
            "columns": self.prepared.features.to_json(),
            "label": self.prepared.label.to_json(),
        }
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / "table.json").write_text(text + "\n", encoding="utf-8")


def _padded(examples: Arrays, parts: Sequence[NDArray[np.int64]]) -> dict[str, chex.Array]:
    """Return the examples of each client, `[clients, most examples, ...]`, with a mask."""
    most = max(1, *(len(part) for part in parts))
    rows = np.stack([np.pad(part, (0, most - len(part))) for part in parts])
    mask = np.arange(most) < np.array([len(part) for part in parts])[:, None]
    return {name: values[rows] for name, values in examples.items()} | {"mask": np.float32(mask)}


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
