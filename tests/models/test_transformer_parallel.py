"""Every kind of parallelism gives the loss and gradient of one device."""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import fedpax
from fedpax.hlo.collectives import collectives
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings
from fedpax.parallel.mesh import make_mesh

DENSE = TransformerConfig(
    vocab_size=32, num_layers=4, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, remat="full"
)
MIXTURE = dataclasses.replace(DENSE, num_experts=4, num_experts_per_token=2)
BATCH, LENGTH = 8, 16


def draw_batch(*leading: int) -> dict[str, Any]:
    """Draw rows of two documents and three tokens of padding."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, DENSE.vocab_size, (*leading, BATCH, LENGTH)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [5, LENGTH - 8, 3]) + np.zeros_like(tokens)
    positions = np.concatenate([np.arange(5), np.arange(LENGTH - 8), np.arange(3)])
    return {
        "inputs": tokens,
        "targets": random.permuted(tokens, axis=-1),
        "segments": segments,
        "positions": positions + np.zeros_like(tokens),
        "mask": (segments > 0).astype(np.float32),
    }


def draw_params(config: TransformerConfig, *leading: int) -> Any:
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))

    def one(path: Any, leaf: Any) -> np.ndarray:
        center = 1.0 if path[-1].key == "scale" else 0.0
        shape = (*leading, *leaf.shape)
        return (center + 0.3 * random.normal(size=shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, shapes)


def value_and_gradient(config: TransformerConfig, load_balance: float = 0.01) -> Any:
    """Make the loss with all its terms, and its gradient."""
    loss = transformer_loss(
        config, z_loss_weight=1e-3, load_balance_weight=load_balance, router_z_weight=0.01
    )
    return jax.value_and_grad(loss, has_aux=True)


@functools.cache
def on_one_device(config: TransformerConfig, load_balance: float = 0.01) -> Any:
    """Return two models, their batches and their results on one device."""
    arguments = draw_params(config, 2), draw_batch(2)
    step = jax.jit(value_and_gradient(config, load_balance))
    results = [jax.device_get(step(*take(arguments, i))) for i in range(2)]
    return arguments, jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


def close(actual: Any, expected: Any) -> None:
    """Float32 sums in another order: 1e-4 relative, and 1e-5 where terms cancel."""
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def mesh_of(**sizes: int) -> Mesh:
    return make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)


def in_runs(config: TransformerConfig, params: Any, *, leading: int = 0) -> Any:
    """Reshape stacked parameters for an interleaved pipeline, in the same order."""
    repeats = config.num_pipeline_repeats
    if repeats == 1:
        return params
    layers = jax.tree.map(
        lambda p: p.reshape(*p.shape[:leading], repeats, -1, *p.shape[leading + 1 :]),
        params["layers"],
    )
    return params | {"layers": layers}


def in_one_stack(config: TransformerConfig, params: Any, *, leading: int = 0) -> Any:
    if config.num_pipeline_repeats == 1:
        return params
    layers = jax.tree.map(
        lambda p: p.reshape(*p.shape[:leading], -1, *p.shape[leading + 2 :]), params["layers"]
    )
    return params | {"layers": layers}


def case(config: TransformerConfig, sizes: dict[str, int], *, slow: bool = True) -> Any:
    options = {
        name: getattr(config, name)
        for name in ("num_experts", "num_microbatches", "num_pipeline_repeats", "sliding_window")
        if getattr(config, name) != getattr(DENSE, name)
    }
    name = "-".join(f"{key}{value}" for key, value in (sizes | options).items())
    return pytest.param(config, sizes, id=name, marks=[pytest.mark.slow] * slow)


def gpipe(config: TransformerConfig, microbatches: int = 4) -> TransformerConfig:
    return dataclasses.replace(config, num_microbatches=microbatches)


def interleaved(config: TransformerConfig, microbatches: int = 4) -> TransformerConfig:
    return dataclasses.replace(config, num_microbatches=microbatches, num_pipeline_repeats=2)


CASES = [
    case(DENSE, {"data": 8}),
    case(DENSE, {"fsdp": 8}),
    case(DENSE, {"tensor": 2}),
    case(DENSE, {"sequence": 8}),
    case(MIXTURE, {"expert": 4}),
    case(gpipe(DENSE), {"stage": 4}),
    case(interleaved(DENSE), {"stage": 2}),
    case(dataclasses.replace(DENSE, sliding_window=5), {"sequence": 4}),
    case(DENSE, {"fsdp": 2, "tensor": 2, "sequence": 2}),
    case(gpipe(DENSE), {"stage": 2, "fsdp": 2, "tensor": 2}),
    case(interleaved(DENSE, 2), {"stage": 2, "fsdp": 2, "tensor": 2}, slow=False),
    case(MIXTURE, {"expert": 2, "fsdp": 2}),
    case(MIXTURE, {"expert": 2, "fsdp": 2, "tensor": 2}),
    case(gpipe(DENSE), {"stage": 2, "sequence": 4}),
    case(gpipe(MIXTURE, 2), {"stage": 2, "expert": 2}),
    case(DENSE, {"data": 2, "sequence": 2, "tensor": 2}),
]


@pytest.mark.parametrize(("config", "sizes"), CASES)
def test_equals_one_device(config: TransformerConfig, sizes: dict[str, int]) -> None:
    whole = dataclasses.replace(config, num_microbatches=1, num_pipeline_repeats=1)
    # The load-balancing loss of a pipeline is a mean over microbatches, which is not the mean of a
    # whole batch. All other terms are equal.
    load_balance = 0.0 if config.num_experts and config.num_microbatches > 1 else 0.01
    arguments, expected = on_one_device(whole, load_balance)
    (params, batch), expected = take(arguments, 0), take(expected, 0)
    params = in_runs(config, params)
    mesh, model = mesh_of(**sizes), transformer(config)
    with jax.set_mesh(mesh):
        parts = shardings(model.logical_axes, params, mesh)
        rows = NamedSharding(mesh, partition_spec(("batch", "sequence"), mesh, shape=(8, 16)))
        step = jax.jit(
            value_and_gradient(config, load_balance),
            in_shardings=(parts, rows),
            out_shardings=(None, parts),
        )
        compiled = step.lower(params, batch).compile()
        (loss, aux), gradient = jax.device_get(
            compiled(*jax.device_put((params, batch), (parts, rows)))
        )
    gradient = in_one_stack(config, gradient)
    if not load_balance:
        balance = aux.pop("load_balance")
        expected[0][1].pop("load_balance")
        assert 0 < balance <= config.num_experts
    close(((loss, aux), gradient), expected)
    check_memory(compiled, (params, batch), (parts, rows))
    check_traffic(compiled.as_text(), mesh, params)


def check_memory(compiled: Any, arguments: Any, parts: Any) -> None:
    """Check that the arguments take the memory of their shards."""
    parameters, rows = parts

    def of_device(leaf: Any, part: NamedSharding) -> int:
        return int(np.prod(part.shard_shape(leaf.shape))) * leaf.itemsize

    sizes = jax.tree.leaves(jax.tree.map(of_device, arguments[0], parameters))
    sizes += [of_device(leaf, rows) for leaf in jax.tree.leaves(arguments[1])]
    assert compiled.memory_analysis().argument_size_in_bytes <= sum(sizes) + 64
    cut = math.prod(rows.mesh.shape.get(axis, 1) for axis in ("fsdp", "stage", "tensor"))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0]["layers"]))
    mine = sum(
        jax.tree.leaves(jax.tree.map(of_device, arguments[0]["layers"], parameters["layers"]))
    )
    assert mine <= 1.2 * whole / cut


def check_traffic(text: str, mesh: Mesh, params: Any) -> None:
    """Check that stages and rings send features and gather no parameters."""
    largest = max(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(params["layers"]))
    communication = collectives(text, mesh)
    for axis in ("stage", "sequence"):
        if axis in mesh.shape:
            assert any(c.kind == "collective-permute" and axis in c.axes for c in communication)
    gathers = [c for c in communication if c.kind == "all-gather" and "stage" in c.axes]
    assert all(c.bytes < largest for c in gathers)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        case(DENSE, {"islands": 2, "fsdp": 2, "sequence": 2}),
        case(interleaved(DENSE), {"islands": 2, "stage": 2, "fsdp": 2}),
        case(gpipe(DENSE), {"islands": 2, "stage": 2, "tensor": 2}),
        case(MIXTURE, {"islands": 2, "expert": 2, "fsdp": 2}),
        case(DENSE, {"islands": 1, "data": 2, "tensor": 2}),
        case(gpipe(DENSE), {"stage": 2}),  # both islands on each device
    ],
)
def test_islands_equal_one_device(config: TransformerConfig, sizes: dict[str, int]) -> None:
    whole = dataclasses.replace(config, num_microbatches=1, num_pipeline_repeats=1)
    (params, batches), expected = on_one_device(whole)
    params = in_runs(config, params, leading=1)

    @fedpax.program(islands=2)
    def islands(params: Any, batches: Any) -> Any:
        return fedpax.federated_map(value_and_gradient(config), params, batches)

    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        compiled = jax.jit(islands).lower(params, batches).compile()
        result, gradient = jax.device_get(compiled(params, batches))
    close((result, in_one_stack(config, gradient, leading=1)), expected)
    assert all("islands" not in c.axes for c in collectives(compiled.as_text(), mesh))
