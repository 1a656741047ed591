from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from fedpax.models.losses import transformer_loss
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.ops.remat import POLICIES

CONFIG = TransformerConfig(
    vocab_size=23, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=128
)


def step_of(remat: Any) -> Any:
    return jax.grad(transformer_loss(replace(CONFIG, remat=remat)), has_aux=True)


def test_the_configuration_lists_every_policy() -> None:
    choices = get_args(get_type_hints(TransformerConfig)["remat"])
    assert set(choices) == {"none", *POLICIES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "dots_with_no_batch_dims",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "dots")),
        pytest.param("save_attention", marks=pytest.mark.slow),
    ],
)
def test_gradients_do_not_depend_on_the_policy(
    random_params: Callable[[FunctionalModel], Any], policy: str
) -> None:
    params = random_params(transformer(CONFIG))
    tokens = np.random.default_rng(0).integers(0, 23, (2, 17)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    expected, _ = jax.jit(step_of("none"))(params, batch)
    gradient, _ = jax.jit(step_of(policy))(params, batch)
    for leaf, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert np.linalg.norm(leaf - other) < 1e-5 * np.linalg.norm(other)


def stored_bytes(config: TransformerConfig, batch: int, seq_len: int) -> int:
    """Return the bytes that a layer stores for the backward pass."""
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
    row = jax.ShapeDtypeStruct((batch, seq_len), np.int32)
    step = jax.grad(transformer_loss(config), has_aux=True)
    jaxpr = jax.make_jaxpr(step)(shapes, {"inputs": row, "targets": row})
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    kept = [v.aval for v in forward.outvars if v.aval.shape[:1] == (config.num_layers,)]
    return sum(aval.size * aval.dtype.itemsize for aval in kept) // config.num_layers


@pytest.mark.slow
def test_policies_are_ordered_by_memory() -> None:
    none, dots, no_batch, attention, full = (
        stored_bytes(replace(CONFIG, remat=policy), 4, 64)
        for policy in ("none", "dots", "dots_with_no_batch_dims", "save_attention", "full")
    )
    features, scores = 4 * 4 * 64 * 64, 4 * 4 * 4 * 64 * 64
    assert full == features and attention == 2 * features
    # The input; query, key, value; attention and its projection; gate and up, but not down.
    assert no_batch == (1 + (1 + 0.5 + 0.5) + 2 + (2 + 2)) * features
    assert dots == no_batch + scores < none


def test_saving_attention_saves_the_residuals_of_the_tpu_kernel() -> None:
    device = jax.sharding.AbstractDevice("any", 1, "tpu")
    mesh = AbstractMesh((2,), ("fsdp",), (AxisType.Auto,), abstract_device=device)
    config = replace(CONFIG, num_heads=1, num_kv_heads=1)
    with jax.sharding.use_abstract_mesh(mesh):
        attention, full = (
            stored_bytes(replace(config, remat=policy), 2, 128)
            for policy in ("save_attention", "full")
        )
    features, log_sums = 4 * 2 * 128 * 64, 4 * 2 * 128
    assert attention - full == features + log_sums
