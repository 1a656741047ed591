"""Gradient accumulation: the loss and gradient of the whole batch, by microbatches."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.hlo.collectives import collectives
from fedpax.models.losses import (
    accumulate_gradients,
    classification_loss,
    l2_regularized,
    next_token_loss,
    squared_error_loss,
    transformer_loss,
)
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.transformer import TransformerConfig, transformer

RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(24, 200)).astype(np.float32)}
BATCH = {"x": RANDOM.normal(size=(32, 24)).astype(np.float32)}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean(hidden**4), {"mean": jnp.mean(hidden), "square": jnp.mean(hidden**2)}


@functools.cache  # compiled once for all masks
def compiled(loss: Any, steps: int) -> Any:
    return jax.jit(jax.value_and_grad(accumulate_gradients(loss, steps), has_aux=True))


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 8, 32])
def test_loss_and_gradient_equal_those_of_the_whole_batch(grad_accum_steps: int) -> None:
    whole = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    parts = compiled(loss_fn, grad_accum_steps)
    # Float32 sums in another order.
    chex.assert_trees_all_close(parts(PARAMS, BATCH), whole(PARAMS, BATCH), rtol=1e-5, atol=1e-7)


def accumulation_equals_the_whole(loss: Any, params: Any, batch: Any, steps: int) -> None:
    whole, parts = (compiled(loss, s)(params, batch) for s in (1, steps))
    chex.assert_trees_all_close(parts, whole, rtol=2e-5, atol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(parts, whole)


CLASSES = l2_regularized(classification_loss(lambda p, x: x @ p["kernel"]), 0.1)
NUMBERS = squared_error_loss(lambda p, x: x @ p["kernel"][:, :1])
BIGRAMS = next_token_loss(lambda p, x, *_: p[x])
SMALL = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, vocab_size=32)
TRANSFORMER = transformer_loss(SMALL, z_loss_weight=1e-2)
ROW_MASKS = arrays.arrays(np.float32, 8, elements=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
TOKEN_MASKS = arrays.arrays(np.bool_, (8, 5), elements=st.booleans()) | st.builds(
    lambda rows, tokens: rows[:, None] & tokens,
    arrays.arrays(np.bool_, 8),
    arrays.arrays(np.bool_, (8, 5)),
)


@settings(max_examples=25, deadline=None)
@given(ROW_MASKS, st.sampled_from([2, 4, 8]))
def test_an_example_counts_by_its_mask_in_every_microbatch(mask: np.ndarray, steps: int) -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(8, 3)).astype(np.float32)
    params = {"kernel": random.normal(size=(3, 3)).astype(np.float32)}
    classes = {"image": x, "label": random.integers(0, 3, 8), "mask": mask}
    accumulation_equals_the_whole(CLASSES, params, classes, steps)
    numbers = {"features": x, "label": random.normal(size=8).astype(np.float32), "mask": mask}
    accumulation_equals_the_whole(NUMBERS, params, numbers, steps)


@settings(max_examples=25, deadline=None)
@given(TOKEN_MASKS, st.sampled_from([2, 4, 8]))
def test_a_token_counts_the_same_in_every_microbatch(mask: np.ndarray, steps: int) -> None:
    random = np.random.default_rng(2)
    tokens = random.integers(0, 7, (8, 6))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
    accumulation_equals_the_whole(BIGRAMS, random.normal(size=(7, 7)).astype("f"), batch, steps)


@pytest.mark.parametrize("rows", [[3], [0, 1, 5], []], ids=str)
def test_answers_in_few_rows_give_the_loss_of_the_whole_batch(
    random_params: Callable[[FunctionalModel], Any], rows: list[int]
) -> None:
    params = random_params(transformer(SMALL))
    tokens = np.random.default_rng(3).integers(0, 32, (8, 9))
    mask = np.zeros((8, 8), np.float32)
    for row in rows:
        mask[row, : row + 1] = 1
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
    accumulation_equals_the_whole(TRANSFORMER, params, batch, 8)


def test_padding_of_an_empty_microbatch_is_not_read() -> None:
    params, x = np.float32(2), np.array([1, 2, np.nan, np.nan], np.float32)

    def ratio(w: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask = batch["mask"]
        terms = jnp.where(mask > 0, (w * batch["x"]) ** 2, 0)
        return jnp.sum(terms) / jnp.sum(mask), {}  # NaN if the mask is empty

    batch = {"x": x[[0, 2, 1, 3]], "mask": np.array([1, 0, 1, 0], np.float32)}
    # Rows 0 and 2 are a microbatch, and rows 1 and 3 the empty one.
    (loss, _), gradient = compiled(ratio, 2)(params, batch)
    assert (loss.item(), gradient.item()) == (10, 10)


def test_small_gradients_of_bfloat16_parameters_add_up() -> None:
    def linear(w: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.mean(w.astype(jnp.float32) * batch["x"]), {}

    # In bfloat16, 256 + 1 is 256.
    batch = {"x": np.array([256.0] + [1.0] * 255, np.float32)}
    gradient = jax.jit(jax.grad(accumulate_gradients(linear, 256), has_aux=True))
    (sum_of_microbatches, _) = gradient(jnp.bfloat16(1), batch)
    assert sum_of_microbatches.dtype == jnp.bfloat16
    assert float(sum_of_microbatches) == float(jnp.bfloat16(511 / 256))


def test_memory_holds_the_activations_of_one_microbatch() -> None:
    batch = {"x": jax.ShapeDtypeStruct((4096, 24), jnp.float32)}

    def temporaries(grad_accum_steps: int) -> int:
        gradient = jax.jit(jax.grad(accumulate_gradients(loss_fn, grad_accum_steps), has_aux=True))
        return gradient.lower(PARAMS, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 3


@pytest.mark.parametrize("mask", [{}, {"mask": np.ones((32, 24), np.float32)}], ids=len)
def test_no_row_moves_between_devices(mask: dict[str, np.ndarray]) -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    where = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("fsdp"))
    gradient = jax.grad(accumulate_gradients(loss_fn, 2), has_aux=True)
    with jax.set_mesh(mesh):
        text = jax.jit(gradient, in_shardings=where).lower(PARAMS, BATCH | mask).compile().as_text()
    assert {c.kind for c in collectives(text, mesh)} == {"all-reduce"}


@pytest.mark.parametrize(
    ("grad_accum_steps", "words"),
    [(0, "at least 1"), (5, "grad_accum_steps=5 does not divide a batch of 32 rows")],
)
def test_a_number_of_steps_that_does_not_divide_the_rows_raises(
    grad_accum_steps: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        accumulate_gradients(loss_fn, grad_accum_steps)(PARAMS, BATCH)
