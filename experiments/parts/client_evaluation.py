"""Evaluation by client: the held-out examples of each client, and a model's metrics on them."""

import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int
from numpy.typing import NDArray

from fedpax.algorithm import LossFn, Params
from fedpax.checks import check_distinct
from fedpax.clients.cohort import Cohort
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    Partition,
    Source,
    cohort_rounds,
    partition_natural,
)
from fedpax.data.open_client_files import OpenFiles
from fedpax.data.rounds.heldout_tokens import HeldoutRows
from fedpax.data.rounds.labeled_examples import Preprocess
from fedpax.data.rounds.stream_parts import LocalRows, addressable_rows, arrays_fingerprint
from fedpax.data.tables import Label
from fedpax.deploy.batch_training import HeldoutClients
from fedpax.errors import ArgumentError
from fedpax.models.losses import ModelLoss
from fedpax.training.client_metrics import (
    ClientMetrics,
    ExampleOwners,
    classification_by_client,
    regression_by_client,
)
from fedpax.training.evaluation import Batch, evaluate_by_client, placed_evaluator
from fedpax.user_files.formats import FILE_NAME

LABEL_MEANS = ("label", "label_squared", "label_error")
"""The means with which `with_label_means` makes r2 possible, the error over the same examples."""

EvaluateClients = Callable[[Params], ClientMetrics]
"""A function from a model's parameters to its metrics by client."""


def client_name(value: Any) -> str:
    """Return a client's name as text, from the value of a field of its examples."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def owners_by_field(source: Source, field: str) -> ExampleOwners:
    """Return the clients that a field of held-out examples names."""
    parts = partition_natural(source, field)
    owners = np.empty(len(source), np.int64)
    for k, part in enumerate(parts):
        owners[part] = k
    return ExampleOwners([client_name(name) for name in parts.names], owners)


def rows_by_client(rows: Mapping[str, np.ndarray], parts: Partition) -> list[Batch]:
    """Return arrays `[rows, ...]` by client, for `evaluate_by_client`."""
    return [{name: values[np.asarray(part)] for name, values in rows.items()} for part in parts]


def masked_loss_by_client(
    loss_fn: LossFn,
    clients: Sequence[Batch],
    names: Sequence[str],
    finish: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
) -> EvaluateClients:
    """Make the evaluation of a model of tokens by client, weighted by targets."""
    # `loss_fn` returns means weighted by the mask, of which `finish` makes the metrics `[clients]`.
    evaluate = evaluate_by_client(loss_fn, clients)
    targets = np.array([np.sum(client["mask"], dtype=np.float64) for client in clients])
    return lambda params: ClientMetrics(names, targets, finish(evaluate(params)), "tokens")


def label_weights(
    parts: Sequence[Int[np.ndarray, " examples"]], heldout: Int[np.ndarray, " heldout"]
) -> Float[np.ndarray, "clients classes"]:
    """Weigh held-out examples by client and label."""
    classes = 1 + max(int(labels.max(initial=0)) for labels in (*parts, heldout))
    counts = np.stack([np.bincount(part, minlength=classes) for part in parts])
    return np.asarray(counts / np.maximum(np.bincount(heldout, minlength=classes), 1), np.float64)


def measure_clients(
    label: Label, outputs: NDArray[Any], labels: NDArray[Any], clients: ExampleOwners
) -> ClientMetrics:
    """Return the metrics of each client from the model's outputs for its examples."""
    if label.task == "classification":
        return classification_by_client(outputs, labels, clients)

    def in_units(values: NDArray[Any]) -> NDArray[np.float64]:
        return values.astype(np.float64) * label.scale + label.mean

    return regression_by_client(in_units(outputs[:, 0]), in_units(labels), clients)


def heldout_of_files(
    opened: OpenFiles,
    names: Sequence[str],
    prepared: Any,
    loss_fn: ModelLoss,
    *,
    batch_size: int,
    preprocess: Preprocess,
    participants: Sequence[str] | None = None,
) -> HeldoutClients:
    """Return the held-out examples of each client that has any."""
    # `participants` names the clients of a deployment in order, of which one may have no held-out
    # example; its batches have exactly `batch_size` examples. `loss_fn` has no regularization.
    parts = opened.parts(opened.heldout | opened.is_new[opened.owners])
    if participants is None:
        batch_size = min(batch_size, max(map(len, parts.values())))
    else:
        parts = {name: parts.get(name, np.zeros(0, np.int64)) for name in participants}
    places = {name: place for place, name in enumerate(opened.names)}
    chosen = [places[name] for name in parts]
    clients: Any = cohort_rounds(
        prepared.examples,
        list(parts.values()),
        ClientSampler(len(parts), len(parts)),
        batch_size=batch_size,
        preprocess=preprocess,
    )
    if participants is not None:
        clients = _InOrder(clients)
    heldout = HeldoutClients(clients, [names[k] for k in chosen], opened.is_new[chosen], loss_fn)
    if prepared.label.task == "classification":
        return heldout
    finish = functools.partial(finish_regression, prepared.label.scale, rounding=1e-6)
    return heldout._replace(loss_fn=_with_label_moments(loss_fn), finish=finish)


class _InOrder(NamedTuple):
    """Clients of a round in the order of their numbers."""

    clients: CohortRounds

    @property
    def shapes(self) -> Any:
        """The types of the data of a round."""
        return self.clients.shapes

    def client_ids(self, round_number: int) -> NDArray[np.integer]:
        return np.arange(self.clients.num_clients)

    def read_clients(self, round_number: int, client_ids: NDArray[np.integer]) -> Cohort:
        """Return the data of some clients."""
        return self.clients.read_clients(round_number, client_ids)


def _with_label_moments(loss_fn: ModelLoss) -> ModelLoss:
    """Add the means of the labels and of their squares to the metrics of a loss."""

    def with_moments(params: Params, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, metrics = loss_fn(params, batch)
        label, mask = batch["label"], batch["mask"]
        count = jnp.maximum(mask.sum(), 1)
        moments = {
            "label": jnp.sum(mask * label) / count,
            "label_squared": jnp.sum(mask * jnp.square(label)) / count,
        }
        return loss, {**metrics, **moments}

    return with_moments


def with_label_means(
    evaluate: Callable[[Params], dict[str, float]], labels: NDArray[np.floating]
) -> Callable[[Params], dict[str, float]]:
    """Add `LABEL_MEANS` to the means of an evaluation."""
    wide = labels.astype(np.float64)
    moments = {"label": wide.mean(), "label_squared": np.mean(wide**2)}

    def evaluate_with_labels(params: Params) -> dict[str, float]:
        means = evaluate(params)
        return {**means, **moments, "label_error": means["loss"]}

    return evaluate_with_labels


def finish_regression(
    scale: float, means: Mapping[str, Any], rounding: float = 1e-12
) -> dict[str, Any]:
    """Make the error in the label's unit and the explained variance from means of each part."""
    metrics = {name: x for name, x in means.items() if not name.endswith(LABEL_MEANS)}
    for part in [name.removesuffix("loss") for name in metrics if name.endswith("loss")]:
        loss = means[f"{part}loss"]
        metrics[f"{part}rmse"] = np.sqrt(loss) * scale
        if not all(part + name in means for name in LABEL_MEANS[:2]):
            continue
        mean, squared = (means[part + name] for name in LABEL_MEANS[:2])
        error = means.get(f"{part}label_error", loss)
        variance = squared - np.square(mean)
        # Equal labels have a variance of rounding errors alone.
        known = np.where(variance > rounding * squared, variance, np.nan)
        metrics[f"{part}r2"] = 1 - error / known
    return metrics


def fingerprint_of(batches: Sequence[Batch]) -> dict[str, str]:
    """Return a text that identifies batches in memory."""
    samples = [
        arrays_fingerprint(
            {str(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(batch)}
        )
        for batch in batches
    ]
    return {"of the run": f"{len(batches)} batches, sample {zlib.crc32(str(samples).encode())}"}


# ---- held-out texts: the split that every run evaluates on, and further data sets by name


class HeldoutSet(NamedTuple):
    """A data set to evaluate on beside the run's own."""

    name: str
    dataset: str
    field: str | None  # None: as in the run's own data
    split: str | None  # None: as in the run's own data


class HeldoutSets(NamedTuple):
    """The rows to evaluate on."""

    main: HeldoutRows
    others: Mapping[str, HeldoutRows]

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of each set, by its name."""
        named = {"of the run": self.main, **self.others}
        return {name: rows.fingerprint() for name, rows in named.items()}


_FORM = re.compile(
    rf"(?P<name>[\w.+-]+)=(?P<dataset>[^=@#\s]+|{FILE_NAME})"
    r"(#(?P<field>[^=@#\s]+))?(@(?P<split>[^=@#\s]+))?"
)


def parse_heldout_sets(texts: Sequence[str]) -> tuple[HeldoutSet, ...]:
    """Parse data sets to evaluate on, as `data.heldout_sets` has them."""
    sets = []
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None:
            raise ArgumentError(
                f"data.heldout_sets has {text!r}, expected NAME=DATASET or "
                "NAME=DATASET#FIELD@SPLIT. Set for example "
                "--data.heldout_sets web=c4/en:3.1.0@validation code=stdlib_text."
            )
        sets.append(HeldoutSet(**match.groupdict()))
    names = [heldout.name for heldout in sets]
    remedy = "Rename one of the sets: the name before '=' is free."
    check_distinct("data.heldout_sets", names, remedy=remedy)
    return tuple(sets)


def heldout_evaluator(
    loss_fn: LossFn,
    sets: HeldoutSets,
    *,
    batch_size: int,
    placement: str,
    num_participants: int,
    sharding: NamedSharding | None = None,
) -> Callable[[Params], dict[str, float]]:
    """Make a function that evaluates a language model on every held-out set."""

    def make(rows: HeldoutRows) -> Callable[[Params], dict[str, float]]:
        return placed_evaluator(
            loss_fn,
            *place_rows(rows, batch_size, num_participants, sharding),
            placement=placement,
            sharding=sharding,
        )

    main, others = make(sets.main), {name: make(rows) for name, rows in sets.others.items()}

    def evaluate(params: Params) -> dict[str, float]:
        metrics = _with_perplexity(main(params))
        for name, evaluate_other in others.items():
            result = _with_perplexity(evaluate_other(params))
            metrics |= {f"heldout/{name}/{key}": value for key, value in result.items()}
        return metrics

    return evaluate


def place_rows(
    rows: HeldoutRows, batch_size: int, num_participants: int, sharding: NamedSharding | None
) -> tuple[Any, Float[np.ndarray, "participants steps"]]:
    """Read the rows of this process's devices, as arrays over all participants."""
    # Arrays are `LocalRows` if the process does not need all rows.
    num_steps = -(-len(rows) // (batch_size * num_participants))
    shape = (num_participants, num_steps, batch_size)
    numbers = np.full(math.prod(shape), -1)
    numbers[: len(rows)] = np.arange(len(rows))
    targets = np.zeros(math.prod(shape), np.float32)
    targets[: len(rows)] = rows.num_targets
    weights = targets.reshape(shape).sum(axis=2)
    if sharding is None:
        mask = np.ones(shape, np.bool_)
    else:
        over_rows = PartitionSpec(*sharding.spec[:3])  # a row's tokens can be sharded too
        mask = addressable_rows(NamedSharding(sharding.mesh, over_rows), shape)
    read = rows.read(numbers[mask.ravel()])
    if mask.all():
        return {
            name: array.reshape(*shape, *array.shape[1:]) for name, array in read.items()
        }, weights
    return {name: LocalRows(array, mask) for name, array in read.items()}, weights


def _with_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    return {"loss": metrics["loss"], "perplexity": _perplexity(metrics["loss"]), **metrics}


def _perplexity(loss: float) -> float:
    """Return the perplexity; inf if it exceeds the largest float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def finish_perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Make each perplexity from the mean of its loss."""
    metrics = dict(means)
    for name in [name for name in means if name.endswith("perplexity")]:
        if (loss := means.get(f"{name.removesuffix('perplexity')}loss")) is not None:
            metrics[name] = _perplexity(loss)
    return metrics
