"""Metrics of a model for each client, from its outputs for held-out examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Num
from numpy.typing import NDArray

NUM_BINS = 10
"""Bins of the calibration error, of equal width."""


class ClientMetrics(NamedTuple):
    """Metrics of a model on the held-out examples of each client.

    Attributes:
        names: the clients.
        num_examples: the number of held-out examples of each client, or the sum of their weights.
        metrics: each metric by name, float64 `[clients]`; NaN where it is not defined.
        unit: what `num_examples` counts. Default "examples"; for texts "tokens".

    Example:
        >>> result = ClientMetrics(["a", "b"], np.array([3, 1]), {"loss": np.array([0.5, 2.0])})
        >>> dict(zip(result.names, result.metrics["loss"].tolist()))
        {'a': 0.5, 'b': 2.0}
    """

    names: Sequence[str]
    num_examples: Num[np.ndarray, " clients"]
    metrics: Mapping[str, Float64[np.ndarray, " clients"]]
    unit: str = "examples"


class EvaluatedClients(Protocol):
    """The clients of held-out examples."""

    @property
    def names(self) -> Sequence[str]:
        """The clients' names."""
        ...

    def sum(self, values: Float[np.ndarray, " examples"]) -> Float64[np.ndarray, " clients"]:
        """Return the sum of a value over the examples of each client."""
        ...


class ExampleOwners(NamedTuple):
    """Clients that have their own held-out examples.

    Attributes:
        names: the clients' names.
        owners: the number of the client of each example, from 0.

    Example:
        >>> ExampleOwners(["a", "b"], np.array([0, 0, 1])).sum(np.array([1.0, 2.0, 5.0])).tolist()
        [3.0, 5.0]
    """

    names: Sequence[str]
    owners: Int[np.ndarray, " examples"]

    def sum(self, values: Float[np.ndarray, " examples"]) -> Float64[np.ndarray, " clients"]:
        """Return the sum of a value over the examples of each client."""
        return np.bincount(self.owners, np.asarray(values, np.float64), len(self.names))


class LabelWeights(NamedTuple):
    """Clients for which shared held-out examples stand, weighted by label."""

    names: Sequence[str]  # the clients' names
    labels: Int[np.ndarray, " examples"]
    # the weight of an example with this label for a client
    weights: Float[np.ndarray, "clients labels"]

    def sum(self, values: Float[np.ndarray, " examples"]) -> Float64[np.ndarray, " clients"]:
        """Return the weighted sum of a value over the examples."""
        by_label = np.bincount(self.labels, np.asarray(values, np.float64), self.weights.shape[1])
        return np.asarray(self.weights @ by_label, np.float64)


def classification_by_client(
    logits: Float[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    clients: EvaluatedClients,
) -> ClientMetrics:
    """Measure a classifier on the examples of each client.

    `auc` counts ties half; `average_precision` is not interpolated.

    Args:
        logits: the model's outputs.
        labels: the classes, from 0.
        clients: the clients of the examples, such as `ExampleOwners`.

    Returns:
        The metrics, NaN where a client's examples do not define one.

    Example:
        >>> logits = np.array([[0.0, 2.0], [0.0, -1.0], [0.0, 1.0]])
        >>> clients = ExampleOwners(["a", "b"], np.array([0, 0, 1]))
        >>> classification_by_client(logits, np.array([1, 0, 1]), clients).metrics["auc"].tolist()
        [1.0, nan]

    Reference:
        Guo et al., arXiv:1706.04599, section 2 (`calibration_error`).
    """
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    probabilities = np.exp(log_probabilities)
    correct = (np.argmax(logits, axis=1) == labels).astype(np.float64)
    count = clients.sum(np.ones(len(labels)))
    chosen = np.take_along_axis(log_probabilities, np.asarray(labels)[:, None], axis=1)[:, 0]
    metrics = {
        "loss": _divide(clients.sum(-chosen), count),
        "accuracy": _divide(clients.sum(correct), count),
    }
    if isinstance(clients, ExampleOwners):
        metrics["auc"] = _classes_auc(probabilities, labels, clients)
    elif isinstance(clients, LabelWeights):
        metrics["auc"] = _weighted_auc(probabilities, labels, clients)
    if probabilities.shape[1] == 2:
        metrics |= _retrieval(probabilities[:, 1], np.asarray(labels) == 1, clients)
    confidence = probabilities.max(axis=1)
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = [clients.sum(np.where(bins == k, correct - confidence, 0)) for k in range(NUM_BINS)]
    metrics["calibration_error"] = _divide(np.sum(np.abs(gaps), axis=0), count)
    return ClientMetrics(clients.names, count, metrics)


def regression_by_client(
    predictions: Float[np.ndarray, " examples"],
    labels: Float[np.ndarray, " examples"],
    clients: EvaluatedClients,
) -> ClientMetrics:
    """Measure predicted numbers on each client's examples; `r2` is NaN where labels are equal."""
    labels = np.asarray(labels, np.float64)
    errors = np.asarray(predictions, np.float64) - labels
    count = clients.sum(np.ones(len(labels)))
    squared = clients.sum(errors**2)
    # Around the mean of all labels, for labels far from 0.
    centered = labels - labels.mean() if len(labels) else labels
    first, second = clients.sum(centered), clients.sum(centered**2)
    deviation = second - _divide(first**2, count)
    # Equal labels have a deviation of rounding errors alone.
    deviation = np.where(deviation > 1e-12 * second, deviation, 0)
    return ClientMetrics(
        clients.names,
        count,
        {
            "rmse": np.sqrt(_divide(squared, count)),
            "mean_absolute_error": _divide(clients.sum(np.abs(errors)), count),
            "r2": 1 - _divide(squared, deviation),
        },
    )


def auc_by_client(
    scores: Float[np.ndarray, " examples"],
    positive: Num[np.ndarray, " examples"],
    clients: ExampleOwners,
) -> Float64[np.ndarray, " clients"]:
    """Compute the area under the ROC curve of each client, exactly, with ties as one half."""
    # The Mann-Whitney statistic: with ranks within a client, and P positive and N negative
    # examples, (sum of the positive ranks - P (P + 1) / 2) / (P N); NaN if P or N is 0.
    owners, positive = np.asarray(clients.owners), np.asarray(positive, np.float64)
    order = np.lexsort((scores, owners))
    sorted_owners, sorted_scores = owners[order], np.asarray(scores)[order]
    starts = np.searchsorted(sorted_owners, np.arange(len(clients.names)))
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (np.diff(sorted_owners) != 0) | (np.diff(sorted_scores) != 0)
    first = np.flatnonzero(is_new)  # the first example of each group of ties
    size = np.diff(first, append=len(order))
    middle = first + (size + 1) / 2  # the mean rank of a group, from 1, over all clients
    ranks = np.empty(len(order))
    ranks[order] = np.repeat(middle, size) - starts[sorted_owners]
    num_positive = clients.sum(positive)
    num_negative = clients.sum(1 - positive)
    above = clients.sum(ranks * positive) - num_positive * (num_positive + 1) / 2
    return _divide(above, num_positive * num_negative)


def _retrieval(
    scores: Float64[np.ndarray, " examples"],
    positive: Bool[np.ndarray, " examples"],
    clients: EvaluatedClients,
) -> dict[str, Float64[np.ndarray, " clients"]]:
    """Return average precision, and precision and recall of a probability above one half."""
    metrics = {}
    if isinstance(clients, ExampleOwners):
        owners, found, rank = _retrieved(scores, positive, clients.owners)
        sums = [np.bincount(owners, x, len(clients.names)) for x in (found / rank, found > 0)]
        metrics["average_precision"] = _divide(sums[0], sums[1])
    elif isinstance(clients, LabelWeights):
        _, found, rank = _retrieved(scores, positive, np.zeros(len(scores), np.int64))
        areas = np.full(len(clients.names), np.nan)
        for k, weights in enumerate(clients.weights if len(found) else ()):
            if weights[1] > 0:  # else the client has no example of the class
                true, false = weights[1] * found, weights[0] * (rank - found)
                areas[k] = np.mean(true / (true + false))
        metrics["average_precision"] = areas
    predicted = scores > 0.5  # as accuracy, which gives ties to the first class
    true = clients.sum(predicted & positive)
    metrics["precision"] = _divide(true, clients.sum(predicted))
    metrics["recall"] = _divide(true, clients.sum(positive))
    return metrics


def _retrieved(
    scores: Float64[np.ndarray, " examples"],
    positive: Bool[np.ndarray, " examples"],
    owners: Int[np.ndarray, " examples"],
) -> tuple[NDArray[np.integer], NDArray[np.int64], NDArray[np.int64]]:
    """Return owner, and the numbers of positive and all examples down to each positive one."""
    order = np.lexsort((-scores, owners))
    owners, scores, positive = owners[order], scores[order], positive[order]
    starts = np.searchsorted(owners, owners)  # the first example of the same owner
    before = np.cumsum(positive) - positive
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (np.diff(owners) != 0) | (np.diff(scores) != 0)
    last = np.flatnonzero(is_last)[np.cumsum(is_last) - is_last][positive]
    starts = starts[positive]
    found = before[last] + positive[last] - before[starts]
    return owners[positive], found, last + 1 - starts


def _classes_auc(
    probabilities: Float64[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    clients: ExampleOwners,
) -> Float64[np.ndarray, " clients"]:
    """Return the AUC of the second of two classes, or the mean over the classes of each client."""
    classes = probabilities.shape[1]
    if classes == 2:
        return auc_by_client(probabilities[:, 1], labels == 1, clients)
    areas = np.stack(
        [auc_by_client(probabilities[:, k], labels == k, clients) for k in range(classes)]
    )
    defined = np.isfinite(areas)
    return _divide(np.where(defined, areas, 0).sum(axis=0), defined.sum(axis=0))


def _weighted_auc(
    probabilities: Float64[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    clients: LabelWeights,
) -> Float64[np.ndarray, " clients"]:
    """Return the AUC of `_classes_auc` for examples that are weighted by label."""
    # An AUC is a mean over pairs of examples of two classes.
    labels, classes = np.asarray(labels), probabilities.shape[1]
    shares = np.zeros((len(clients.names), classes))  # of the weights of each label
    counts = np.bincount(labels, minlength=clients.weights.shape[1])
    known = min(classes, clients.weights.shape[1])
    shares[:, :known] = (clients.weights * counts)[:, :known]
    areas = np.full((len(clients.names), classes), np.nan)
    for positive in range(classes) if classes > 2 else (1,):
        scores = [probabilities[labels == label, positive] for label in range(classes)]
        larger = np.array([_probability_of_larger(scores[positive], x) for x in scores])
        others = np.where(np.arange(classes) == positive, 0, shares)
        area = _divide(others @ larger, others.sum(axis=1))
        areas[:, positive] = np.where(shares[:, positive] > 0, area, np.nan)
    defined = np.isfinite(areas)
    return _divide(np.where(defined, areas, 0).sum(axis=1), defined.sum(axis=1))


def _probability_of_larger(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the share of pairs in which x is larger, ties as one half; 0 if there are none."""
    if not len(x) or not len(y):
        return 0.0
    y = np.sort(y)
    below = np.searchsorted(y, x, side="left") + np.searchsorted(y, x, side="right")
    return float(np.mean(below) / (2 * len(y)))


def _divide(
    x: Num[np.ndarray, " clients"], y: Num[np.ndarray, " clients"]
) -> Float64[np.ndarray, " clients"]:
    """Divide; NaN where the divisor is 0."""
    return np.divide(x, y, out=np.full(np.shape(y), np.nan), where=np.asarray(y) != 0)
