"""Pipelines equal a scan over the layers, and move features alone."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fedpax
from fedpax.hlo.collectives import collectives
from fedpax.parallel.axes import partition_spec
from fedpax.parallel.mesh import make_mesh
from fedpax.parallel.pipeline import Schedule, run_pipeline

LAYERS, WIDTH, INNER, BATCH = 8, 6, 10, 16
REMAT = functools.partial(jax.checkpoint, prevent_cse=False)


pytestmark = pytest.mark.usefixtures("quick_compilation")


def step(x: jax.Array, layer: Any, along: Any) -> tuple[jax.Array, Any]:
    """Apply a layer with side inputs per example and for all examples."""
    inside = jnp.tanh(x @ layer["up"]) * along["example"][:, None] + along["all"]
    return x + inside @ layer["down"], {"mean_square": jnp.mean(inside**2)}


def draw(*leading: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * random.normal(size=(*leading, *shape)).astype(np.float32)

    stacked = {
        "up": normal(LAYERS, WIDTH, INNER, scale=0.4),
        "down": normal(LAYERS, INNER, WIDTH, scale=0.3),
    }
    return stacked, normal(BATCH, WIDTH), {"example": normal(BATCH), "all": normal(1, INNER)}


def value_and_gradient(layer_step: Callable = step, **options: Any) -> Callable:
    """Return the loss, outputs, and gradients by parameters, features and side inputs."""

    def loss(stacked: Any, x: jax.Array, along: Any) -> tuple[jax.Array, Any]:
        repeats = options.get("num_repeats", 1)
        if repeats > 1:
            stacked = jax.tree.map(lambda p: p.reshape(repeats, -1, *p.shape[1:]), stacked)
        y, auxiliary = run_pipeline(layer_step, stacked, x, along, **options)
        return jnp.sum(jnp.sin(y)) + auxiliary["mean_square"], (y, auxiliary)

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def close(actual: Any, expected: Any) -> None:
    """Compare float32 sums in different orders: 1e-4 relative, 1e-5 where terms cancel."""
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def one_device() -> Any:
    """Return the arguments of four islands, and the results of a scan over layers for each."""
    arguments = draw(4)
    plain = jax.jit(value_and_gradient())
    results = [jax.device_get(plain(*take(arguments, i))) for i in range(4)]
    return arguments, jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


def mesh_of(**sizes: int) -> Mesh:
    return make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"stage": 4}, {"num_microbatches": 8}),
        ({"stage": 2, "fsdp": 2}, {"num_microbatches": 4, "num_repeats": 2, "remat": REMAT}),
        pytest.param({"stage": 8}, {"num_microbatches": 8}, marks=pytest.mark.slow),
        pytest.param(
            {"stage": 2},
            {"num_microbatches": 2, "num_repeats": 4, "unroll": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 2},
            {"num_microbatches": 16, "num_repeats": 2, "remat": REMAT},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 2, "stage": 2, "tensor": 2},
            {"num_microbatches": 4, "remat": REMAT},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda settings: str(settings).partition("functools")[0],
)
def test_a_pipeline_equals_the_scan_on_one_device(
    one_device: Any, sizes: dict[str, int], options: Any
) -> None:
    arguments, expected = one_device
    with jax.set_mesh(mesh_of(**sizes)):
        result = jax.jit(value_and_gradient(**options))(*take(arguments, 0))
    # The mean over the batch of each layer is the mean of the microbatches' means.
    close(jax.device_get(result), take(expected, 0))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"islands": 2, "stage": 2, "fsdp": 2}, {"num_microbatches": 4, "num_repeats": 2}),
        pytest.param({"stage": 4}, {"num_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"islands": 4, "stage": 2}, {"num_microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_island_can_have_a_pipeline(
    one_device: Any, sizes: dict[str, int], options: Any
) -> None:
    """Four islands: two on each device, all on one device, or one on each."""
    arguments, expected = one_device

    @fedpax.program(islands=4)
    def islands(*arguments: Any) -> Any:
        return fedpax.federated_map(value_and_gradient(**options), *arguments)

    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        compiled = jax.jit(islands).lower(*arguments).compile()
        close(jax.device_get(compiled(*arguments)), expected)
    assert all("islands" not in each.axes for each in collectives(compiled.as_text(), mesh))


@pytest.mark.slow
def test_the_gradient_of_a_program_goes_through_the_pipelines(one_device: Any) -> None:
    arguments, expected = one_device

    @fedpax.program(islands=4)
    def total(*arguments: Any) -> Any:
        def loss(stacked: Any, x: Any, along: Any) -> Any:
            y, auxiliary = run_pipeline(step, stacked, x, along, num_microbatches=2)
            return jnp.sum(jnp.sin(y)) + auxiliary["mean_square"]

        return fedpax.federated_sum(fedpax.federated_map(loss, *arguments))

    with jax.set_mesh(mesh_of(islands=4, stage=2)):
        gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arguments)
    close(jax.device_get(gradient), expected[1])


@pytest.mark.parametrize("repeats", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_only_features_move_between_stages(repeats: int) -> None:
    stacked, x, along = draw()
    mesh, microbatches = mesh_of(stage=2, fsdp=2), 4
    if repeats > 1:
        stacked = jax.tree.map(lambda p: p.reshape(repeats, -1, *p.shape[1:]), stacked)
    names = ("repeats", "layers") if repeats > 1 else ("layers",)
    with jax.set_mesh(mesh):
        layers = NamedSharding(mesh, partition_spec(names, mesh))
        batch = NamedSharding(mesh, partition_spec(("batch",), mesh))
        assert tuple(batch.spec) == (("fsdp", "stage"),)

        def loss(stacked: Any, x: jax.Array, along: Any) -> jax.Array:
            y, _ = run_pipeline(
                step,
                stacked,
                x,
                along,
                num_microbatches=microbatches,
                num_repeats=repeats,
                remat=REMAT,
            )
            return jnp.sum(jnp.sin(jax.lax.with_sharding_constraint(y, batch)))

        gradient = jax.jit(
            jax.grad(loss),
            in_shardings=(layers, batch, {"example": batch, "all": None}),
            out_shardings=layers,
        )
        compiled = gradient.lower(stacked, x, along).compile()
    communication = [c for c in collectives(compiled.as_text(), mesh) if "stage" in c.axes]
    moved = [c for c in communication if c.kind == "collective-permute"]
    ticks = Schedule(2, microbatches, repeats).num_ticks
    # A tick sends a microbatch and rotates the buffers, in the forward and the backward pass.
    assert sorted(c.executions or 0 for c in moved) == [1, 1, ticks, ticks, ticks, ticks]
    microbatch = BATCH // microbatches * WIDTH * 4
    assert {c.bytes for c in moved} == {microbatch // 2}  # fsdp shards it in two
    # Side inputs go to all stages, one number per example; and the loss is summed.
    assert all(c.bytes <= BATCH * 4 for c in communication if c not in moved)
    memory = compiled.memory_analysis()
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(stacked))
    assert memory.argument_size_in_bytes <= parameters // 2 + x.nbytes // 4 + BATCH * 4 + INNER * 4


@pytest.mark.parametrize("repeats", [1, 2])
def test_no_copy_of_the_parameters_is_stored_per_tick(repeats: int) -> None:
    """JAX stacks the residuals of a loop over its iterations."""
    stacked, x, along = draw()
    with jax.set_mesh(mesh_of(stage=2)):
        jaxpr = jax.make_jaxpr(value_and_gradient(num_microbatches=8, num_repeats=repeats))(
            stacked, x, along
        )
    ticks = Schedule(2, 8, repeats).num_ticks
    shapes = [v.aval.shape for eqn in every_equation(jaxpr.jaxpr) for v in eqn.outvars]
    stacks = {shape for shape in shapes if shape[:1] == (ticks,)}
    assert any(shape[-2:] == (BATCH // 8, WIDTH) for shape in stacks)
    assert not any({WIDTH, INNER} <= set(shape) for shape in stacks)


def every_equation(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from every_equation(inner)


def test_without_stages_it_is_the_scan_over_layers() -> None:
    stacked, x, along = draw()

    def by_hand(stacked: Any, x: jax.Array, along: Any) -> Any:
        y, each = jax.lax.scan(lambda x, layer: step(x, layer, along), x, stacked, unroll=2)
        return y, jax.tree.map(lambda scalars: scalars.sum(0), each)

    run = functools.partial(run_pipeline, step, num_microbatches=4, unroll=2)
    expected = str(jax.make_jaxpr(by_hand)(stacked, x, along))
    assert str(jax.make_jaxpr(run)(stacked, x, along)) == expected
    with jax.set_mesh(mesh_of(stage=1, fsdp=2)):
        assert "shard_map" not in str(jax.make_jaxpr(run)(stacked, x, along))
    in_runs = jax.tree.map(lambda p: p.reshape(4, 2, *p.shape[1:]), stacked)
    close(run(in_runs, x, along, num_repeats=4), by_hand(stacked, x, along))


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))
def test_each_microbatch_passes_each_run_of_layers_once_and_in_order(
    stages: int, groups: int, repeats: int
) -> None:
    """A run of layers follows one tick after the previous run."""
    schedule = Schedule(stages, groups * stages, repeats)
    when: dict[int, list[tuple[int, int]]] = {m: [] for m in range(schedule.num_microbatches)}
    waits = 0
    for tick in range(schedule.num_ticks):
        for stage in range(stages):
            useful, repeat, microbatch = schedule.task(tick, stage)
            if useful:
                when[microbatch].append((tick, repeat * stages + stage))
            waits += not useful
    for done in when.values():
        ticks, runs = zip(*done, strict=True)
        assert runs == tuple(range(stages * repeats))
        assert ticks == tuple(range(ticks[0], ticks[0] + len(runs)))
    assert waits == (stages - 1) * stages  # while the pipeline fills and drains


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_number_of_ticks_is_that_of_the_tasks_and_the_bubble(repeats: int) -> None:
    stacked, x, along = draw()
    with jax.set_mesh(mesh_of(stage=4)):
        jaxpr = jax.make_jaxpr(value_and_gradient(num_microbatches=8, num_repeats=repeats))(
            stacked, x, along
        )
    loops = {e.params["length"] for e in every_equation(jaxpr.jaxpr) if e.primitive.name == "scan"}
    assert loops == {8 * repeats + 4 - 1, LAYERS // (4 * repeats)}


@pytest.mark.parametrize(
    ("options", "layers", "words"),
    [
        ({"num_microbatches": 3}, 8, "use a multiple of 2"),
        ({}, 8, "use a multiple of 2"),
        ({"num_microbatches": 0}, 8, "expected at least 1"),
        ({"num_microbatches": 6}, 8, "does not divide the batch of 16"),
        (
            {"num_microbatches": 2, "num_repeats": 2},
            6,
            "cannot be divided into 2 stages of 2 blocks",
        ),
        ({"num_microbatches": 2}, 7, "use a multiple of 2 layers"),
    ],
)
def test_numbers_that_do_not_divide_raise(options: Any, layers: int, words: str) -> None:
    stacked, x, along = draw()
    stacked = jax.tree.map(lambda p: p[:layers], stacked)
    if options.get("num_repeats", 1) > 1:
        stacked = jax.tree.map(lambda p: p.reshape(2, -1, *p.shape[1:]), stacked)
    with jax.set_mesh(mesh_of(stage=2)), pytest.raises(ValueError, match=words):
        run_pipeline(step, stacked, x, along, **options)


def test_arrays_of_a_wrong_shape_are_named_in_the_error() -> None:
    stacked, x, along = draw()
    with pytest.raises(
        ValueError, match=r"stacked_params\['down'\] has shape .* expected \[2, layers"
    ):
        run_pipeline(step, stacked, x, along, num_repeats=2)
    with pytest.raises(ValueError, match="arrays with the same number of layers"):
        run_pipeline(step, stacked | {"up": stacked["up"][:3]}, x, along)
    with pytest.raises(ValueError, match=r"side_inputs\['example'\] has shape \(3,\)"):
        run_pipeline(step, stacked, x, along | {"example": along["example"][:3]})


def test_an_explicit_stage_axis_raises() -> None:
    stacked, x, along = draw()
    mesh = make_mesh(devices=jax.devices()[:2], axis_types=AxisType.Explicit, stage=2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"AxisType\.Auto"):
        run_pipeline(step, stacked, x, along, num_microbatches=2)


@pytest.mark.slow
def test_a_pipeline_runs_inside_a_shard_map_over_islands(one_device: Any) -> None:
    arguments, expected = one_device

    def alone(*arguments: Any) -> Any:
        result = value_and_gradient(num_microbatches=4)(*take(arguments, 0))
        return jax.tree.map(lambda leaf: leaf[None], result)

    def islands(check_vma: bool) -> Any:
        part = PartitionSpec("islands")
        mapped = jax.shard_map(
            alone, in_specs=part, out_specs=part, axis_names={"islands"}, check_vma=check_vma
        )
        return jax.device_get(jax.jit(mapped)(*arguments))

    with jax.set_mesh(mesh_of(islands=4, stage=2)):
        close(islands(check_vma=False), expected)
        with pytest.raises(ValueError, match="pass check_vma=False to it"):
            islands(check_vma=True)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_layer_can_contain_a_shard_map(one_device: Any, repeats: int) -> None:
    """Mixtures of experts and kernels do; the pipeline differentiates it."""
    arguments, expected = one_device

    def manual(x: jax.Array, layer: Any, along: Any) -> tuple[jax.Array, Any]:
        rows, whole = PartitionSpec("fsdp"), PartitionSpec()

        def local(x: jax.Array, layer: Any, example: jax.Array, same: jax.Array) -> Any:
            y, auxiliary = step(x, layer, {"example": example, "all": same})
            return y, jax.lax.pmean(auxiliary, "fsdp")

        return jax.shard_map(
            local,
            in_specs=(rows, whole, rows, whole),
            out_specs=(rows, whole),
            axis_names={"fsdp"},
        )(x, layer, along["example"], along["all"])

    with jax.set_mesh(mesh_of(stage=2, fsdp=2)):
        run = value_and_gradient(layer_step=manual, num_microbatches=4, num_repeats=repeats)
        close(jax.device_get(jax.jit(run)(*take(arguments, 0))), take(expected, 0))


@pytest.mark.slow
def test_bfloat16_features_stay_bfloat16() -> None:
    stacked, x, along = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), draw())
    run = functools.partial(run_pipeline, step, num_microbatches=2)
    expected, _ = jax.jit(functools.partial(run_pipeline, step))(stacked, x, along)
    with jax.set_mesh(mesh_of(stage=2)):
        y, _ = jax.jit(run)(stacked, x, along)
        slope = jax.jit(jax.grad(lambda *a: run(*a)[0].astype(jnp.float32).sum()))(
            stacked, x, along
        )
    assert y.dtype == jnp.bfloat16 and slope["up"].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        y.astype(np.float32), expected.astype(np.float32), rtol=0.05, atol=0.1
    )


def test_repeated_layers_are_sharded_over_stages() -> None:
    with jax.set_mesh(mesh_of(stage=2, fsdp=2, tensor=2)):
        spec = partition_spec(("repeats", "layers", "embed", "mlp"))
    assert spec == PartitionSpec(None, "stage", "fsdp", "tensor")
