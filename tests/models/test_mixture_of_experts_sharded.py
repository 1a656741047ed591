"""The mixture of experts on meshes equals the mixture on one device."""

import functools
import re
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fedpax
import fedpax.models.mixture_of_experts
from fedpax.hlo.collectives import Collective, collectives
from fedpax.models.mixture_of_experts import MixtureOfExperts
from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.ops.grouped_matmul import grouped_matmul
from fedpax.parallel.axes import partition_spec, shardings

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EMBED_DIM, MLP_DIM, EXPERTS = 8, 12, 4


def mixture(experts: int) -> FunctionalModel:
    return to_functional(
        partial(MixtureOfExperts, EMBED_DIM, MLP_DIM, experts, 2, output_scale=1.0)
    )


MODEL = mixture(EXPERTS)
ROWS = ("batch", "sequence", None)


def draw(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw_params(model: FunctionalModel = MODEL, *front: int) -> Any:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves = enumerate(shapes.items())
    return {name: draw(*front, *leaf.shape, seed=2 + i) for i, (name, leaf) in leaves}


def loss(model: FunctionalModel, params: Any, x: jax.Array) -> jax.Array:
    """Reduce all outputs to one number."""
    y, losses = model.apply(params, x)
    return jnp.mean(y * draw(*x.shape, seed=9)) + losses["load_balance"] + losses["router_z"]


def step(model: FunctionalModel, params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return jax.value_and_grad(partial(loss, model), (0, 1))(params, x)


def close(actual: Any, expected: Any) -> None:
    """Float32 sums in another order: 1e-4 relative, and 1e-5 where terms cancel."""
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


def make_mesh(sizes: dict[str, int], kind: AxisType = AUTO) -> Mesh:
    shape = tuple(sizes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, tuple(sizes), axis_types=(kind,) * len(shape), devices=devices)


@functools.cache
def compile_step(
    mesh: Mesh, shape: tuple[int, int] = (8, 4), experts: int = EXPERTS
) -> tuple[jax.stages.Compiled, Any]:
    """Compile the step with sharded parameters and tokens, and run it."""
    model, x = mixture(experts), draw(*shape, EMBED_DIM)
    params = draw_params(model)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, partition_spec(ROWS, mesh, shape=x.shape))
        placed = jax.device_put((params, x), (shardings(model.logical_axes, params, mesh), rows))
        compiled = jax.jit(partial(step, model)).lower(*placed).compile()
        return compiled, jax.device_get(compiled(*placed))


@pytest.fixture(scope="module")
def one_device() -> tuple[jax.stages.Compiled, Any]:
    return compile_step(make_mesh({"data": 1}))


def most_rows(compiled: jax.stages.Compiled) -> int:
    """Return the largest number of rows of an array [rows, embed_dim]."""
    return max(map(int, re.findall(rf"f32\[(\d+),{EMBED_DIM}\]", compiled.as_text())))


def sent(communication: list[Collective], kind: str, axes: tuple[str, ...]) -> list[str]:
    return sorted(s for c in communication if (c.kind, c.axes) == (kind, axes) for s in c.shapes)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        slow({"data": 2, "expert": 2, "fsdp": 2}, AUTO),
        ({"expert": 2, "tensor": 2}, EXPLICIT),
        slow({"expert": 4}, AUTO),
        slow({"expert": 2}, AUTO),
        slow({"expert": 2, "fsdp": 2}, AUTO),
        slow({"expert": 2, "tensor": 2}, AUTO),
        slow({"data": 2, "expert": 2, "fsdp": 2}, EXPLICIT),
        slow({"fsdp": 2, "sequence": 2, "tensor": 2}, AUTO),
        slow({"data": 2, "sequence": 2}, AUTO),
    ],
    ids=str,
)
def test_equals_one_device(
    one_device: tuple[jax.stages.Compiled, Any], sizes: dict[str, int], kind: AxisType
) -> None:
    parts, result = compile_step(make_mesh(sizes, kind))
    close(result, one_device[1])

    # Experts and tokens are sharded over all their axes; the router is replicated.
    def shards(*axes: str) -> int:
        return int(np.prod([sizes.get(axis, 1) for axis in axes]))

    router, kernels = EXPERTS * EMBED_DIM, 3 * EXPERTS * EMBED_DIM * MLP_DIM
    held = (
        router
        + kernels // shards("expert", "fsdp", "tensor")
        + 8 * 4 * EMBED_DIM // shards("data", "fsdp", "expert", "sequence")
    )
    assert parts.memory_analysis().argument_size_in_bytes == 4 * held
    # A device has rows for all tokens that can choose its experts, and no more.
    tokens = 8 * 4 // shards("data", "fsdp", "sequence")
    rows = tokens * min(2, EXPERTS // shards("expert"))
    assert most_rows(parts) == rows and most_rows(one_device[0]) == 2 * 8 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "experts"),
    [
        ((1, 1), EXPERTS),  # one token, which no axis shards
        slow((2, 4), EXPERTS),  # expert shards the experts, and fsdp alone the batch
        slow((8, 4), 3),  # three experts on every device
    ],
)
def test_sizes_that_the_mesh_does_not_divide_equal_one_device(
    shape: tuple[int, int], experts: int
) -> None:
    _, expected = compile_step(make_mesh({"data": 1}), shape, experts)
    _, result = compile_step(make_mesh({"fsdp": 2, "expert": 2, "tensor": 2}), shape, experts)
    close(result, expected)


@pytest.mark.slow
def test_rows_after_the_last_group_may_be_nan(
    one_device: tuple[jax.stages.Compiled, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grouped matmul leaves arbitrary values there."""

    @jax.custom_vjp
    def spoil(rows: jax.Array, used: jax.Array) -> jax.Array:
        return jnp.where(used, rows, jnp.nan)

    def with_nan(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
        used = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
        return spoil(grouped_matmul(spoil(rows, used), kernels, sizes), used)

    # In the backward pass too.
    spoil.defvjp(lambda rows, used: (spoil(rows, used), used), lambda u, ct: (spoil(ct, u), None))
    monkeypatch.setattr(fedpax.models.mixture_of_experts, "grouped_matmul", with_nan)
    _, result = compile_step.__wrapped__(make_mesh({"expert": 4}))
    close(result, one_device[1])


def test_the_collectives_are_those_of_the_docstring() -> None:
    """Tokens are gathered over expert, kernels over fsdp; gradients are reduce-scattered."""
    mesh = make_mesh({"data": 2, "expert": 2, "fsdp": 2})
    compiled, _ = compile_step(mesh)
    communication = collectives(compiled.as_text(), mesh)
    # A device has 4 of the 32 tokens. It sends them and the gradient of the outputs.
    assert sent(communication, "all-gather", ("expert",)) == [
        "f32[4,2]",
        "f32[4,8]",
        "f32[4,8]",
        "s32[4,2]",
    ]
    assert sent(communication, "reduce-scatter", ("expert",)) == [
        "f32[8,2]",
        "f32[8,8]",
        "f32[8,8]",
    ]
    # Half of the 8 x 12 kernels of its 2 experts.
    assert set(sent(communication, "all-gather", ("fsdp",))) == {"f32[2,4,12]", "f32[2,12,4]"}
    kernels = ["f32[2,12,8]", "f32[2,8,12]", "f32[2,8,12]"]
    assert sent(communication, "reduce-scatter", ("fsdp",)) == kernels
    # The scattered gradients are summed over data.
    kernels = ["f32[2,12,4]", "f32[2,4,12]", "f32[2,4,12]"]
    assert sent(communication, "all-reduce", ("data",)) == kernels
    everywhere = sent(communication, "all-reduce", ("data", "expert", "fsdp"))
    assert set(everywhere) == {"f32[]", "f32[4]", "f32[8,4]"}  # losses, the router
    kinds = {(c.kind, c.axes) for c in communication}
    assert len(kinds) == 6


@pytest.mark.slow
def test_islands_equal_one_device() -> None:
    """Two local steps of each island, with sharded experts and tokens."""
    sizes = {"islands": 2, "expert": 2, "fsdp": 2}
    mesh, x, params = make_mesh(sizes), draw(2, 2, 8, 4, EMBED_DIM), draw_params(MODEL, 2)

    def local(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def descend(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            value, gradient = jax.value_and_grad(partial(loss, MODEL))(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

        return jax.lax.scan(descend, params, x)

    @fedpax.program(islands=2)
    def program(params: Any, x: jax.Array) -> Any:
        return fedpax.federated_map(local, params, x)

    alone = jax.jit(local)
    expected = [
        jax.device_get(alone(*jax.tree.map(lambda leaf, i=i: leaf[i], (params, x)))) for i in (0, 1)
    ]
    inside = shardings(MODEL.logical_axes, draw_params(), mesh)
    parts = {
        name: NamedSharding(mesh, PartitionSpec("islands", *each.spec))
        for name, each in inside.items()
    }
    rows = PartitionSpec("islands", None, ("fsdp", "expert"))
    with jax.set_mesh(mesh):
        placed = jax.device_put((params, x), (parts, NamedSharding(mesh, rows)))
        compiled = jax.jit(program).lower(*placed).compile()
        close(compiled(*placed), jax.tree.map(lambda *leaves: np.stack(leaves), *expected))
    communication = collectives(compiled.as_text(), mesh)
    assert communication and not any("islands" in each.axes for each in communication)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"expert": 2, "fsdp": 2}, marks=pytest.mark.slow), {"expert": 2, "tensor": 2}],
)
def test_int8_experts_are_close_to_exact_ones(sizes: dict[str, int]) -> None:
    pytest.importorskip("qwix")
    params, x = draw_params(), draw(8, 4, EMBED_DIM)
    build = partial(MixtureOfExperts, EMBED_DIM, MLP_DIM, EXPERTS, 2, output_scale=1.0)
    rounded = to_functional(partial(build, quantization="int8"))
    exact, _ = jax.jit(MODEL.apply)(params, x)
    mesh = make_mesh(sizes)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, partition_spec(ROWS, mesh, shape=x.shape))
        placed = jax.device_put((params, x), (shardings(MODEL.logical_axes, params, mesh), rows))
        result, _ = jax.jit(rounded.apply)(*placed)
        gradient = jax.jit(jax.grad(partial(loss, rounded)))(*placed)
    assert 1e-4 < np.linalg.norm(result - exact) / np.linalg.norm(exact) < 0.03
    of_exact = jax.jit(jax.grad(partial(loss, MODEL)))(params, x)
    for name, expected in of_exact.items():
        assert np.linalg.norm(gradient[name] - expected) < 0.1 * np.linalg.norm(expected), name
