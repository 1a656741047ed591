"""Gradient accumulation: the loss and gradient of the whole batch, by microbatches."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.hlo.collectives import collectives
from fedpax.models.losses import accumulate_gradients

RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(24, 200)).astype(np.float32)}
BATCH = {"x": RANDOM.normal(size=(32, 24)).astype(np.float32)}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean(hidden**4), {"mean": jnp.mean(hidden), "square": jnp.mean(hidden**2)}


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 8, 32])
def test_loss_and_gradient_equal_those_of_the_whole_batch(grad_accum_steps: int) -> None:
    whole = jax.value_and_grad(loss_fn, has_aux=True)
    parts = jax.jit(
        jax.value_and_grad(accumulate_gradients(loss_fn, grad_accum_steps), has_aux=True)
    )
    # Float32 sums in another order.
    chex.assert_trees_all_close(parts(PARAMS, BATCH), whole(PARAMS, BATCH), rtol=1e-5, atol=1e-7)


def test_memory_holds_the_activations_of_one_microbatch() -> None:
    batch = {"x": jax.ShapeDtypeStruct((4096, 24), jnp.float32)}

    def temporaries(grad_accum_steps: int) -> int:
        gradient = jax.jit(jax.grad(accumulate_gradients(loss_fn, grad_accum_steps), has_aux=True))
        return gradient.lower(PARAMS, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 3


def test_no_row_moves_between_devices() -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    where = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("fsdp"))
    gradient = jax.grad(accumulate_gradients(loss_fn, 2), has_aux=True)
    with jax.set_mesh(mesh):
        text = jax.jit(gradient, in_shardings=where).lower(PARAMS, BATCH).compile().as_text()
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
