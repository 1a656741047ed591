"""Gradient accumulation: the loss and gradient of the whole batch, a few rows at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.hlo.collectives import collectives
from fedpax.models.accumulation import accumulate_gradients

RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(24, 200)).astype(np.float32)}
BATCH = {"x": RANDOM.normal(size=(32, 24)).astype(np.float32)}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean(hidden**4), {"mean": jnp.mean(hidden), "square": jnp.mean(hidden**2)}


@pytest.mark.parametrize("count", [1, 2, 8, 32])
def test_equals_the_whole_batch(count: int) -> None:
    whole = jax.value_and_grad(loss_fn, has_aux=True)
    parts = jax.jit(jax.value_and_grad(accumulate_gradients(loss_fn, count), has_aux=True))
    # Float32 sums in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        parts(PARAMS, BATCH),
        whole(PARAMS, BATCH),
    )


def test_activations_are_those_of_one_micro_batch() -> None:
    batch = {"x": jax.ShapeDtypeStruct((4096, 24), jnp.float32)}

    def temporaries(count: int) -> int:
        gradient = jax.jit(jax.grad(accumulate_gradients(loss_fn, count), has_aux=True))
        return gradient.lower(PARAMS, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 3


def test_every_device_keeps_its_rows() -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    where = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("fsdp"))
    gradient = jax.grad(accumulate_gradients(loss_fn, 2), has_aux=True)
    with jax.set_mesh(mesh):
        text = jax.jit(gradient, in_shardings=where).lower(PARAMS, BATCH).compile().as_text()
    assert {c.kind for c in collectives(text, mesh)} == {"all-reduce"}  # and no row travels


@pytest.mark.parametrize(
    ("count", "words"), [(0, "at least 1"), (5, "5 micro-batches do not divide a batch of 32 rows")]
)
def test_counts_that_do_not_fit_are_refused(count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        accumulate_gradients(loss_fn, count)(PARAMS, BATCH)
