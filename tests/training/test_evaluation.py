"""Held-out metrics: weighted means over all batches, for any split among participants."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.training.evaluation import evaluate_by_client, evaluator


def make_batches(count, rng, masked):
    batches = [{"x": rng.normal(size=(4, 3)).astype(np.float32)} for _ in range(count)]
    if masked:
        for batch in batches:
            batch["mask"] = rng.integers(0, 2, size=(4,)).astype(np.float32)
        batches[-1]["mask"][:] = 0  # a batch that is padding alone
    return batches


def loss_fn(params, batch):
    mask = batch.get("mask", jnp.ones(4))
    score = jnp.tanh(batch["x"] @ params)
    # 0 / 0 for a batch that is padding alone, as in a loss without a guard against it.
    return jnp.sum(score * mask) / jnp.sum(mask), {"largest": jnp.max(score)}


def reference(params, batches):
    scores = [np.tanh(b["x"].astype(np.float64) @ params) for b in batches]
    masks = [b.get("mask", np.ones(4)) for b in batches]
    weights = [m.sum() for m in masks]
    loss = sum((s * m).sum() for s, m in zip(scores, masks, strict=True)) / sum(weights)
    largest = sum(s.max() * w for s, w in zip(scores, weights, strict=True)) / sum(weights)
    return {"loss": loss, "largest": largest}


@pytest.mark.each_value
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count, num_participants", [(1, 1), (5, 1), (5, 4), (2, 4), (8, 4)])
def test_metrics_are_weighted_means_over_all_batches(count, num_participants, masked):
    rng = np.random.default_rng(count)
    params = rng.normal(size=3).astype(np.float32)
    batches = make_batches(count + masked, rng, masked)
    evaluate = evaluator(loss_fn, batches, placement="islands", num_participants=num_participants)
    expected = reference(params, batches)
    metrics = evaluate(params)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert isinstance(metrics[name], float)
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_a_mesh_gives_the_same_metrics():
    rng = np.random.default_rng(0)
    params, batches = rng.normal(size=3).astype(np.float32), make_batches(7, rng, True)
    mesh = jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("islands", None, "fsdp"))
    with jax.set_mesh(mesh):
        evaluate = evaluator(
            loss_fn, batches, placement="islands", num_participants=4, sharding=sharding
        )
        metrics = evaluate(jnp.asarray(params))
    for name, value in reference(params, batches).items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_no_batches_raise():
    with pytest.raises(ValueError, match="Load a held-out split"):
        evaluator(loss_fn, [], placement="islands", num_participants=2)


def test_a_value_that_jax_cannot_hold_is_named():
    batches = [{"x": np.ones((4, 3)), "label": np.array([1, 2, 3, 2**32 + 1])}]
    with pytest.raises(ValueError, match=r"batch\['label'\] has the value 4294967297 \(int64\)"):
        evaluator(loss_fn, batches, placement="islands", num_participants=1)


BATCH = {"x": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (BATCH, r"got a dict, expected a list .* Pass \[(batch|client)\]"),
        ((b for b in [BATCH]), r"got a generator, expected a list .*list"),
        (None, "got a NoneType, expected a list"),
        (
            [BATCH, {"y": np.ones((4, 2))}],
            r"(batch|client) 1 has arrays .*'y'.*expected the shapes of",
        ),
        ([BATCH, {"x": np.ones((4, 3), np.float32)}], r"1 has arrays .*\(4, 3\).*Pad the arrays"),
        ([{"x": np.float32(1)}], r"0 has arrays of the shapes .*\(\).* expected arrays \[examples"),
        ([BATCH | {"mask": np.ones(3)}], r"same number of examples"),
        ([BATCH | {"mask": np.full(4, "a")}], r"\['mask'\] has dtype <U1"),
        ([BATCH | {"mask": -np.ones(4)}], r"the mask of (batch|client) 0 has the value -1"),
        ([BATCH | {"mask": np.full(4, np.nan)}], r"the mask of (batch|client) 0 has the value nan"),
    ],
)
@pytest.mark.parametrize("by_client", [False, True])
def test_batches_of_another_form_are_named(batches: Any, words: str, by_client: bool) -> None:
    loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
    with pytest.raises((TypeError, ValueError), match=words):
        if by_client:
            evaluate_by_client(loss_fn, batches)
        else:
            evaluator(loss_fn, batches, placement="clients", num_participants=1)


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_number_of_participants_that_is_no_count_is_named(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"num_participants is .*expected an int of"):
        evaluator(lambda w, b: (w, {}), [BATCH], placement="clients", num_participants=number)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda w, x: (x, {}), "a loss of .*expected a scalar"),
        (lambda w, x: None, "expected a pair"),
        (lambda w, x: w, "expected a pair"),
        (lambda w, x: (w, {"a": "x"}), "metric 'a' of a str"),
        (lambda w, x: (w, {"loss": 1.0}), "called 'loss'"),
        (lambda w, x: (w * 1j, {}), "a loss of .*complex64.*expected a scalar"),
    ],
)
@pytest.mark.parametrize("by_client", [False, True])
def test_what_a_loss_function_returns_is_checked(
    returned: Any, words: str, by_client: bool
) -> None:
    loss_fn = lambda w, batch: returned(w, batch["x"])
    with pytest.raises((TypeError, ValueError), match=words):
        if by_client:
            evaluate_by_client(loss_fn, [BATCH])(jnp.float32(2))
        else:
            evaluator(loss_fn, [BATCH], placement="clients", num_participants=1)(jnp.float32(2))


@pytest.mark.parametrize("num_participants", [1, 2])
def test_the_tokens_of_the_loss_of_a_transformer_are_a_sum(num_participants: int) -> None:
    """As of `accumulate_gradients`; a mean of numbers of tokens is no number of tokens."""
    rng = np.random.default_rng(0)
    batches = [{"mask": rng.integers(0, 2, (4, 3)).astype(np.float32)} for _ in range(3)]

    def loss_fn(params, batch):
        tokens = jnp.sum(batch["mask"])
        return params * tokens, {"tokens": tokens}

    evaluate = evaluator(loss_fn, batches, placement="clients", num_participants=num_participants)
    sizes = np.array([batch["mask"].sum() for batch in batches])
    values = evaluate(jnp.float32(2))
    assert values["tokens"] == sizes.sum()
    assert values["loss"] == pytest.approx(2 * (sizes**2).sum() / sizes.sum())
