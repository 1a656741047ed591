import jax
import jax.numpy as jnp
import numpy as np
import pytest
from communicating_programs import compile_text
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.hlo.collectives import Collective, collectives, operand_bytes_along
from fedpax.parallel.mesh import make_mesh

BYTES = 4 * 16 * 32 // 8  # of the array below, on one of 8 devices


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh(clients=4, fsdp=2)


def manual_text(mesh: Mesh, local, dtype=jnp.float32) -> str:
    """Compiled text of a function of the local part, [4, 16] on the 4 x 2 mesh, of an array."""
    spec = P(*mesh.axis_names)
    x = jax.ShapeDtypeStruct((16, 32), dtype, sharding=NamedSharding(mesh, spec))
    program = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return compile_text(mesh, program, x)


def groups_along(mesh: Mesh, axes: tuple[str, ...]) -> set[frozenset[int]]:
    """The positions that differ in their coordinates on the axes alone."""
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    last = [mesh.axis_names.index(axis) for axis in axes]
    rest = [i for i in range(positions.ndim) if i not in last]
    size = np.prod([mesh.shape[axis] for axis in axes], dtype=int)
    return {frozenset(group) for group in positions.transpose(rest + last).reshape(-1, size)}


def group_sets(collective: Collective) -> set[frozenset[int]]:
    return {frozenset(group) for group in collective.groups}


KINDS = {
    "all-reduce": lambda x, axis: jax.lax.psum(x, axis),
    "all-gather": lambda x, axis: jax.lax.all_gather(x, axis).sum(0),
    "reduce-scatter": lambda x, axis: jnp.tile(
        jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
        (1, jax.lax.axis_size(axis)),
    ),
    "all-to-all": lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
    "collective-permute": lambda x, axis: jax.lax.ppermute(
        x, axis, [(i, (i + 1) % jax.lax.axis_size(axis)) for i in range(jax.lax.axis_size(axis))]
    ),
}


@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("axis", ["clients", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_along_each_axis(mesh: Mesh, kind: str, axis: str, order: str):
    if order == "shuffled":
        devices = np.random.default_rng(0).permutation(jax.devices()).reshape(4, 2)
        mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    text = manual_text(mesh, lambda x: KINDS[kind](x, axis))
    (communication,) = collectives(text, mesh)
    assert (communication.kind, communication.axes, communication.bytes) == (kind, (axis,), BYTES)
    assert (communication.executions, communication.in_loop, communication.between_slices) == (
        1,
        False,
        False,
    )
    if kind == "collective-permute":
        along = groups_along(mesh, (axis,))
        assert len(communication.groups) == 8
        assert all(any(set(pair) <= group for group in along) for pair in communication.groups)
    else:
        assert group_sets(communication) == groups_along(mesh, (axis,))
    other = "fsdp" if axis == "clients" else "clients"
    assert operand_bytes_along(text, mesh, axis) == BYTES
    assert operand_bytes_along(text, mesh, other) == 0


def test_a_collective_over_both_axes_counts_for_each(mesh: Mesh):
    text = manual_text(mesh, lambda x: jax.lax.psum(x, ("clients", "fsdp")))
    (communication,) = collectives(text, mesh)
    assert communication.axes == ("clients", "fsdp")
    assert group_sets(communication) == {frozenset(range(8))}
    assert operand_bytes_along(text, mesh, "clients") == BYTES
    assert operand_bytes_along(text, mesh, "fsdp") == BYTES


def test_the_bytes_of_a_tree_are_the_sum_over_its_leaves(mesh: Mesh):
    def local(x):
        sums = jax.lax.psum({"all": x, "row": 3 * x[0], "sum": x.sum()}, "clients")
        return sums["all"] + sums["row"] * sums["sum"]

    text = manual_text(mesh, local)
    communication = collectives(text, mesh)
    assert {c.kind for c in communication} == {"all-reduce"}
    assert sum(c.bytes for c in communication) == BYTES + BYTES // 4 + 4
    assert sum(len(c.shapes) for c in communication) == 3


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int8, jnp.int16, jnp.float32, jnp.complex64])
def test_bytes_follow_the_dtype(mesh: Mesh, dtype):
    text = manual_text(mesh, lambda x: KINDS["collective-permute"](x, "clients"), dtype)
    (communication,) = collectives(text, mesh)
    assert communication.bytes == 16 * 32 // 8 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("dtype", "bits"), [("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("f64", 64), ("c128", 128)]
)
def test_bytes_follow_dtypes_that_a_cpu_does_not_send(mesh: Mesh, dtype: str, bits: int):
    text = manual_text(mesh, lambda x: KINDS["collective-permute"](x, "clients"))
    (communication,) = collectives(text.replace("f32[4,16]", f"{dtype}[4,16]"), mesh)
    assert communication.bytes == 4 * 16 * bits // 8


def test_executions_of_nested_loops_multiply(mesh: Mesh):
    def local(x):
        def inner(x, _):
            return jnp.tanh(jax.lax.psum(x, "clients")), None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=3)[0] + jax.lax.psum(2 * x, "fsdp"), None

        x = jax.lax.scan(outer, x, length=7)[0]
        return jax.lax.fori_loop(3, 13, lambda i, x: jax.lax.pmax(jnp.sin(x), "fsdp"), x)

    text = manual_text(mesh, local)
    runs = sorted((c.axes, c.executions, c.in_loop) for c in collectives(text, mesh))
    assert runs == [(("clients",), 21, True), (("fsdp",), 7, True), (("fsdp",), 10, True)]
    assert operand_bytes_along(text, mesh, "clients") == 21 * BYTES
    assert operand_bytes_along(text, mesh, "fsdp") == 17 * BYTES


@pytest.mark.parametrize("where", ["while", "cond"])
def test_an_unknown_number_of_executions_is_none_and_an_error_in_sums(mesh: Mesh, where: str):
    def local(x):
        if where == "while":
            return jax.lax.while_loop(
                lambda x: x.sum() < 10, lambda x: jax.lax.psum(x, "clients"), x
            )
        return jax.lax.cond(
            x[0, 0] > 0,
            lambda x: jax.lax.psum(x, "clients"),
            lambda x: jax.lax.psum(2 * x, "fsdp"),
            x,
        )

    text = manual_text(mesh, local)
    communication = {c.axes: c for c in collectives(text, mesh)}
    assert communication["clients",].executions is None
    assert communication["clients",].in_loop == (where == "while")
    with pytest.raises(ValueError, match=r"with\s+a fixed number of steps"):
        operand_bytes_along(text, mesh, "clients")


def test_a_function_called_twice_counts_twice(mesh: Mesh):
    helper = jax.jit(lambda x: jnp.tanh(jax.lax.psum(x, "clients")))
    text = manual_text(mesh, lambda x: helper(jnp.sin(helper(x))))
    assert sum(c.executions for c in collectives(text, mesh)) == 2
    assert operand_bytes_along(text, mesh, "clients") == 2 * BYTES


def test_a_device_counts_the_bytes_that_it_sends(mesh: Mesh):
    def local(x):
        return jax.lax.ppermute(x, "clients", [(0, 1)]) + jax.lax.ppermute(
            jnp.sin(x), "clients", [(2, 3)]
        )

    text = manual_text(mesh, local)
    assert sorted(c.groups for c in collectives(text, mesh)) == [((0, 2), (1, 3)), ((4, 6), (5, 7))]
    assert operand_bytes_along(text, mesh, "clients") == BYTES


def test_collectives_that_move_nothing_are_not_listed(mesh: Mesh):
    wide = make_mesh(clients=8, fsdp=1)
    assert collectives(manual_text(wide, lambda x: jax.lax.psum(x, "fsdp")), wide) == []
    text = manual_text(
        mesh, lambda x: jax.lax.ppermute(x, "clients", [(i, i) for i in range(4)]) + 1
    )
    assert collectives(text, mesh) == []


def test_collectives_of_automatic_axes_are_found(mesh: Mesh):
    x = jax.ShapeDtypeStruct(
        (16, 32), jnp.float32, sharding=NamedSharding(mesh, P("clients", "fsdp"))
    )
    text = compile_text(mesh, lambda x: x.sum(1), x)
    (communication,) = collectives(text, mesh)
    assert (communication.kind, communication.axes, communication.bytes) == (
        "all-reduce",
        ("fsdp",),
        4 * 4,
    )
    assert group_sets(communication) == groups_along(mesh, ("fsdp",))


@given(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]), st.data())
def test_collectives_of_automatic_axes_are_found_on_any_mesh(
    shape: tuple[int, ...], data: st.DataObject
):
    names = tuple("abc"[: len(shape)])
    devices = np.array(data.draw(st.permutations(jax.devices()))).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))
    cut = tuple(data.draw(st.permutations(names)))
    summed = cut[: data.draw(st.integers(1, len(cut)))]
    kept = cut[len(summed) :]
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(summed, kept)))
    text = compile_text(
        mesh, jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P(kept))), x
    )
    real = tuple(axis for axis in names if axis in summed and mesh.shape[axis] > 1)
    reduced = [c for c in collectives(text, mesh) if c.kind == "all-reduce"]
    assert {c.axes for c in reduced} == ({real} if real else set())
    for result in reduced:
        assert group_sets(result) == groups_along(mesh, real)


def test_groups_can_be_part_of_an_axis():
    mesh = make_mesh(clients=8)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("clients")))
    text = compile_text(mesh, lambda x: x.reshape(4, 2, 16).sum(1), x)
    communication = {c.kind: c for c in collectives(text, mesh)}
    pairs = {frozenset(pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))}
    assert group_sets(communication["all-reduce"]) == pairs
    assert group_sets(communication["all-gather"]) == {
        frozenset({0, 2, 4, 6}),
        frozenset({1, 3, 5, 7}),
    }
    assert communication["all-reduce"].axes == communication["all-gather"].axes == ("clients",)


def test_one_average_after_h_steps_sends_one_hth_of_the_bytes(mesh: Mesh):
    """H steps that each average a gradient send H times what one average of parameters sends."""
    steps = 6

    def gradient(x):
        return jnp.tanh(x) * x

    def every_step(x):
        def step(x, _):
            return x - 0.1 * jax.lax.pmean(gradient(x), "clients"), None

        return jax.lax.scan(step, x, length=steps)[0]

    def at_the_end(x):
        def step(x, _):
            return x - 0.1 * gradient(x), None

        return jax.lax.pmean(jax.lax.scan(step, x, length=steps)[0], "clients")

    often = operand_bytes_along(manual_text(mesh, every_step), mesh, "clients")
    seldom = operand_bytes_along(manual_text(mesh, at_the_end), mesh, "clients")
    assert (often, seldom) == (steps * BYTES, BYTES)


def test_a_collective_prints_its_kind_axes_bytes_and_executions(mesh: Mesh):
    text = manual_text(
        mesh, lambda x: jax.lax.fori_loop(0, 5, lambda i, x: jax.lax.psum(jnp.sin(x), "fsdp"), x)
    )
    (communication,) = collectives(text, mesh)
    assert str(communication) == "all-reduce over fsdp: 256 bytes, 5x, in a loop (f32[4,16])"


def test_an_axis_that_the_mesh_lacks_has_no_bytes(mesh: Mesh):
    text = manual_text(mesh, lambda x: jax.lax.psum(x, "clients"))
    assert operand_bytes_along(text, mesh, "islands") == 0


def test_text_for_another_mesh_raises(mesh: Mesh):
    text = manual_text(mesh, lambda x: jax.lax.psum(x, "clients"))
    small = make_mesh(devices=jax.devices()[:4], clients=2, fsdp=2)
    with pytest.raises(ValueError, match="Pass the mesh that the program was compiled for"):
        collectives(text, small)


def test_text_that_is_not_compiled_raises(mesh: Mesh):
    lowered = jax.jit(jnp.sin).lower(1.0).as_text()
    with pytest.raises(ValueError, match=r"Pass jax\.jit\(f\)\.lower\(\.\.\.\)\.compile\(\)"):
        collectives(lowered, mesh)
