from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer
import pytest

from fedpax.models.attention.causal import attention_mask, masked_attention, rotary
from fedpax.models.losses import next_token_loss
from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.models.transformer import Layer, TransformerConfig, transformer

Draw = Callable[[FunctionalModel], Any]
SMALL = TransformerConfig(
    vocab_size=23,
    num_layers=2,
    embed_dim=24,
    num_heads=6,
    num_kv_heads=2,
    mlp_dim=20,
    rope_base=50.0,
)


def draw_tokens(*shape: int, vocab_size: int = 23) -> Any:
    return np.random.default_rng(1).integers(0, vocab_size, shape).astype(np.int32)


def draw_packing(batch: int, length: int) -> tuple[Any, Any]:
    """Draw segments 1, 2, ... of random lengths, their positions from 0 on, then padding (0)."""
    random = np.random.default_rng(2)
    segments, positions = np.zeros((2, batch, length), np.int32)
    for b in range(batch):
        edges = [0, *np.sort(random.choice(np.arange(1, length), 3, replace=False))]
        for number, (start, stop) in enumerate(pairwise(edges), start=1):
            segments[b, start:stop] = number
            positions[b, start:stop] = np.arange(stop - start)
    return segments, positions


@pytest.mark.parametrize(
    ("packed", "change"),
    [
        (False, {}),
        (True, {"remat": "full", "sliding_window": 3}),
        (True, {"tied_embeddings": False, "logit_softcap": 2.0}),
        (False, {"feed_forward": "gelu", "sliding_window": 4}),
        (False, {"rope_scaling_factor": 4.0, "rope_original_seq_len": 60, "num_experts": 3}),
        (True, {"num_heads": 4, "num_kv_heads": 4, "head_dim": 10}),
        (False, {"num_heads": 3, "num_kv_heads": 1, "num_layers": 1}),
        (False, {"norm_eps": 0.3, "scale_embeddings": False}),
        (True, {"qk_norm": True, "norm_eps": 0.1, "head_dim": 10}),
    ],
)
def test_equals_numpy(random_params: Draw, packed: bool, change: dict[str, Any]) -> None:
    config = replace(SMALL, dtype="float64", **change)
    tokens = draw_tokens(2, 11)
    packing = draw_packing(2, 11) if packed else ()
    with jax.enable_x64(True):
        model = transformer(config)
        params = jax.tree.map(np.float64, random_params(model))
        result = jax.jit(model.apply)(params, tokens, *packing)
        assert result.dtype == jnp.float64
    expected = numpy_transformer.logits(params, tokens, config, *packing)
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


def test_float32_equals_numpy(random_params: Draw) -> None:
    model = transformer(SMALL)
    params, tokens = random_params(model), draw_tokens(2, 11)
    result = jax.jit(model.apply)(params, tokens)
    expected = numpy_transformer.logits(params, tokens, SMALL)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_a_token_affects_only_later_logits(random_params: Draw) -> None:
    model = transformer(SMALL)
    params, tokens = random_params(model), draw_tokens(1, 12)
    apply = jax.jit(model.apply)
    before = apply(params, tokens)
    for t in (0, 5, 11):
        changed = tokens.copy()
        changed[0, t] = (changed[0, t] + 1) % SMALL.vocab_size
        after = apply(params, changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        # It changes its own logits and all later ones.
        assert np.all(np.max(np.abs(after - before)[:, t:], axis=-1) > 1e-3)


def test_packed_documents_equal_separate_ones(random_params: Draw) -> None:
    model = transformer(SMALL)
    params, apply = random_params(model), jax.jit(model.apply)
    documents = np.split(draw_tokens(15), [5, 10])
    segments = np.repeat([1, 2, 3], [len(d) for d in documents])[None]
    positions = np.concatenate([np.arange(len(d)) for d in documents])[None]
    packed = apply(params, np.concatenate(documents)[None], segments, positions)
    separate = [apply(params, document[None]) for document in documents]
    expected = np.concatenate(separate, axis=1)
    np.testing.assert_allclose(packed, expected, rtol=1e-4, atol=1e-5)


def test_logits_depend_on_distances_between_positions(random_params: Draw) -> None:
    model = transformer(SMALL)
    params, tokens = random_params(model), draw_tokens(2, 12)
    apply = jax.jit(model.apply)
    positions = np.arange(12) + np.zeros((2, 1), int)
    here, there, apart = (
        apply(params, tokens, None, positions * stride + shift)
        for stride, shift in [(1, 0), (1, 37), (2, 0)]
    )
    np.testing.assert_allclose(there, here, rtol=1e-3, atol=1e-4)
    assert np.max(np.abs(apart - here)) > 0.01


def test_scan_equals_a_loop_over_layers(random_params: Draw) -> None:
    model = transformer(SMALL)
    layer = to_functional(partial(Layer, SMALL))
    params, tokens = random_params(model), draw_tokens(2, 11)

    def attend_to_all(*query_key_value: Any) -> tuple[jax.Array, None]:
        return masked_attention(*query_key_value, attention_mask(11)), None

    def unrolled(params: Any, tokens: Any) -> jax.Array:
        x = params["embedding"][tokens] * SMALL.embed_dim**0.5
        rotation = rotary(jnp.arange(11)[None], SMALL.resolved_head_dim, SMALL.rope_base)
        for i in range(SMALL.num_layers):
            of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            x, *_ = layer.apply(of_layer, x, rotation, attend_to_all)
        x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + SMALL.norm_eps)
        return x * params["final_norm"]["scale"] @ params["embedding"].T

    def objective(apply: Any) -> Any:
        def total(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = apply(params, tokens)
            return jnp.sum(jnp.sin(logits)), logits

        return jax.jit(jax.grad(total, has_aux=True))

    expected_grad, expected = objective(unrolled)(params)
    grad, logits = objective(model.apply)(params)
    # Compared elementwise: the terms of the sum cancel, which leaves mostly rounding errors.
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(grad, expected_grad, rtol=1e-3, atol=1e-3)


def test_parameters_can_be_numpy_arrays(random_params: Draw) -> None:
    model, tokens = transformer(SMALL), draw_tokens(2, 12)
    params = jax.device_get(random_params(model))
    logits = jax.eval_shape(partial(model.apply, params), tokens)
    assert logits.shape == (2, 12, SMALL.vocab_size)


def test_bfloat16_compute_keeps_float32_parameters(random_params: Draw) -> None:
    model, exact = transformer(replace(SMALL, dtype="bfloat16")), transformer(SMALL)
    params, tokens = random_params(model), draw_tokens(2, 12)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}
    gradient = jax.eval_shape(jax.grad(lambda p: jnp.sum(model.apply(p, tokens))), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(np.float32)}
    lowered = jax.jit(model.apply).lower(params, tokens)
    result, expected = lowered.compile()(params, tokens), jax.jit(exact.apply)(params, tokens)
    assert result.dtype == jnp.float32
    # bfloat16 has 8 bits of mantissa.
    assert 1e-4 < np.linalg.norm(result - expected) / np.linalg.norm(expected) < 0.05
    # Every matmul has bfloat16 operands.
    matmuls = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert matmuls and all(line.split(" : (")[1].count("bf16>") >= 2 for line in matmuls)


def test_the_embedding_gradient_is_summed_in_float32(random_params: Draw) -> None:
    """A sum of 2,000 terms, which in bfloat16 would not grow beyond 256."""
    model = transformer(replace(SMALL, dtype="bfloat16"))
    params, tokens = random_params(model), np.zeros((4, 500), np.int32)

    def total(params: Any) -> jax.Array:
        return jnp.sum(model.bind(params).embed(tokens).astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(params)["embedding"][0]
    np.testing.assert_allclose(gradient, 2000 * SMALL.embed_dim**0.5, rtol=0.01)


def test_fresh_logits_have_mean_zero_and_variance_one() -> None:
    # Embeddings are tied, so the logit of the input token itself is larger.
    tokens = draw_tokens(4, 64, vocab_size=256)
    model = transformer(TransformerConfig())
    logits = jax.jit(lambda key: model.apply(model.init(key), tokens))(jax.random.key(3))
    others = np.where(tokens[:, :, None] == np.arange(256), np.nan, logits)
    assert abs(np.nanmean(others)) < 0.1 and 0.8 < np.nanstd(others) < 1.2


def test_the_loss_counts_tokens(random_params: Draw) -> None:
    model = transformer(SMALL)
    tokens = draw_tokens(4, 65)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    params = random_params(model)
    loss, aux = jax.jit(next_token_loss(model.apply))(params, batch)
    assert np.isfinite(loss) and aux["tokens"] == 4 * 64


def test_layers_are_initialized_independently() -> None:
    params = jax.jit(transformer(SMALL).init)(jax.random.key(0))
    for leaf in jax.tree.leaves(params["layers"]["attention"]):
        assert np.min(np.abs(leaf[0] - leaf[1])) > 0
    assert not np.array_equal(
        params["layers"]["attention"]["key"], params["layers"]["attention"]["value"]
    )


@pytest.mark.slow
def test_gradient_equals_finite_difference(random_params: Draw) -> None:
    config = replace(SMALL, dtype="float64")
    tokens, (segments, positions) = draw_tokens(2, 12), draw_packing(2, 11)
    with jax.enable_x64(True):
        model = transformer(config)
        params = jax.tree.map(np.float64, random_params(model))
        random = np.random.default_rng(3)
        direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), params)
        batch = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segments": segments,
            "positions": positions,
            "mask": (segments > 0).astype(np.float32),
        }
        loss_fn = jax.jit(next_token_loss(model.apply))

        def along(step: float) -> Any:
            moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
            return loss_fn(moved, batch)[0]

        difference = (along(1e-5) - along(-1e-5)) / 2e-5
        gradient, _ = jax.jit(jax.grad(loss_fn, has_aux=True))(params, batch)
        slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, direction)))
        along_direction = lambda p: jax.jvp(lambda p: loss_fn(p, batch)[0], (p,), (direction,))[1]
        forward = jax.jit(along_direction)(params)
    assert abs(slope) > 0.1
    np.testing.assert_allclose(slope, difference, rtol=1e-6)
    np.testing.assert_allclose(slope, forward, rtol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_embeddings_start_with_variance_one_unless_a_tied_table_is_unscaled(
    scaled: bool, tied: bool
) -> None:
    config = TransformerConfig(num_layers=1, scale_embeddings=scaled, tied_embeddings=tied)
    model = transformer(config)

    @jax.jit
    def embed(key: jax.Array) -> jax.Array:
        return model.bind(model.init(key)).embed(np.arange(256)[None])

    features = embed(jax.random.key(0))
    expected = config.embed_dim**-0.5 if tied and not scaled else 1.0
    # 256 x 192 numbers: the estimate of their deviation has a deviation of 0.3%.
    assert float(np.std(features)) == pytest.approx(expected, rel=0.02)


def test_float64_without_64_bit_mode_raises() -> None:
    config = replace(SMALL, dtype="float64")
    with pytest.raises(
        ValueError, match=r"dtype='float64' needs JAX's 64-bit mode.*JAX_ENABLE_X64=1"
    ):
        transformer(config)
    with jax.enable_x64(True):
        transformer(config)
