"""The transformer on meshes equals the transformer on one device."""

from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.hlo.collectives import collectives
from fedpax.models.losses import next_token_loss, transformer_loss
from fedpax.models.transformer import Transformer, TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CONFIG = TransformerConfig(
    vocab_size=32, num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2, mlp_dim=20
)


def draw_batch(*shape: int) -> dict[str, Any]:
    """Draw rows of two documents and three tokens of padding."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, CONFIG.vocab_size, shape).astype(np.int32)
    length = shape[-1]
    segments = np.repeat([1, 2, 0], [5, length - 8, 3]) + np.zeros_like(tokens)
    positions = np.concatenate([np.arange(5), np.arange(length - 8), np.arange(3)])
    return {
        "inputs": tokens,
        "targets": random.permuted(tokens, axis=-1),
        "segments": segments,
        "positions": positions + np.zeros_like(tokens),
        "mask": (segments > 0).astype(np.float32),
    }


def close(actual: Any, expected: Any) -> None:
    """Float32 sums in another order: 1e-4 relative, and 1e-5 where terms cancel."""
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def one_device() -> tuple[Any, Any, Any]:
    """Return four models, their batches and their ((loss, aux), gradient) on one device."""
    model, random = transformer(CONFIG), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: 0.4 * random.normal(size=(4, *leaf.shape)).astype(np.float32), shapes
    )
    batches = draw_batch(4, 4, 16)
    step = jax.jit(jax.value_and_grad(next_token_loss(model.apply), has_aux=True))
    results = [jax.device_get(step(*take((params, batches), i))) for i in range(4)]
    return params, batches, jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


@pytest.mark.parametrize(
    ("sizes", "types"),
    [
        pytest.param({"fsdp": 2, "tensor": 2}, (AUTO, AUTO), marks=pytest.mark.slow),
        ({"fsdp": 2, "tensor": 2}, (EXPLICIT, EXPLICIT)),
        pytest.param(
            {"data": 2, "sequence": 2, "tensor": 2}, (AUTO, AUTO, AUTO), marks=pytest.mark.slow
        ),
        pytest.param(
            {"data": 2, "fsdp": 2, "tensor": 2}, (EXPLICIT, AUTO, AUTO), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_equals_one_device(
    one_device: tuple[Any, Any, Any], sizes: dict[str, int], types: tuple[AxisType, ...]
) -> None:
    model = transformer(CONFIG)
    params, batch, expected = take(one_device, 0)
    shape = tuple(sizes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, tuple(sizes), axis_types=types, devices=devices)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(model.logical_axes, params, mesh))
        rows = NamedSharding(mesh, partition_spec(("batch", "sequence"), mesh, shape=(4, 16)))
        step = jax.jit(jax.value_and_grad(next_token_loss(model.apply), has_aux=True))
        result = step(placed, jax.device_put(batch, rows))
    close(jax.device_get(result), expected)
    query = placed["layers"]["attention"]["query"]
    parts = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    assert query.addressable_shards[0].data.size * parts == query.size


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        pytest.param(
            {"tied_embeddings": False, "logit_softcap": 3.0, "qk_norm": True},
            {"fsdp": 2, "tensor": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_experts": 4, "sliding_window": 6},
            {"fsdp": 2, "expert": 2, "tensor": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_layers": 4, "num_microbatches": 2, "num_pipeline_repeats": 2, "remat": "full"},
            {"stage": 2, "fsdp": 2, "sequence": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_options_equal_one_device(change: dict[str, Any], sizes: dict[str, int]) -> None:
    config, random = replace(CONFIG, **change), np.random.default_rng(0)
    model, step = transformer(config), step_of(config)
    params = jax.tree.map(
        lambda leaf: 0.4 * random.normal(size=leaf.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    batch = draw_batch(8, 16)
    expected = jax.jit(step)(params, batch)
    shape = tuple(sizes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, tuple(sizes), axis_types=(AUTO,) * len(shape), devices=devices)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(model.logical_axes, params, mesh))
        rows = NamedSharding(mesh, partition_spec(("batch", "sequence"), mesh, shape=(8, 16)))
        result = jax.jit(step)(placed, jax.device_put(batch, rows))
    close(jax.device_get(result), jax.device_get(expected))


def step_of(config: TransformerConfig) -> Any:
    """Make the training loss with all its terms, and its gradient."""
    loss_fn = transformer_loss(
        config,
        z_loss_weight=1e-2,
        load_balance_weight=0.1,
        router_z_weight=0.1,
        tokens_per_chunk=12,
    )
    return jax.value_and_grad(loss_fn, has_aux=True)


def test_sharded_init_equals_init_on_one_device() -> None:
    model, key = transformer(CONFIG), jax.random.key(5)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AUTO, AUTO))
    parts = shardings(model.logical_axes, jax.eval_shape(model.init, key), mesh)
    with jax.set_mesh(mesh):
        params = jax.jit(model.init, out_shardings=parts)(key)
    # The same random numbers on any mesh; 1e-6 for different fusions.
    jitted = jax.jit(model.init)(key)
    chex.assert_trees_all_close(jax.device_get(params), jitted, rtol=1e-6)
    assert params["embedding"].sharding.spec == PartitionSpec("tensor", "fsdp")
    down = params["layers"]["feed_forward"]["down"]
    assert down.addressable_shards[0].data.shape == (2, 10, 6)


@pytest.mark.parametrize("way", [pytest.param("vmap", marks=pytest.mark.slow), "shard_map"])
def test_islands_equal_one_device(one_device: tuple[Any, Any, Any], way: str) -> None:
    model = transformer(CONFIG)
    params, batches, expected = one_device
    gradient = jax.value_and_grad(next_token_loss(model.apply), has_aux=True)
    islands = jax.make_mesh((4, 2), ("islands", "fsdp"), axis_types=(AUTO, AUTO))

    def alone(*args: Any) -> Any:
        result = gradient(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], result)

    split = PartitionSpec("islands")
    step = {
        "vmap": jax.vmap(gradient, spmd_axis_name="islands"),
        "shard_map": jax.shard_map(
            alone, mesh=islands, in_specs=split, out_specs=split, axis_names={"islands"}
        ),
    }[way]
    inside = shardings(model.logical_axes, take(params, 0), islands)
    placed = jax.tree.map(
        lambda s: NamedSharding(islands, PartitionSpec("islands", *s.spec)), inside
    )
    with jax.set_mesh(islands):
        arguments = jax.device_put((params, batches), (placed, NamedSharding(islands, split)))
        compiled = jax.jit(step).lower(*arguments).compile()
        close(jax.device_get(compiled(*arguments)), expected)
    communication = collectives(compiled.as_text(), islands)
    assert communication and all(each.axes == ("fsdp",) for each in communication)


def test_weights_are_gathered_again_in_the_backward_pass() -> None:
    """Stored, the gathered weights of all layers would take the memory that fsdp saves."""
    model = transformer(CONFIG)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AUTO,), devices=jax.devices()[:2])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    parts = shardings(model.logical_axes, shapes, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(
            jax.grad(next_token_loss(model.apply), has_aux=True), in_shardings=(parts, None)
        )
        text = step.lower(shapes, draw_batch(4, 16)).compile().as_text()
    gathers = [each for each in collectives(text, mesh) if each.kind == "all-gather"]
    # Query, key, value, output, gate, up, down of a layer: once forward, once backward.
    assert [each.executions for each in gathers if each.in_loop] == [CONFIG.num_layers] * 14
    assert sum(not each.in_loop for each in gathers) == 1  # the table, for logits


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_the_table_of_embeddings_is_never_whole_on_a_device(axis_type: AxisType) -> None:
    config = replace(CONFIG, vocab_size=4096, embed_dim=512, scale_embeddings=False)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(axis_type, axis_type))
    random = np.random.default_rng(0)
    table = random.normal(size=(config.vocab_size, config.embed_dim)).astype(np.float32)
    tokens = random.integers(0, config.vocab_size, (8, 16))
    weights = random.normal(size=(*tokens.shape, config.embed_dim)).astype(np.float32)

    def loss_fn(table: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        model.embedding.set_value(table)
        return (model.embed(tokens) * weights).sum()

    with jax.set_mesh(mesh):
        names = (("vocab", "embed"), ("batch", "sequence"), ("batch", "sequence", None))
        places = [NamedSharding(mesh, partition_spec(axes, mesh)) for axes in names]
        arguments = jax.device_put((table, tokens, weights), tuple(places))
        step = jax.jit(jax.value_and_grad(loss_fn), out_shardings=(None, places[0]))
        compiled = step.lower(*arguments).compile()
        loss, gradient = jax.device_get(compiled(*arguments))
    np.testing.assert_allclose(loss, (table[tokens] * weights).sum(dtype=np.float64), rtol=1e-4)
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
    # Tokens and features move over fsdp; over data each device sums the gradient of its columns.
    sent = {(*each.axes, each.kind): each.bytes for each in collectives(compiled.as_text(), mesh)}
    assert sent == {
        ("fsdp", "all-gather"): 4 * tokens.size // mesh.size,
        ("fsdp", "all-to-all"): weights.nbytes // mesh.size,
        ("data", "all-reduce"): table.nbytes // mesh.shape["fsdp"],
        ("data", "fsdp", "all-reduce"): 4,  # the loss
    }
