from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedpax.models.layers import project
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.ops.grouped_matmul import grouped_matmul
from fedpax.ops.quantization import FORMATS, quantized_einsum, quantized_grouped_matmul
from fedpax.ops.remat import rematerialize

SMALL = TransformerConfig(vocab_size=23, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2)


qwix = pytest.importorskip("qwix")


def draw() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 32)).astype(np.float32)
    return x, random.normal(size=(32, 4, 6)).astype(np.float32)


def test_int8_rounds_contracted_axes_with_one_scale() -> None:
    """The rounding error is at most half a step, with 255 steps from -max to max."""
    x, weight = draw()
    exact = np.einsum("btw,whd->bthd", x, weight)
    of_x, of_weight = np.abs(x).max(axis=-1) / 255, np.abs(weight).max(axis=0) / 255
    bound = np.einsum("btw,hd->bthd", np.abs(x), of_weight)
    bound += np.einsum("bt,whd->bthd", of_x, np.abs(weight))
    bound += 32 * np.einsum("bt,hd->bthd", of_x, of_weight)
    matmul = jax.jit(partial(quantized_einsum, "btw,whd->bthd", quantization="int8"))
    error = np.abs(matmul(x, weight) - exact)
    assert np.all(error < 1.001 * bound) and np.max(error / bound) > 0.2


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "i8"), ("fp8", "f8E4M3FN")])
def test_the_forward_matmul_is_quantized_and_the_gradient_is_exact(
    quantization: Any, dtype: str
) -> None:
    x, weight = draw()
    matmul = partial(quantized_einsum, "btw,whd->bthd", quantization=quantization)
    text = jax.jit(matmul).lower(x, weight).as_text()
    (line,) = [line for line in text.splitlines() if "dot_general" in line]
    assert line.split(" : (")[1].count(dtype) == 2
    cotangent = np.random.default_rng(1).normal(size=(2, 5, 4, 6)).astype(np.float32)
    gradient = jax.vjp(matmul, x, weight)[1](cotangent)
    exact = jax.vjp(lambda x, w: jnp.einsum("btw,whd->bthd", x, w), x, weight)[1](cotangent)
    chex.assert_trees_all_close(gradient, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_the_grouped_matmul_equals_that_of_each_group(quantization: Any) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(200, 32)).astype(np.float32)
    rows[7] = 0
    rows[180:] = np.nan  # after the last group
    kernels = random.normal(size=(4, 32, 16)).astype(np.float32)
    sizes = np.array([90, 0, 1, 89], np.int32)
    matmul = partial(quantized_grouped_matmul, group_sizes=sizes, quantization=quantization)

    @jax.jit
    def with_gradient(rows: Any, kernels: Any, cotangent: Any) -> Any:
        result, back = jax.vjp(matmul, rows, kernels)
        return result, back(cotangent)

    cotangent = random.normal(size=(200, 16)).astype(np.float32)
    cotangent[180:] = 0
    result, gradients = with_gradient(rows, kernels, cotangent)
    dtype = jnp.dtype(FORMATS[quantization])
    left, right = (
        np.asarray(qwix.dequantize(qwix.quantize(x, dtype, channelwise_axes=axes)), np.float64)
        for x, axes in [(rows, [0]), (kernels, [0, 2])]
    )
    for row, group in enumerate(np.repeat(range(4), sizes)):
        np.testing.assert_allclose(result[row], left[row] @ right[group], rtol=1e-5, atol=1e-5)
    exact = jax.vjp(lambda r, k: grouped_matmul(r, k, sizes), rows, kernels)[1](cotangent)
    for gradient, expected in zip(gradients, exact, strict=True):
        kept = slice(0, 180 if len(gradient) == 200 else None)
        np.testing.assert_allclose(gradient[kept], expected[kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["dots", "dots_with_no_batch_dims", "offload"])
def test_remat_policies_for_matmuls_store_quantized_ones(policy: str) -> None:
    """They are quantized in the forward pass and not again in the backward pass."""
    weight = nnx.Param(jnp.ones((8, 8)), logical_axes=("embed", "mlp"))

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(project("btw,wm->btm", x, weight, quantization="int8")), None

    def rounded(policy: str) -> int:
        step = rematerialize(layer, policy)
        gradient = jax.grad(lambda x: jnp.sum(jax.lax.scan(step, x, length=3)[0]))
        return str(jax.make_jaxpr(gradient)(jnp.ones((2, 4, 8)))).count("new_dtype=int8")

    assert (rounded(policy), rounded("full")) == (2, 4)


def test_explicit_axes_raise() -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"needs automatic axes.*quantization='none'"),
    ):
        quantized_einsum("btw,whd->bthd", *map(jnp.asarray, draw()), "int8")


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_quantized_model_learns(quantization: Any, experts: int) -> None:
    config = TransformerConfig(
        vocab_size=23,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        mlp_dim=48,
        num_experts=experts,
        quantization=quantization,
    )
    tokens = np.random.default_rng(0).integers(0, 23, (4, 17)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = jax.jit(jax.value_and_grad(transformer_loss(config), has_aux=True))
    params = transformer(config).init(jax.random.key(0))
    losses = []
    for _ in range(30):
        (loss, _), gradient = step(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
