"""The training step lowered for absent TPUs uses the kernels for TPUs."""

from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import fedpax
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings

OPTIONS: dict[str, Any] = {
    "vocab_size": 32,
    "num_layers": 2,
    "embed_dim": 64,
    "num_heads": 2,
    "head_dim": 64,
    "num_kv_heads": 1,
    "mlp_dim": 32,
    "dtype": "bfloat16",
}


def lowered(config: TransformerConfig, sizes: dict[str, int]) -> str:
    """Lower the gradient of the loss for 2 islands on a mesh of TPUs."""
    mesh = AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        (AxisType.Auto,) * len(sizes),
        abstract_device=jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu"),
    )
    gradient = jax.grad(transformer_loss(config), has_aux=True)

    @fedpax.program(islands=2)
    def step(params: Any, batch: Any) -> Any:
        return fedpax.federated_map(gradient, params, batch)

    def placed(leaf: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec("islands", *spec))
        return jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype, sharding=sharding)

    model = transformer(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    parts: Any = shardings(model.logical_axes, shapes, mesh)
    params = jax.tree.map(lambda leaf, part: placed(leaf, part.spec), shapes, parts)
    row = placed(jax.ShapeDtypeStruct((8, 128), "int32"), partition_spec(("batch", None), mesh))
    batch = dict.fromkeys(("inputs", "targets", "segments", "positions"), row)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step).trace(params, batch)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        pytest.param({}, {"islands": 2, "fsdp": 4}, marks=pytest.mark.slow),
        ({"sliding_window": 64}, {"islands": 2, "fsdp": 2, "tensor": 2}),
        pytest.param(
            {"num_experts": 2}, {"islands": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_microbatches": 2}, {"islands": 2, "stage": 2, "fsdp": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_islands_run_the_kernel_on_each_device(change: Any, sizes: dict[str, int]) -> None:
    text = lowered(TransformerConfig(**OPTIONS | change), sizes)
    # In the scan over layers: forward, gradient of queries, gradient of keys and values.
    assert text.count("tpu_custom_call") >= 3


def test_einsum_attention_uses_no_kernel() -> None:
    config = TransformerConfig(**OPTIONS | {"attention": "einsum"})
    assert "tpu_custom_call" not in lowered(config, {"islands": 2, "fsdp": 4})
