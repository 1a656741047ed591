import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.parallel.axes import constrain
from fedpax.parallel.mesh import MeshConfig, make_mesh


def test_axes_have_the_order_of_the_arguments():
    mesh = make_mesh(islands=4, fsdp=2)
    assert mesh.axis_names == ("islands", "fsdp")
    assert dict(mesh.shape) == {"islands": 4, "fsdp": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.tolist() == np.reshape(jax.devices(), (4, 2)).tolist()
    assert make_mesh(fsdp=2, islands=4).axis_names == ("fsdp", "islands")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"islands": 4, "fsdp": -1}, (4, 2)),
        ({"islands": -1, "fsdp": 2}, (4, 2)),
        ({"fsdp": -1}, (8,)),
        ({"islands": 8, "fsdp": -1}, (8, 1)),
        ({"islands": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
        ({"islands": np.int64(2), "fsdp": np.int32(4)}, (2, 4)),
    ],
)
def test_minus_one_is_all_remaining_devices(sizes: dict[str, int], shape: tuple[int, ...]):
    assert make_mesh(**sizes).devices.shape == shape


@given(st.permutations(["islands", "clients", "data", "fsdp", "tensor"]), st.data())
def test_every_device_is_used_once(names: list[str], data: st.DataObject):
    sizes, left = {}, 8
    for name in names[:-1]:
        sizes[name] = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if left % n == 0]))
        left //= sizes[name]
    mesh = make_mesh(**sizes, **{names[-1]: -1})
    assert dict(mesh.shape) == sizes | {names[-1]: left}
    assert sorted(device.id for device in mesh.devices.flat) == sorted(
        device.id for device in jax.devices()
    )


def test_a_mesh_can_use_given_devices():
    some = jax.devices()[2:6]
    assert make_mesh(devices=some, islands=2, fsdp=-1).devices.tolist() == [some[:2], some[2:]]


@pytest.mark.parametrize("size", [0, -2])
def test_a_configured_size_is_checked(size: int):
    with pytest.raises(
        ValueError, match=rf"mesh.fsdp={size} is not a size.* or -1 for all remaining"
    ):
        MeshConfig(fsdp=size)


def test_an_axis_type_by_name_raises():
    with pytest.raises(TypeError, match=r"axis_types='explicit'.*AxisType\.Explicit"):
        make_mesh(clients=-1, axis_types="explicit")  # type: ignore[arg-type]


def test_axis_types_can_be_one_for_all_or_by_name():
    explicit = make_mesh(axis_types=AxisType.Explicit, clients=4, fsdp=2)
    assert explicit.axis_types == (AxisType.Explicit, AxisType.Explicit)
    mixed = make_mesh(axis_types={"fsdp": AxisType.Explicit}, clients=4, fsdp=2)
    assert mixed.axis_types == (AxisType.Auto, AxisType.Explicit)


def test_a_program_runs_on_the_mesh():
    mesh = make_mesh(islands=4, fsdp=-1)
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("islands", "fsdp")))
        total = jax.jit(jnp.sum)(placed)
    assert placed.sharding.shard_shape(x.shape) == (2, 3)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({}, r"at least one axis and its size, such as make_mesh\(islands=4, fsdp=-1\)"),
        ({"islands": 0}, "islands=0 is not a size.*at least 1, or -1"),
        ({"islands": -3, "fsdp": 2}, "islands=-3 is not a size.*at least 1, or -1"),
        (
            {"islands": -1, "fsdp": -1},
            "islands and fsdp are -1. Set a size for all of them except one",
        ),
        ({"islands": 3, "fsdp": -1}, r"islands can be 1, 2, 4 or 8 \(4 gives fsdp=2\)"),
        ({"islands": 4, "fsdp": 4}, "needs 16 devices.*islands=4, fsdp=-1 gives fsdp=2 on 8"),
        ({"islands": 16}, r'16 devices, but there are 8.*jax_num_cpu_devices", 16'),
        ({"islands": 3, "fsdp": 3}, "product of the sizes must be 8"),
        ({"islands": 2}, r"pass devices=jax\.devices\(\)\[:2\]"),
        ({"islands": 3, "fsdp": 5, "tensor": -1}, "product of islands and fsdp can be 1, 2, 4"),
        ({"devices": [], "islands": 1}, "Leave it out"),
        (
            {"axis_types": {"tensor": AxisType.Explicit}, "clients": 8},
            "axis_types names tensor.*Its axes: clients",
        ),
        ({"between_slices": "data", "clients": 8}, "between_slices names data.*axes: clients"),
    ],
)
def test_sizes_that_do_not_fit_raise_with_a_remedy(sizes: dict, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        make_mesh(**sizes)


@pytest.mark.parametrize("size", [2.0, "2", None, True, (2, 2)])
def test_sizes_that_are_not_integers_raise(size: object):
    with pytest.raises(TypeError, match=r"is not an integer.*at least 1, or -1"):
        make_mesh(islands=size, fsdp=2)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_suggested_sizes_fit(sizes: list[int]):
    axes = dict(zip(("islands", "fsdp", "tensor"), sizes, strict=False))
    try:
        assert make_mesh(**axes).size == 8
    except ValueError as error:
        for call, name, size in re.findall(
            r"((?:\w+=-?\d+(?:, )?)+) gives (\w+)=(\d+)", str(error)
        ):
            suggested = {axis: int(n) for axis, n in re.findall(r"(\w+)=(-?\d+)", call)}
            assert make_mesh(**suggested).shape[name] == int(size)


ONES = dict.fromkeys(
    ("islands", "clients", "data", "fsdp", "tensor", "sequence", "expert", "stage"), 1
)


def test_a_configured_mesh_has_every_axis():
    config = MeshConfig(islands=2, tensor=2, data=2)
    assert config.size == 8
    assert dict(config.make().shape) == ONES | {"islands": 2, "data": 2, "tensor": 2}
    assert tuple(config.make().shape) == tuple(ONES)
    assert set(config.make().axis_types) == {AxisType.Auto}
    assert dict(MeshConfig(fsdp=-1).make().shape) == ONES | {"fsdp": 8}
    assert MeshConfig(fsdp=-1).size == 8
    assert dict(MeshConfig(clients=2).make(jax.devices()[:2]).shape) == ONES | {"clients": 2}


def test_a_configured_mesh_has_the_devices_in_the_order_of_make_mesh():
    larger = make_mesh(islands=2, fsdp=4)
    assert MeshConfig(islands=2, fsdp=4).make().devices.flatten().tolist() == (
        larger.devices.flatten().tolist()
    )


def test_a_configured_mesh_of_one_device():
    mesh = MeshConfig().make()
    assert dict(mesh.shape) == ONES
    assert mesh.devices.flatten().tolist() == jax.devices()[:1]


@pytest.mark.parametrize("axis", ONES)
def test_a_spec_can_name_an_axis_of_size_one(axis: str):
    sharding = NamedSharding(MeshConfig().make(), P(axis))
    x = jax.device_put(np.arange(3.0, dtype=np.float32), sharding)
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x, out_shardings=sharding)(x), [0, 2, 4])


def compiled_text(mesh: Mesh) -> str:
    """Compile a round of two islands whose model is sharded over fsdp.

    The text is without source lines. JAX 0.11 prints the mesh beside shardings and replica groups;
    the text is without the axes of size one in it.
    """

    @fedpax.program(islands=2)
    def mean_gradient(params, batches):
        def gradient(params, batch):
            def loss(params):
                features = constrain(jnp.tanh(batch @ params), ("batch", "mlp"))
                return jnp.mean(features**2)

            return jax.grad(loss)(params)

        params = fedpax.federated_broadcast(params)
        return fedpax.federated_mean(fedpax.federated_map(gradient, params, batches))

    spec = P("islands" if "islands" in mesh.shape else None, "fsdp")
    params = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    batches = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        text = jax.jit(mean_gradient).lower(params, batches).compile().as_text()
    return "\n".join(
        re.sub(r", metadata=\{[^}]*\}|,'\w+'=1\b", "", line)
        for line in text[text.index("\n%") :].splitlines()
    )


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"islands": 2, "fsdp": 2}], ids=str)
def test_axes_of_size_one_do_not_change_the_compiled_program(sizes: dict[str, int]):
    devices = jax.devices()[:4]
    expected = compiled_text(make_mesh(devices=devices, **sizes))
    assert compiled_text(MeshConfig(**sizes).make(devices)) == expected


def test_a_configured_mesh_that_does_not_fit_raises():
    with pytest.raises(ValueError, match="islands=2, fsdp=-1 gives fsdp=4 on 8 devices"):
        MeshConfig(islands=2, fsdp=2).make()


def slices_along(mesh: Mesh, axis: str) -> list[set[int]]:
    """Return the slices at each position along an axis."""
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    return [{device.slice_index for device in row.flat} for row in rows]


def check_complete(mesh: Mesh, devices: Sequence[jax.Device]) -> None:
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in devices)


Devices = Callable[..., list[jax.Device]]


@pytest.mark.parametrize("name", ["v4:2x2x2", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize("sizes", [(2, -1), (-1, 2), (2, 2, -1)], ids=str)
def test_a_tpu_slice_is_used_completely(tpu_devices: Devices, name: str, sizes: tuple[int, ...]):
    devices = tpu_devices(name)
    axes = dict(zip(("islands", "fsdp", "tensor"), sizes, strict=False))
    check_complete(make_mesh(devices=devices, **axes), devices)


@pytest.mark.parametrize("taken", [5, 10, 12])
def test_a_mesh_can_use_some_chips_of_a_slice(tpu_devices: Devices, taken: int):
    devices = tpu_devices("v5e:4x4")[:taken]
    mesh = make_mesh(devices=devices, clients=-1)
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in devices)


def test_an_axis_follows_the_links_of_a_tpu_slice(tpu_devices: Devices):
    """Neighbors along an axis that fills a row of a TPU are one hop apart."""
    mesh = make_mesh(devices=tpu_devices("v5e:4x4"), islands=4, fsdp=4)
    for row in mesh.devices:
        assert len({device.coords[1] for device in row}) == 1


@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x4"])
@pytest.mark.parametrize("slices", [2, 4])
def test_islands_are_slices(tpu_devices: Devices, name: str, slices: int):
    devices = tpu_devices(name, slices)
    for axes in ({"islands": slices, "fsdp": -1}, {"fsdp": -1, "tensor": 2, "islands": slices}):
        mesh = make_mesh(devices=devices, **axes)
        check_complete(mesh, devices)
        assert slices_along(mesh, "islands") == [{index} for index in range(slices)]


def test_a_slice_can_have_several_islands(tpu_devices: Devices):
    mesh = make_mesh(devices=tpu_devices("v5e:2x2", 2), islands=4, fsdp=2)
    assert slices_along(mesh, "islands") == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize(
    ("axes", "between"),
    [
        ({"clients": 4, "islands": 2}, "islands"),
        ({"data": 2, "clients": 4}, "clients"),
        ({"fsdp": 4, "data": 2}, "data"),
        ({"islands": 1, "fsdp": 8, "between_slices": "fsdp"}, "fsdp"),
        ({"islands": 2, "data": 4, "between_slices": "data"}, "data"),
    ],
)
def test_the_axis_that_communicates_least_runs_between_slices(
    tpu_devices: Devices, axes: dict, between: str
):
    mesh = make_mesh(devices=tpu_devices("v5e:2x2", 2), **axes)
    half = mesh.shape[between] // 2
    assert slices_along(mesh, between) == [{0}] * half + [{1}] * half


def test_sizes_that_do_not_fit_the_slices_raise(tpu_devices: Devices):
    devices = tpu_devices("v5e:2x2", 4)
    with pytest.raises(
        ValueError, match=r"islands=2 .* Sizes that fit: islands=4, 8 or 16, or another"
    ):
        make_mesh(devices=devices, islands=2, fsdp=8)
    with pytest.raises(ValueError, match=r"in 4 slices.*islands, clients or data.*islands=4, or"):
        make_mesh(devices=devices, fsdp=8, tensor=2)
    uneven = [d for d in devices if d.slice_index < 2][:6]
    with pytest.raises(
        ValueError, match=r"have 2 and 4 devices.*the same number of devices of each slice"
    ):
        make_mesh(devices=uneven, islands=2, fsdp=3)


PROCESS = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from fedpax.parallel.mesh import make_mesh
for mesh in (make_mesh(islands=2, fsdp=4), make_mesh(fsdp=4, islands=2), make_mesh(fsdp=-1)):
    print(mesh.axis_names, [[d.process_index for d in row] for row in mesh.devices.reshape(-1, 2)])
"""


@pytest.mark.slow
def test_two_processes_have_an_island_each():
    """The order of the axes does not matter."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index)],
            env=environment | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in started:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert printed.splitlines() == [
            "('islands', 'fsdp') [[0, 0], [0, 0], [1, 1], [1, 1]]",
            "('fsdp', 'islands') [[0, 1], [0, 1], [0, 1], [0, 1]]",
            "('fsdp',) [[0, 0], [0, 0], [1, 1], [1, 1]]",
        ]


def test_the_message_offers_no_more_devices_than_a_cpu_simulates() -> None:
    with pytest.raises(ValueError, match=r"JAX_NUM_CPU_DEVICES=1024"):
        make_mesh(tensor=1024)
    with pytest.raises(ValueError, match=r"at most 1,024 devices\.$"):
        make_mesh(tensor=1025)
