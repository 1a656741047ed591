"""Ring attention equals masked attention in values and gradients, with less memory."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fedpax
from fedpax.hlo.collectives import collectives
from fedpax.models.attention.causal import masked_attention
from fedpax.ops.ring_attention import ring_attention
from fedpax.parallel.mesh import make_mesh
from fedpax.parallel.ring import Ring

BATCH, LENGTH, HEADS, GROUPS, HEAD_DIM = 2, 32, 4, 2, 8


def draw(*leading: int, length: int = LENGTH) -> tuple[np.ndarray, ...]:
    """Draw query, key, value, and factors of the outputs."""
    random = np.random.default_rng(0)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return tuple(
        random.normal(size=(*leading, BATCH, length, n, HEAD_DIM)).astype(np.float32) for n in heads
    )


def draw_segments(*leading: int, padding: int = 5) -> np.ndarray:
    """Draw documents of random lengths, and padding at the end of each row."""
    random = np.random.default_rng(1)
    segments = 1 + np.cumsum(random.random((*leading, BATCH, LENGTH)) < 0.15, axis=-1)
    segments[..., LENGTH - padding :] = 0
    return segments.astype(np.int32)


def every_pair(sliding_window: int | None, segments: Any) -> Callable:
    """Make the reference: attention to all keys at once, with a mask made here."""
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    near = (distance >= 0) & (distance < (sliding_window or LENGTH))

    def loss(query: Any, key: Any, value: Any, scale: Any) -> Any:
        mask = near[None]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        y = masked_attention(query, key, value, mask)
        return jnp.sum(scale * y), y

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def around(sliding_window: int | None, segments: Any, **options: Any) -> Callable:
    def loss(query: Any, key: Any, value: Any, scale: Any) -> Any:
        y = ring_attention(query, key, value, segments, sliding_window=sliding_window, **options)
        return jnp.sum(scale * y), y

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def close(actual: Any, expected: Any) -> None:
    """Float32 sums in another order: 1e-4 relative, and 1e-5 where terms cancel."""
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def mesh_of(**sizes: int) -> Mesh:
    return make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)


def case(sizes: dict[str, int], *, slow: bool = True, packed: bool = True, **options: Any) -> Any:
    name = "-".join(f"{key}{value}" for key, value in (sizes | options).items())
    marks = [pytest.mark.slow] * slow
    return pytest.param(sizes, packed, {"sliding_window": None} | options, id=name, marks=marks)


@pytest.mark.parametrize(
    ("sizes", "packed", "options"),
    [
        case({"data": 1}, sliding_window=7, block=8),
        case({"sequence": 4}, slow=False),
        case({"sequence": 2, "fsdp": 2, "tensor": 2}, block=4, balanced=True, slow=False),
        case({"sequence": 8}, sliding_window=9, block=3, packed=False),
        case({"data": 1}, block=5, packed=False),
        case({"sequence": 2}),
        case({"sequence": 2}, sliding_window=1),
        case({"sequence": 4}, sliding_window=20, block=2),
        case({"sequence": 8}),
        case({"sequence": 8}, sliding_window=32),
        case({"sequence": 4}, balanced=True, packed=False),
        case({"sequence": 8}, balanced=True),
        case({"data": 2, "sequence": 4}, sliding_window=5),
    ],
)
def test_equals_attention_to_all_keys(sizes: dict[str, int], packed: bool, options: Any) -> None:
    arguments, segments = draw(), draw_segments() if packed else None
    expected = jax.jit(every_pair(options["sliding_window"], segments))(*arguments)
    mesh = mesh_of(**sizes)
    spec = [axis if axis in sizes else None for axis in ("fsdp", "sequence", "tensor")]
    with jax.set_mesh(mesh):
        parts = NamedSharding(mesh, PartitionSpec(*spec))
        compiled = (
            jax.jit(around(segments=segments, **options), in_shardings=(parts,) * 4)
            .lower(*arguments)
            .compile()
        )
        close(jax.device_get(compiled(*jax.device_put(arguments, parts))), jax.device_get(expected))
    communication = collectives(compiled.as_text(), mesh)
    # Keys, values and their gradients go around the ring; the only other transfer is the loss.
    assert {c.axes for c in communication if c.kind != "all-reduce"} <= {("sequence",)}
    assert all(c.kind in ("collective-permute", "all-reduce") for c in communication)
    assert all(c.bytes == 4 for c in communication if c.kind == "all-reduce")


def test_keys_go_as_far_as_a_query_can_attend() -> None:
    arguments, mesh = draw(), mesh_of(sequence=8)

    def sent(sliding_window: int | None) -> int:
        with jax.set_mesh(mesh):
            parts = NamedSharding(mesh, PartitionSpec(None, "sequence"))
            gradient = jax.jit(around(sliding_window, None), in_shardings=parts)
            text = gradient.lower(*arguments).compile().as_text()
        moved = [c for c in collectives(text, mesh) if c.kind == "collective-permute"]
        return sum(c.bytes * (c.executions or 0) for c in moved)

    # Forward: keys and values. Backward: both again, and their gradients, which then return to
    # their owners. The compiler may reuse the first shards in the backward pass.
    part = arguments[1].nbytes // 8
    assert 2 * (7 + 6 + 7 + 1) * part <= sent(None) <= 2 * (7 + 7 + 7 + 1) * part
    assert sent(5) <= 2 * (1 + 1 + 1 + 1) * part  # the four tokens of the device before


@pytest.mark.parametrize(("window", "devices"), [(1, 1), (2, 2), (5, 2), (6, 3), (29, 8), (32, 8)])
def test_a_sliding_window_shortens_the_ring(window: int, devices: int) -> None:
    """The first of a device's four tokens attends furthest back."""
    assert Ring("sequence", 8, 4, window, balanced=False).num_steps == devices


@pytest.mark.parametrize(
    "sizes",
    [
        {"islands": 2, "sequence": 2, "fsdp": 2},
        pytest.param({"sequence": 4}, marks=pytest.mark.slow),
        pytest.param({"islands": 4, "sequence": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_islands_have_rings_of_their_own(sizes: dict[str, int]) -> None:
    """Four islands: two on each device, all on one, or one on each."""
    arguments, segments = draw(4), draw_segments(4)

    def local(segments: Any, *arguments: Any) -> Any:
        return around(9, segments)(*arguments)

    @fedpax.program(islands=4)
    def islands(*arguments: Any) -> Any:
        return fedpax.federated_map(local, *arguments)

    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        compiled = jax.jit(islands).lower(segments, *arguments).compile()
        result = jax.device_get(compiled(segments, *arguments))
    for i in range(4):
        expected = jax.jit(every_pair(9, segments[i]))(*(a[i] for a in arguments))
        close(jax.tree.map(lambda leaf, i=i: leaf[i], result), jax.device_get(expected))
    assert all("islands" not in c.axes for c in collectives(compiled.as_text(), mesh))


@pytest.mark.slow
def test_a_ring_inside_a_pipeline_stage() -> None:
    """The ring's axis becomes manual beside an axis that is manual already."""
    arguments, segments, mesh = draw(), draw_segments(), mesh_of(stage=2, sequence=4)
    expected = jax.jit(every_pair(None, segments))(*arguments)

    def rows(segments: Any, *arguments: Any) -> Any:
        (loss, y), gradient = around(None, segments)(*arguments)
        return (jax.lax.psum(loss, "stage"), y), gradient

    cut = PartitionSpec("stage")
    with jax.set_mesh(mesh):
        per_stage = jax.shard_map(
            rows,
            in_specs=cut,
            out_specs=((PartitionSpec(), cut), (cut, cut, cut)),
            axis_names={"stage"},
        )
        close(jax.device_get(jax.jit(per_stage)(segments, *arguments)), jax.device_get(expected))


def test_balanced_devices_have_the_same_work() -> None:
    """Each device computes half of the scores of the last device of a contiguous split."""
    ring = Ring("sequence", num_devices=4, tokens_per_device=8, window=32, balanced=True)
    with jax.set_mesh(mesh_of(sequence=4)):

        def places(own: jax.Array) -> tuple[jax.Array, jax.Array]:
            (back,) = ring.unbalance([ring.balance(own)])
            return ring.balance(own), back

        given = jnp.arange(32)[None]
        result, back = jax.jit(ring.run_on_devices(places, num_outputs=2))(given)
        known = ring.run_on_devices(lambda own: (ring.positions(0) + 0 * own,), num_outputs=1)
        np.testing.assert_array_equal(jax.jit(known)(given)[0], result)
    np.testing.assert_array_equal(back, given)
    mine = np.asarray(result).reshape(4, 8)
    pairs = [np.sum(own[:, None] >= np.arange(32)) for own in mine]
    assert len(set(pairs)) == 1 and sum(pairs) == 32 * 33 // 2


def test_padding_and_large_scores_stay_finite() -> None:
    query, key, value, scale = draw()
    segments = np.zeros((BATCH, LENGTH), np.int32)
    segments[0, :3] = 1
    with jax.set_mesh(mesh_of(sequence=2)):
        result = jax.jit(around(2, segments))(1e3 * query, 1e3 * key, value, scale)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result))


@pytest.mark.slow
def test_bfloat16_sums_in_float32() -> None:
    arguments = [jnp.asarray(a, jnp.bfloat16) for a in draw()]
    exact = jax.jit(every_pair(None, None))(*(a.astype(jnp.float32) for a in arguments))
    with jax.set_mesh(mesh_of(sequence=4)):
        result = jax.jit(around(None, None))(*arguments)
    assert {leaf.dtype for leaf in jax.tree.leaves(result[1])} == {jnp.dtype(jnp.bfloat16)}
    # bfloat16 has 8 bits of mantissa; weights and outputs are rounded.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(np.float32), b, rtol=0.03, atol=0.05),
        result[1],
        exact[1],
    )


def test_memory_does_not_grow_with_the_square_of_the_sequence() -> None:
    """A longer sequence on more devices takes the same memory per device, gradient included."""

    def temporaries(devices: int, length: int) -> int:
        mesh = mesh_of(sequence=devices)
        with jax.set_mesh(mesh):
            parts = NamedSharding(mesh, PartitionSpec(None, "sequence"))
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in draw(length=length)]
            gradient = jax.jit(around(None, None, block=32), in_shardings=parts)
            return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    tokens = 128
    small, large = temporaries(2, 2 * tokens), temporaries(8, 8 * tokens)
    assert large < 1.05 * small
    # Less than three of the 64 blocks of scores between the tokens of two devices.
    assert large < BATCH * HEADS * tokens**2 * 4 * 3


def test_unsupported_arguments_raise() -> None:
    query, key, value, _ = draw()
    with jax.set_mesh(mesh_of(sequence=2)):
        with pytest.raises(ValueError, match="Pad it to 32"):
            ring_attention(query[:, :31], key[:, :31], value[:, :31])
        with pytest.raises(ValueError, match="do not divide the 3 heads of query"):
            ring_attention(query[:, :, :3], key, value)
        with pytest.raises(ValueError, match="a window of all 32 tokens"):
            ring_attention(query, key, value, sliding_window=3, balanced=True)
    explicit = make_mesh(devices=jax.devices()[:2], axis_types=AxisType.Explicit, sequence=2)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match=r"AxisType\.Auto"):
        ring_attention(query, key, value)
