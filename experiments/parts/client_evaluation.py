"""Evaluation by client: the held-out examples of each client, and a model's metrics on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from fedpax.algorithm import LossFn, Params
from fedpax.data import Partition, Source, partition_natural
from fedpax.data.tables import Label
from fedpax.training.client_metrics import (
    ClientMetrics,
    ExampleOwners,
    classification_by_client,
    regression_by_client,
)
from fedpax.training.evaluation import Batch, evaluate_by_client

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
    """Make the evaluation of a model of tokens by client; a client has its number of targets."""
    # `loss_fn` returns means weighted by the mask, of which `finish` makes the metrics `[clients]`.
    evaluate = evaluate_by_client(loss_fn, clients)
    targets = np.array([np.sum(client["mask"], dtype=np.float64) for client in clients])
    return lambda params: ClientMetrics(names, targets, finish(evaluate(params)), "tokens")


def label_weights(
    parts: Sequence[Int[np.ndarray, " examples"]], heldout: Int[np.ndarray, " heldout"]
) -> Float[np.ndarray, "clients classes"]:
    """Weigh held-out examples by client and label; sums are the client's examples of these labels.

    Example:
        >>> label_weights([np.array([0, 0, 1]), np.array([1])], np.array([0, 1, 1, 1, 1])).tolist()
        [[2.0, 0.25], [0.0, 0.25]]
    """
    classes = 1 + max(int(labels.max(initial=0)) for labels in (*parts, heldout))
    counts = np.stack([np.bincount(part, minlength=classes) for part in parts])
    return np.asarray(counts / np.maximum(np.bincount(heldout, minlength=classes), 1), np.float64)


def with_units(
    label: Label, metrics: dict[str, float], labels: NDArray[np.floating]
) -> dict[str, float]:
    """Add the error in the label's unit, and the share of variance that is explained."""
    if label.task == "classification":
        return metrics
    variance = float(np.var(labels, dtype=np.float64))
    r2 = 1 - metrics["loss"] / variance if variance else float("nan")
    return {**metrics, "rmse": metrics["loss"] ** 0.5 * label.scale, "r2": r2}


def measure_clients(
    label: Label, outputs: NDArray[Any], labels: NDArray[Any], clients: ExampleOwners
) -> ClientMetrics:
    """Return the metrics of each client from the model's outputs for its examples."""
    if label.task == "classification":
        return classification_by_client(outputs, labels, clients)

    def in_units(values: NDArray[Any]) -> NDArray[np.float64]:
        return values.astype(np.float64) * label.scale + label.mean

    return regression_by_client(in_units(outputs[:, 0]), in_units(labels), clients)
