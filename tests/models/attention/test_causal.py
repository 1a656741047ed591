from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fedpax.models.attention import causal
from fedpax.models.attention.causal import (
    attention_mask,
    causal_attention,
    masked_attention,
    platform,
)
from fedpax.ops.splash_attention import splash_attention
from fedpax.parallel import MeshConfig


def draw(seq_len: int, head_dim: int = 8, heads: int = 4, batch: int = 2) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    query = random.normal(size=(batch, seq_len, heads, head_dim)).astype(np.float32)
    key, value = random.normal(size=(2, batch, seq_len, 2, head_dim)).astype(np.float32)
    edges = random.random((batch, seq_len)) < 4 / seq_len
    return query, key, value, edges.cumsum(axis=1).astype(np.int32)


def with_gradient(function: Any, *args: Any) -> Any:
    """Return the result, and the gradient of its sum with random weights."""
    weights = np.random.default_rng(1).normal(size=args[0].shape).astype(np.float32)

    def total(*args: Any) -> Any:
        result = function(*args)
        return jnp.sum(weights * result), result

    gradient, result = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*args)
    return result, gradient


def close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def mesh_of(platform: str) -> AbstractMesh:
    device = jax.sharding.AbstractDevice("any", 1, platform)
    return AbstractMesh((2,), ("fsdp",), (AxisType.Auto,), abstract_device=device)


def plain(sliding_window: int | None, packed: bool) -> Any:
    def function(query: Any, key: Any, value: Any, segments: Any) -> Any:
        mask = attention_mask(query.shape[1], segments if packed else None, sliding_window)
        return masked_attention(query, key, value, mask)

    return function


@pytest.mark.each_value
@pytest.mark.parametrize("implementation", ["einsum", "xla", "auto"])
@pytest.mark.parametrize(
    ("sliding_window", "packed"),
    [
        (None, True),
        pytest.param(5, False, marks=pytest.mark.slow),
        (5, True),
        pytest.param(40, True, marks=pytest.mark.slow),
    ],
)
def test_implementations_equal_masked_attention(
    implementation: Any, sliding_window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "QUERY_BLOCK", 8)  # 24 tokens are three blocks
    args = draw(24)

    def function(query: Any, key: Any, value: Any, segments: Any) -> Any:
        return causal_attention(
            query,
            key,
            value,
            segments if packed else None,
            sliding_window=sliding_window,
            implementation=implementation,
        )

    close(with_gradient(function, *args), with_gradient(plain(sliding_window, packed), *args))


@pytest.mark.parametrize(
    ("sliding_window", "packed"),
    [
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(100, False, marks=pytest.mark.slow),
        (130, True),
    ],
)
def test_splash_equals_masked_attention(sliding_window: int | None, packed: bool) -> None:
    args = draw(256, head_dim=64, batch=1)

    def function(query: Any, key: Any, value: Any, segments: Any) -> Any:
        rows = segments if packed else None
        return splash_attention(
            query, key, value, rows, sliding_window=sliding_window, interpret=True
        )

    close(with_gradient(function, *args), with_gradient(plain(sliding_window, packed), *args))


@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit]
)
def test_splash_runs_on_sharded_rows_and_heads(axis_type: AxisType) -> None:
    """On 2 x 4 devices: 4 along tensor share 2 key heads, so each head is repeated on 2 of them."""
    args = draw(128, head_dim=64)
    function = partial(splash_attention, interpret=True)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        result = with_gradient(function, *jax.device_put(args, rows))
    close(jax.device_get(result), with_gradient(plain(None, True), *args))


def test_splash_makes_every_mesh_axis_manual() -> None:
    """A TPU kernel does not compile otherwise, not even with an automatic axis of size 1."""
    args = draw(128, head_dim=64)
    mesh = MeshConfig(islands=2, fsdp=4).make()

    def on_island(*args: jax.Array) -> jax.Array:
        jaxpr = jax.make_jaxpr(partial(splash_attention, interpret=True))(*args)
        (shard_map,) = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
        manual.append(shard_map.params["newly_manual_axes"])
        return args[0]

    manual: list[frozenset[str]] = []
    with jax.set_mesh(mesh):
        whole = PartitionSpec()
        jax.eval_shape(
            jax.shard_map(on_island, in_specs=whole, out_specs=whole, axis_names={"islands"}),
            *args,
        )
    assert manual == [frozenset(mesh.axis_names) - {"islands"}]


def test_splash_raises_for_unsupported_sizes() -> None:
    with pytest.raises(ValueError, match=r"seq_len=100 and head_dim=64.*attention='auto'"):
        splash_attention(*draw(100, head_dim=64))
    with pytest.raises(ValueError, match=r"seq_len=128 and head_dim=8"):
        causal_attention(*draw(128), implementation="splash")


@pytest.mark.parametrize("implementation", ["splash", "cudnn"])
def test_kernels_raise_on_other_platforms(implementation: Any) -> None:
    args = draw(128, head_dim=64)
    with pytest.raises(ValueError, match=rf"'{implementation}' on cpu.*: .*attention='auto'"):
        jax.jit(partial(causal_attention, implementation=implementation))(*args)


@pytest.mark.parametrize(
    ("name", "expected"), [("tpu", "tpu"), ("cuda", "gpu"), ("gpu", "gpu"), ("cpu", "cpu")]
)
def test_the_platform_is_that_of_the_mesh(name: str, expected: str) -> None:
    assert platform() == "cpu"  # no mesh is set
    with jax.sharding.use_abstract_mesh(mesh_of(name)):
        assert platform() == expected


@pytest.mark.parametrize(
    ("name", "seq_len", "head_dim", "expected"),
    [
        ("tpu", 256, 64, True),
        ("tpu", 256, 48, False),
        ("tpu", 200, 64, False),
        ("cpu", 256, 64, False),
    ],
)
def test_auto_uses_splash_for_supported_sizes_on_tpu(
    name: str, seq_len: int, head_dim: int, expected: bool
) -> None:
    with jax.sharding.use_abstract_mesh(mesh_of(name)):
        text = str(jax.make_jaxpr(causal_attention)(*draw(seq_len, head_dim)))
    assert ("pallas_call" in text) == expected


def test_scores_of_long_sequences_never_exist() -> None:
    shapes = [jax.ShapeDtypeStruct((1, 8192, 4, 16), jnp.float32)] * 3
    scores = 4 * 4 * 8192**2

    def temporaries(sliding_window: int | None) -> int:
        gradient = jax.grad(
            lambda *args: jnp.sum(causal_attention(*args, sliding_window=sliding_window)), (0, 1)
        )
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(None) < scores / 3
    assert temporaries(512) < temporaries(None) / 2
