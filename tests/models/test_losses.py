from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.models.losses import (
    classification_loss,
    cross_entropy,
    l2_regularized,
    next_token_loss,
)


def draw(*shape: int, classes: int = 7) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    logits = 3 * random.normal(size=(*shape, classes)).astype(np.float32)
    targets = random.integers(0, classes, shape).astype(np.int32)
    return logits, targets, random.integers(0, 2, shape).astype(np.float32)


def reference(logits: Any, targets: Any) -> Any:
    """Compute -log softmax(logits)[target] of each row in float64."""
    weights = np.exp(logits.astype(np.float64))
    probabilities = weights / weights.sum(axis=-1, keepdims=True)
    return -np.log(np.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0])


def test_equals_numpy() -> None:
    logits, targets, mask = draw(4, 5)
    losses = reference(logits, targets)
    assert 0 < mask.sum() < mask.size
    np.testing.assert_allclose(cross_entropy(logits, targets), losses.mean(), rtol=1e-6)
    masked = (losses * mask).sum() / mask.sum()
    np.testing.assert_allclose(cross_entropy(logits, targets, mask), masked, rtol=1e-6)
    weighted = (losses * (mask + 0.25)).sum() / (mask + 0.25).sum()
    np.testing.assert_allclose(cross_entropy(logits, targets, mask + 0.25), weighted, rtol=1e-6)


def test_gradient_is_softmax_minus_one_hot() -> None:
    logits, targets, mask = draw(4, 5)
    gradient = jax.grad(cross_entropy)(logits, targets, mask)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = (softmax - np.eye(7)[targets]) * mask[..., None] / mask.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_large_logits_stay_finite() -> None:
    logits, targets, _ = draw(4, 5)
    value, gradient = jax.value_and_grad(cross_entropy)(1e4 * logits, targets)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))
    expected = 1e4 * (
        logits.max(axis=-1) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    )
    np.testing.assert_allclose(value, expected.mean(), rtol=1e-5)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, targets, mask = draw(4, 5)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    result = cross_entropy(rounded, targets, mask.astype(bool))
    assert result.dtype == jnp.float32
    expected = cross_entropy(rounded.astype(jnp.float32), targets, mask)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_masked_targets_may_hold_any_value() -> None:
    logits, targets, mask = draw(4, 5)
    wild = np.where(mask[..., None] > 0, logits, np.inf)
    wild_targets = np.where(mask > 0, targets, -1)
    expected = cross_entropy(logits, targets, mask)
    np.testing.assert_allclose(cross_entropy(wild, wild_targets, mask), expected, rtol=1e-6)


def test_all_weights_zero_give_zero() -> None:
    logits, targets, mask = draw(4, 5)
    value, gradient = jax.value_and_grad(cross_entropy)(logits, targets, 0 * mask)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))


def test_mismatched_shapes_raise() -> None:
    logits, targets, mask = draw(4, 5)
    with pytest.raises(ValueError, match=r"targets have shape \(4,\).*expected .*\(4, 5\)"):
        cross_entropy(logits, targets[:, 0])
    with pytest.raises(ValueError, match=r"mask has shape \(4, 1\).*one weight for each target"):
        cross_entropy(logits, targets, mask[:, :1])


@pytest.mark.parametrize("packed", [False, True])
def test_next_token_loss_passes_the_batch_to_the_model(packed: bool) -> None:
    logits, targets, mask = draw(4, 5)
    inputs, segments, positions = np.random.default_rng(1).integers(0, 7, (3, 4, 5))

    def apply(params: Any, *args: Any) -> Any:
        given = (inputs, segments, positions) if packed else (inputs, None, None)
        assert all(a is b for a, b in zip(args, given, strict=True))
        return params * logits

    batch = {"inputs": inputs, "targets": targets}
    if packed:
        batch |= {"segments": segments, "positions": positions, "mask": mask}
    loss, aux = next_token_loss(apply)(2.0, batch)
    expected = cross_entropy(2 * logits, targets, mask if packed else None)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert aux["tokens"] == (mask.sum() if packed else 20)


@pytest.mark.parametrize("masked", [False, True])
def test_classification_loss_reports_the_accuracy(masked: bool) -> None:
    logits, labels, mask = draw(40)
    weights = mask if masked else np.ones_like(mask)
    batch = {"image": logits, "label": labels} | ({"mask": mask} if masked else {})
    loss, aux = classification_loss(lambda params, image: params * image)(2.0, batch)
    right = np.argmax(logits, axis=-1) == labels
    assert 0 < (right * weights).sum() < weights.sum()
    np.testing.assert_allclose(aux["accuracy"], np.average(right, weights=weights), rtol=1e-6)
    np.testing.assert_allclose(loss, cross_entropy(2 * logits, labels, weights), rtol=1e-6)


def test_l2_regularization_adds_the_weights_of_layers_alone():
    rng = np.random.default_rng(0)
    kernel, bias, scale = (rng.normal(size=shape).astype(np.float32) for shape in [(3, 4), 4, 4])
    params = {
        "conv": {"kernel": kernel},
        "dense": {"kernel": 2 * kernel, "bias": bias},
        "norm": {"scale": scale, "bias": bias},
    }
    plain = lambda params, batch: (jnp.sum(params["norm"]["scale"]) * batch["x"], {"x": batch["x"]})
    regularized = l2_regularized(plain, 0.01)
    loss, aux = regularized(params, {"x": 3.0})
    expected = 3 * scale.sum() + 0.01 * (5 * (kernel**2).sum() + (bias**2).sum())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert aux == {"x": 3.0}
    gradient = jax.grad(lambda p: regularized(p, {"x": 3.0})[0])(params)
    np.testing.assert_allclose(gradient["dense"]["bias"], 0.02 * bias, rtol=1e-5)
    assert np.all(gradient["norm"]["bias"] == 0)
