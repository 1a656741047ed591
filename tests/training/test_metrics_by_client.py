"""Metrics by client equal the metrics of scikit-learn and NumPy on each client's examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from fedpax.training.client_metrics import (
    ExampleOwners,
    LabelWeights,
    auc_by_client,
    classification_by_client,
    regression_by_client,
)

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any)


def owners_of(sizes, rng):
    owners = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return ExampleOwners([f"client {k}" for k in range(len(sizes))], owners)


@settings(deadline=None)
@given(SIZES, st.integers(0, 1000), st.sampled_from([2, 5, 1000]))
def test_auc_with_ties(sizes, seed, levels):
    rng = np.random.default_rng(seed)
    clients = owners_of(sizes, rng)
    scores = rng.integers(0, levels, len(clients.owners)) / levels
    positive = rng.random(len(clients.owners)) < 0.4
    metrics = auc_by_client(scores, positive, clients)
    for k in range(len(sizes)):
        own = clients.owners == k
        if len(set(positive[own])) < 2:
            assert np.isnan(metrics[k])
        else:
            assert metrics[k] == pytest.approx(reference.roc_auc_score(positive[own], scores[own]))


def calibration_error(probabilities, labels):
    confidence = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == labels
    total = 0.0
    for k in range(10):
        inside = (confidence >= k / 10) & ((confidence < (k + 1) / 10) | (k == 9))
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            total += inside.mean() * gap
    return total


def check_retrieval(mine, scores, labels):
    """scikit-learn, where it defines them: it has 0 where nothing is to find, or predicted."""
    predicted, found = scores > 0.5, labels.any()
    scored = {
        "precision": reference.precision_score(labels, predicted, zero_division=np.nan),
        "recall": reference.recall_score(labels, predicted, zero_division=np.nan),
        "average_precision": reference.average_precision_score(labels, scores) if found else np.nan,
    }
    assert {name: mine[name] for name in scored} == pytest.approx(scored, nan_ok=True)


@settings(deadline=None)
@given(SIZES, st.integers(0, 1000), st.sampled_from([2, 5]))
def test_precision_and_recall_of_tied_scores(sizes, seed, levels):
    rng = np.random.default_rng(seed)
    clients = owners_of(sizes, rng)
    ties = rng.integers(-levels, levels, len(clients.owners)) * 1.0  # 0: both classes alike
    labels = rng.integers(0, 2, len(ties))
    logits = np.stack([np.zeros(len(ties)), ties], axis=1)
    metrics = classification_by_client(logits, labels, clients).metrics
    for k in np.flatnonzero(sizes):
        own = clients.owners == k
        mine = {name: values[k] for name, values in metrics.items()}
        check_retrieval(mine, 1 / (1 + np.exp(-ties[own])), labels[own])


@settings(deadline=None, max_examples=20)
@given(SIZES, st.integers(0, 1000), st.sampled_from([2, 4]))
def test_classification(sizes, seed, classes):
    rng = np.random.default_rng(seed)
    clients = owners_of(sizes, rng)
    logits = rng.normal(0, 3, (len(clients.owners), classes))
    labels = rng.integers(0, classes, len(logits))
    metrics = classification_by_client(logits, labels, clients)
    assert metrics.num_examples.tolist() == sizes
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for k, size in enumerate(sizes):
        mine = {name: values[k] for name, values in metrics.metrics.items()}
        if not size:
            assert all(np.isnan(value) for value in mine.values())
            continue
        p, y = probabilities[clients.owners == k], labels[clients.owners == k]
        assert mine["loss"] == pytest.approx(reference.log_loss(y, p, labels=range(classes)))
        assert mine["accuracy"] == pytest.approx((p.argmax(axis=1) == y).mean())
        assert mine["calibration_error"] == pytest.approx(calibration_error(p, y), abs=1e-12)
        areas = [
            reference.roc_auc_score(y == c, p[:, c])
            for c in ([1] if classes == 2 else range(classes))
            if 0 < (y == c).sum() < size
        ]
        assert mine["auc"] == pytest.approx(np.mean(areas) if areas else np.nan, nan_ok=True)
        if classes == 2:
            check_retrieval(mine, p[:, 1], y)
        else:
            assert not {"precision", "recall", "average_precision"} & mine.keys()


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(0, 1000), st.sampled_from([0.0, 1e6]))
def test_regression(sizes, seed, offset):
    rng = np.random.default_rng(seed)
    clients = owners_of(sizes, rng)
    labels = offset + rng.normal(0, 2, len(clients.owners))
    predictions = labels + rng.normal(0, 1, len(labels))
    metrics = regression_by_client(predictions, labels, clients).metrics
    for k, size in enumerate(sizes):
        p, y = predictions[clients.owners == k], labels[clients.owners == k]
        if not size:
            assert np.isnan(metrics["rmse"][k])
            continue
        assert metrics["rmse"][k] == pytest.approx(reference.root_mean_squared_error(y, p))
        mean_absolute = reference.mean_absolute_error(y, p)
        assert metrics["mean_absolute_error"][k] == pytest.approx(mean_absolute)
        expected = reference.r2_score(y, p) if size > 1 else np.nan
        assert metrics["r2"][k] == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_equal_labels_have_no_r2():
    clients = ExampleOwners(["a"], np.zeros(3, int))
    metrics = regression_by_client(np.array([1.0, 2.0, 4.0]), np.full(3, 0.1), clients)
    assert np.isnan(metrics.metrics["r2"][0]) and metrics.metrics["rmse"][0] > 0


@pytest.mark.parametrize("classes", [2, 3])
def test_label_weights_equal_repeated_examples(classes):
    rng = np.random.default_rng(0)
    # Rounded, so that some are equal.
    logits = np.round(rng.normal(0, 2, (30, classes)), 1)
    labels = rng.integers(0, classes, 30)
    repeats = np.array([[2, 0, 1], [1, 3, 0], [1, 2, 3], [0, 2, 0]])[:, :classes]
    weighted = classification_by_client(
        logits, labels, LabelWeights(["a", "b", "c", "d"], labels, repeats.astype(float))
    )
    for k in range(len(repeats)):
        rows = np.repeat(np.arange(30), repeats[k][labels])
        alone = ExampleOwners(["a"], np.zeros(len(rows), int))
        expected = classification_by_client(logits[rows], labels[rows], alone)
        assert weighted.num_examples[k] == expected.num_examples[0]
        assert weighted.metrics.keys() == expected.metrics.keys() >= {"auc"}
        for name, values in weighted.metrics.items():
            assert values[k] == pytest.approx(expected.metrics[name][0], nan_ok=True), name
