"""Adapters: against NumPy, flax's LoRA and merged weights; gradients, shapes, meshes, errors."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

from fedpax.models import huggingface, lora
from fedpax.models.layers import project
from fedpax.models.lora import AdaptedWeight, LoRAConfig
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import shardings

CONFIG = TransformerConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=20,
    scale_embeddings=False,
)
LORA = LoRAConfig(rank=3, alpha=5.0)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 8)).astype(np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


@functools.cache
def logits_fn(config: TransformerConfig) -> Any:
    return jax.jit(transformer(config).apply)


def draw(shapes: Any, seed: int, scale: float = 0.4) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (scale * random.normal(size=leaf.shape)).astype(np.float32), shapes
    )


def draw_model(config: TransformerConfig, size: LoRAConfig = LORA) -> tuple[Any, Any]:
    """Return random parameters and random adapters, whose B is not zero."""
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    adapters = jax.eval_shape(lambda: lora.init(jax.random.key(0), shapes, size))
    return draw(shapes, 1), draw(adapters, 2)


@pytest.mark.parametrize(
    ("subscripts", "x_shape", "shape", "num_inputs", "axes"),
    [
        ("btw,whd->bthd", (2, 3, 5), (5, 4, 6), 1, ("embed", "heads", "head_dim")),
        ("bthd,hdw->btw", (2, 3, 4, 6), (4, 6, 5), 2, ("heads", "head_dim", "embed")),
        ("btm,mw->btw", (2, 3, 7), (7, 5), 1, ("mlp", "embed")),
    ],
)
def test_a_projection_adds_the_low_rank_update(
    subscripts: str, x_shape: Any, shape: Any, num_inputs: int, axes: Any
) -> None:
    a_shape, b_shape = (*shape[:num_inputs], 3), (3, *shape[num_inputs:])
    x, weight, a, b = (
        draw(np.empty(s), i) for i, s in enumerate((x_shape, shape, a_shape, b_shape))
    )
    parameter = nnx.Param(AdaptedWeight(weight, a, b, 0.7), logical_axes=("layers", *axes))
    size = int(np.prod(shape[:num_inputs]))
    update = (a.reshape(size, 3).astype(float) @ b.reshape(3, -1).astype(float)).reshape(shape)
    expected = np.einsum(subscripts, x.astype(float), weight + 0.7 * update)
    np.testing.assert_allclose(project(subscripts, x, parameter), expected, rtol=1e-5, atol=1e-6)


def test_the_update_is_that_of_flaxs_lora() -> None:
    linear = nnx.Linear(7, 5, use_bias=False, rngs=nnx.Rngs(0))
    layer = nnx.LoRA(7, 3, 5, base_module=linear, rngs=nnx.Rngs(1))
    x, b = draw(np.empty((2, 4, 7)), 0), draw(np.empty((3, 5)), 1)
    layer.lora_b.set_value(jnp.asarray(b))
    adapted = AdaptedWeight(linear.kernel[...], layer.lora_a[...], jnp.asarray(b), scale=1.0)
    parameter = nnx.Param(adapted, logical_axes=("mlp", "embed"))
    np.testing.assert_allclose(project("btm,mw->btw", x, parameter), layer(x), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def gradients() -> tuple[Any, Any]:
    """Return loss and gradient of the adapters: attached, and merged into the weights."""
    params, adapters = draw_model(CONFIG)
    loss_fn = transformer_loss(CONFIG)

    def attached(adapters: Any, params: Any) -> Any:
        return lora.adapter_loss(loss_fn, params, LORA)(adapters, BATCH)[0]

    def merged(adapters: Any, params: Any) -> Any:
        return loss_fn(lora.merge(params, adapters, LORA), BATCH)[0]

    return tuple(jax.jit(jax.value_and_grad(fn))(adapters, params) for fn in (attached, merged))


def test_loss_and_gradient_are_those_of_the_merged_weights(gradients: Any) -> None:
    (loss, gradient), (expected_loss, expected) = gradients
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=2e-3, atol=1e-5)


def matmul_shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.outvars[0].aval.shape
        for inner in jaxprs_in_params(eqn.params):
            yield from matmul_shapes(inner)


def test_no_gradient_of_a_frozen_weight_is_computed() -> None:
    params, adapters = draw_model(CONFIG)
    loss_fn = transformer_loss(CONFIG)

    def shapes_of(fn: Any, *args: Any) -> set[tuple[int, ...]]:
        gradient = set(matmul_shapes(jax.make_jaxpr(jax.grad(fn))(*args).jaxpr))
        # Transposed or not, and with B's and A's matmuls.
        return {tuple(sorted(shape)) for shape in gradient}

    down = tuple(sorted(params["layers"]["feed_forward"]["down"].shape[1:]))
    adapted = shapes_of(
        lambda a, p: lora.adapter_loss(loss_fn, p, LORA)(a, BATCH)[0], adapters, params
    )
    assert (*sorted((3, 20)),) in adapted and down not in adapted
    assert down in shapes_of(lambda p: loss_fn(p, BATCH)[0], params)


def test_new_adapters_change_nothing() -> None:
    params, _ = draw_model(CONFIG)
    adapters = lora.init(jax.random.key(3), params, LORA)
    apply = logits_fn(CONFIG)
    expected = apply(params, TOKENS)
    np.testing.assert_array_equal(apply(lora.attach(params, adapters, LORA), TOKENS), expected)
    query = adapters["layers"]["attention"]["query"]["a"]
    assert query.shape == (2, 16, 3) and query.dtype == np.float32
    output = adapters["layers"]["attention"]["output"]["a"]
    assert 0.7 < float(jnp.std(query)) * 16**0.5 < 1.3
    assert 0.7 < float(jnp.std(output)) * (4 * 6) ** 0.5 < 1.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 4, "num_pipeline_repeats": 2, "remat": "full"},
        {"num_experts": 4, "qk_norm": True},
    ],
    ids=str,
)
def test_merged_weights_compute_what_the_adapters_do(change: dict[str, Any]) -> None:
    config = replace(CONFIG, **change)
    params, adapters = draw_model(config)
    apply = logits_fn(config)
    merged = lora.merge(params, adapters, LORA)
    actual = apply(lora.attach(params, adapters, LORA), TOKENS)
    expected, frozen = apply(merged, TOKENS), apply(params, TOKENS)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected - frozen).max() > 0.1
    names = set() if config.num_experts else {"gate", "up", "down"}
    assert set(adapters["layers"].get("feed_forward", {})) == names


def test_a_merged_model_goes_through_a_hugging_face_folder(tmp_path: Any) -> None:
    params, adapters = draw_model(CONFIG)
    huggingface.save(tmp_path, CONFIG, lora.merge(params, adapters, LORA))
    config, loaded = huggingface.load(tmp_path)
    assert config == CONFIG
    apply = logits_fn(CONFIG)
    expected = apply(lora.attach(params, adapters, LORA), TOKENS)
    np.testing.assert_allclose(apply(loaded, TOKENS), expected, rtol=0, atol=1e-4)


def test_merging_keeps_the_dtype_of_the_weights() -> None:
    params, adapters = draw_model(CONFIG)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    merged = lora.merge(half, adapters, LORA)["layers"]["feed_forward"]["up"]
    up, weight = adapters["layers"]["feed_forward"]["up"], half["layers"]["feed_forward"]["up"]
    exact = np.asarray(weight, np.float64) + 5 / 3 * np.einsum("lir,lro->lio", up["a"], up["b"])
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(merged, np.float64), exact, rtol=2**-8)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_model_computes_the_same(kind: AxisType) -> None:
    params, adapters = draw_model(CONFIG)
    model = transformer(CONFIG)
    expected = logits_fn(CONFIG)(lora.attach(params, adapters, LORA), TOKENS)
    mesh = jax.make_mesh((2, 2, 2), ("clients", "fsdp", "tensor"), axis_types=(kind,) * 3)
    axes = lora.logical_axes(model.logical_axes, LORA)
    placed = [
        jax.device_put(tree, shardings(names, tree, mesh))
        for names, tree in ((model.logical_axes, params), (axes, adapters))
    ]
    down = placed[1]["layers"]["feed_forward"]["down"]
    assert down["a"].sharding.spec[1] == "tensor" and down["b"].sharding.spec[2] == "fsdp"
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda p, a: model.apply(lora.attach(p, a, LORA), TOKENS))(*placed)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": -1}, r"lora\.rank=-1: expected an int of at least 0\. Set --lora\.rank"),
        ({"alpha": 0.0}, r"lora\.alpha=0\.0: expected a positive finite number"),
        ({"targets": ("query", "keys")}, "lora.targets has keys: expected names among query, key"),
    ],
)
def test_a_wrong_size_raises(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoRAConfig(**options)


@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        ({}, LoRAConfig(rank=0), "lora.rank=0 means no adapters: expected a rank of at least 1"),
        ({"num_experts": 2}, LoRAConfig(targets=("query", "up")), "has up, .* leave these names"),
        ({"feed_forward": "gelu"}, LoRAConfig(targets=("gate",)), "has gate, .* leave these names"),
    ],
)
def test_weights_that_a_model_does_not_have_are_named(
    change: dict[str, Any], size: LoRAConfig, words: str
) -> None:
    shapes = jax.eval_shape(transformer(replace(CONFIG, **change)).init, jax.random.key(0))
    with pytest.raises(ValueError, match=words):
        lora.init(jax.random.key(0), shapes, size)
