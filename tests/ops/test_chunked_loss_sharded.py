"""The chunked loss on meshes equals one device and sends no logits."""

from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedpax.hlo.collectives import collectives
from fedpax.ops.chunked_loss import chunked_cross_entropy
from fedpax.parallel.axes import partition_spec

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BATCH, SEQ_LEN, EMBED_DIM, VOCAB_SIZE, CHUNK = 8, 32, 8, 48, 10


def draw(*leading: int) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    features = random.normal(size=(*leading, BATCH, SEQ_LEN, EMBED_DIM)).astype(np.float32)
    table = random.normal(size=(*leading, VOCAB_SIZE, EMBED_DIM)).astype(np.float32)
    targets = random.integers(0, VOCAB_SIZE, features.shape[:-1]).astype(np.int32)
    return features, table, targets, random.random(targets.shape).astype(np.float32)


LOSS = partial(chunked_cross_entropy, softcap=3.0, z_loss_weight=0.1, tokens_per_chunk=CHUNK)
STEP = jax.value_and_grad(LOSS, (0, 1), has_aux=True)


def placed(mesh: Any, args: tuple[Any, ...], *leading: str) -> Any:
    """Shard the tokens as RULES say, the table over vocabulary and embedding."""
    rows = partition_spec(("batch", "sequence"), mesh)
    specs = (rows, partition_spec(("vocab", "embed"), mesh), rows, rows)
    return jax.device_put(
        args, tuple(NamedSharding(mesh, PartitionSpec(*leading, *spec)) for spec in specs)
    )


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"fsdp": 2, "tensor": 4}, AUTO),
        ({"fsdp": 2, "tensor": 2}, EXPLICIT),
        ({"data": 2, "sequence": 2, "tensor": 2}, AUTO),
        ({"fsdp": 8}, AUTO),
    ],
    ids=str,
)
def test_equals_one_device_and_sends_no_logits(sizes: dict[str, int], kind: AxisType) -> None:
    args = draw()
    expected = jax.jit(STEP)(*args)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, args)
        compiled = jax.jit(STEP).lower(*on_mesh).compile()
        result = compiled(*on_mesh)
    result, expected = jax.device_get((result, expected))
    chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-6)
    communication = collectives(compiled.as_text(), mesh)
    # In the loop only the sums over a sharded vocabulary: one number or one feature vector a token.
    for each in communication:
        if each.in_loop:
            assert each.axes == ("tensor",) and each.kind == "all-reduce", each
            assert each.bytes <= 4 * CHUNK * EMBED_DIM, each
    # The gradient of the table is reduced once.
    table = 4 * VOCAB_SIZE * EMBED_DIM // sizes.get("tensor", 1)
    assert sum(each.bytes >= table // sizes.get("fsdp", 1) for each in communication) <= 2 + len(
        sizes
    )


@pytest.mark.parametrize("way", ["vmap", "shard_map"])
def test_islands_equal_one_device(way: str) -> None:
    args = draw(2)
    expected = [jax.device_get(jax.jit(STEP)(*(x[i] for x in args))) for i in range(2)]
    mesh = jax.make_mesh((2, 2, 2), ("islands", "fsdp", "tensor"), axis_types=(AUTO,) * 3)

    def alone(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], STEP(*(x[0] for x in args)))

    split = PartitionSpec("islands")
    step = {
        "vmap": jax.vmap(STEP, spmd_axis_name="islands"),
        "shard_map": jax.shard_map(
            alone, mesh=mesh, in_specs=split, out_specs=split, axis_names={"islands"}
        ),
    }[way]
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, args, "islands")
        compiled = jax.jit(step).lower(*on_mesh).compile()
        result = jax.device_get(compiled(*on_mesh))
    for i in range(2):
        mine = jax.tree.map(lambda x, i=i: x[i], result)
        chex.assert_trees_all_close(mine, expected[i], rtol=1e-5, atol=1e-6)
    assert not any("islands" in each.axes for each in collectives(compiled.as_text(), mesh))


def test_a_device_never_holds_the_logits_of_its_tokens() -> None:
    """On 2 x 4 devices, each with 4,096 tokens and 8,000 of 32,000 rows of the table."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AUTO, AUTO))
    rows = partition_spec(("batch", "sequence"), mesh)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((8, 1024, 32), "bfloat16", rows),
            ((32_000, 32), "float32", partition_spec(("vocab", "embed"), mesh)),
            ((8, 1024), "int32", rows),
        )
    ]
    step = jax.grad(partial(chunked_cross_entropy, tokens_per_chunk=256), (0, 1), has_aux=True)
    with jax.set_mesh(mesh):
        memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4096 * 8000 / 3
