"""The mesh follows from islands, devices and the model unless it is stated."""

import dataclasses
import math

import pytest

from fedpax.experiments import decoupled_diloco_text, diloco_text, pretrain
from fedpax.parallel.mesh import SINGLE_DEVICE, MeshConfig, MeshSizeError
from fedpax.parallel.mesh_sizes import ShardedSize, follow, simulated_count
from fedpax.training.experiment import Experiment

SHARDED = [
    ShardedSize("islands", 4, ("islands",)),
    ShardedSize("data.batch_size", 8, ("data", "fsdp", "expert")),
    ShardedSize("model.num_heads", 4, ("tensor",)),
    ShardedSize("data.seq_len", 64, ("sequence",)),
]
CLIENTS = [ShardedSize("cohort.size", 10, ("clients",))]
ONE = [ShardedSize("islands", 1, ("islands",)), *SHARDED[1:]]


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16, 32, 64, 256])
@pytest.mark.parametrize(
    "make",
    [
        diloco_text.diloco_text,
        diloco_text.data_parallel_text,
        diloco_text.single_island_text,
        diloco_text.diloco_lora_text,
        decoupled_diloco_text.decoupled_diloco_text,
        pretrain.pretrain_text,
        pretrain.pretrain_c4_1b,
        pretrain.diloco_c4_1b,
        pretrain.diloco_llama_8b,
    ],
)
def test_an_experiment_takes_all_devices(make, num_devices: int) -> None:
    experiment: Experiment = make()
    sizes = follow(experiment.mesh, experiment.sharded_sizes(), num_devices).sizes
    assert math.prod(sizes.values()) == num_devices
    for item in experiment.sharded_sizes():
        assert item.size % math.prod(sizes[axis] for axis in item.axes) == 0, item


@pytest.mark.parametrize(
    ("mesh", "sharded", "num_devices", "expected"),
    [
        (MeshConfig(), SHARDED, 32, {"islands": 4, "fsdp": 8}),
        (MeshConfig(), SHARDED, 64, {"islands": 4, "fsdp": 8, "tensor": 2}),
        (MeshConfig(), SHARDED, 6, None),
        (MeshConfig(islands=2), SHARDED, 8, {"islands": 2, "fsdp": 4}),
        (MeshConfig(islands=1), SHARDED, 1, {"islands": 1}),
        (MeshConfig(tensor=4), SHARDED, 8, {"tensor": 4, "islands": 2}),
        (MeshConfig(fsdp=-1), SHARDED, 8, {"fsdp": 2, "islands": 4}),
        (MeshConfig(fsdp=1), SHARDED, 8, {"fsdp": 1, "islands": 4, "tensor": 2}),
        (MeshConfig(stage=-1), ONE, 8, {"stage": 8}),
        (MeshConfig(data=2), ONE, 8, {"data": 2, "fsdp": 4}),
        # Stated sizes that do not divide the devices stay: `make` raises.
        (MeshConfig(fsdp=3), SHARDED, 8, {"fsdp": 3}),
        (MeshConfig(islands=4), [], 32, {"islands": 4}),
    ],
)
def test_sizes_that_are_not_stated_follow(
    mesh: MeshConfig, sharded: list, num_devices: int, expected: dict[str, int] | None
) -> None:
    if expected is None:
        with pytest.raises(MeshSizeError, match=r"Set --islands=6 or --data\.batch_size=24"):
            follow(mesh, sharded, num_devices)
    else:
        assert follow(mesh, sharded, num_devices).stated == expected


def test_a_mesh_of_one_device_stays_one_among_many() -> None:
    experiment = decoupled_diloco_text.decoupled_diloco_text()
    assert follow(SINGLE_DEVICE, SHARDED, 8) == SINGLE_DEVICE
    assert dataclasses.replace(experiment, mesh=SINGLE_DEVICE).make_mesh().size == 1


def test_data_runs_between_the_slices_of_one_island() -> None:
    assert follow(MeshConfig(), ONE, 8, slices=2).stated == {"data": 2, "fsdp": 4}
    assert follow(MeshConfig(), SHARDED, 8, slices=2).stated == {"islands": 4, "fsdp": 2}


@pytest.mark.parametrize(
    ("sharded", "num_devices"), [(SHARDED, 6), (SHARDED, 3), (ONE, 3), (ONE, 12), (ONE, 24)]
)
def test_each_remedy_of_the_message_works(sharded: list, num_devices: int) -> None:
    with pytest.raises(MeshSizeError) as raised:
        follow(MeshConfig(), sharded, num_devices)
    remedies = str(raised.value).partition(" Set ")[2].removesuffix(".").split(" or ")
    for remedy in remedies:
        field, _, value = remedy.removeprefix("--").partition("=")
        changed = [
            item._replace(size=int(value)) if item.field == field else item for item in sharded
        ]
        assert changed != sharded
        assert follow(MeshConfig(), changed, num_devices).size == num_devices


@pytest.mark.parametrize(
    ("mesh", "sharded", "cores", "expected"),
    [
        (MeshConfig(), SHARDED, 16, 4),  # one device for each island
        (MeshConfig(islands=2), SHARDED, 16, 2),
        (MeshConfig(fsdp=2), SHARDED, 16, 8),
        (MeshConfig(), ONE, 16, 1),
        (MeshConfig(fsdp=-1), ONE, 8, 8),
        (MeshConfig(fsdp=-1), ONE, 6, 4),  # 6 cores cannot share 8 rows
        (MeshConfig(fsdp=-1), SHARDED, 2, 4),
        (MeshConfig(clients=-1), CLIENTS, 16, 10),
        (MeshConfig(), CLIENTS, 4, 2),
        (MeshConfig(clients=-1), [], 6, 6),
        (MeshConfig(), [], 6, 1),
    ],
)
def test_a_cpu_simulates_devices_that_the_mesh_can_use(
    mesh: MeshConfig, sharded: list, cores: int, expected: int
) -> None:
    assert simulated_count(mesh, sharded, cores) == expected
