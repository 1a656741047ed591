import json
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from communicating_programs import STEPS, compile_text, shard_bytes, training_round
from jax.sharding import AxisType, Mesh

from fedpax.parallel.mesh import make_mesh
from fedpax.planning.chips import CHIPS
from fedpax.planning.compiled_plan import Bound, Memory, Plan, Workload, make_plan
from fedpax.planning.draw_mesh import _grids, draw_mesh
from fedpax.planning.report import assumptions, to_json, to_text
from fedpax.planning.topology import Topology

Auto = AxisType.Auto
RECORDED = Path(__file__).parent.parent / "hlo" / "compiled"
ROWS = 1024  # of an island's step
PARAMETERS = 2 * 256 * 512


def workload(mesh: Mesh) -> Workload:
    islands = mesh.shape["islands"]
    return Workload(
        experiment="two_layers",
        placement="islands",
        participants=islands,
        steps=STEPS,
        parameters=PARAMETERS,
        tokens=islands * STEPS * ROWS,
        flops_per_token=6.0 * PARAMETERS,
    )


def memory(capacity: float | None) -> Memory:
    return Memory(3 * 2**30, 2**30, 2**30, 5 * 2**30, 2**20, 0, capacity)


@pytest.fixture(params=[(2, 4), (4, 2)], ids=["2x4", "4x2"])
def recorded(request: pytest.FixtureRequest, two_slices) -> tuple[Plan, Mesh]:
    """The plan of a round that was compiled for two slices of v5e:2x2."""
    islands, fsdp = request.param
    mesh = two_slices(islands, fsdp)
    text = (RECORDED / f"tpu_two_slices_{islands}x{fsdp}_round.hlo").read_text()
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    topology = Topology("v5e:2x2", CHIPS["v5e"], (2, 2), 2, tuple(devices))
    return make_plan(text, mesh, topology, workload(mesh), memory(16.0 * 2**30)), mesh


def test_axes_and_transfers_of_two_slices(recorded: tuple[Plan, Mesh]):
    plan, mesh = recorded
    routes = {axis.name: [route.network for route in axis.routes] for axis in plan.axes}
    two = mesh.shape["islands"] == 2
    assert routes == {"islands": ["DCN"] if two else ["ICI", "DCN"], "fsdp": ["ICI"]}
    for transfer in plan.transfers:
        collective = transfer.collective
        assert (transfer.network == "DCN") == collective.between_slices
        assert transfer.seconds is not None and transfer.seconds > 0
        assert transfer.runs == (STEPS if collective.in_loop else 1)
    # What crosses between slices does so once a round, outside the local steps.
    sent = shard_bytes(mesh) // (1 if two else 2)
    assert (plan.sent("DCN"), plan.sent("DCN", in_loop=True)) == (sent, 0)
    assert plan.sent("DCN", in_loop=False) == sent
    assert plan.sent() == sum(plan.sent(network) for network in ("DCN", "ICI"))
    assert plan.sent(axis="islands", in_loop=True) == 0 < plan.sent(axis="fsdp", in_loop=True)
    assert plan.sent(axis="islands") == sent * (
        1 if two else 4
    )  # and within a slice, before, after
    assert plan.sent("ICI", in_loop=True) > plan.sent("ICI", in_loop=False)


def test_bound_of_two_slices(recorded: tuple[Plan, Mesh]):
    plan, mesh = recorded
    chip = CHIPS["v5e"]
    # Five of the six products of a parameter: the input needs no gradient.
    products = STEPS * ROWS * 5 * 2 * 256 * 512 * mesh.shape["islands"] / 8
    assert plan.products == products
    bound = plan.bound
    assert bound.compute == pytest.approx(products / chip.peak_flops)
    assert bound.memory == pytest.approx(plan.traffic / chip.memory_bandwidth)
    assert bound.networks["DCN"] == pytest.approx(plan.sent("DCN") / chip.network_bandwidth)
    assert bound.seconds == max(bound.times.values()) == bound.times[bound.limit]
    runs = [(transfer, transfer.runs * transfer.seconds) for transfer in plan.transfers]
    assert bound.collectives == pytest.approx(sum(time for _, time in runs))
    for axis in mesh.axis_names:  # what runs along several axes keeps the links of each busy
        along = [t for x, t in runs if x.network == "ICI" and axis in x.collective.axes]
        assert bound.networks.get(f"ICI {axis}", 0.0) == pytest.approx(sum(along))
    # The least time and the most utilization belong together.
    flops = 6 * PARAMETERS * mesh.shape["islands"] * STEPS * ROWS
    assert plan.utilization(bound.seconds) == pytest.approx(
        flops / (8 * chip.peak_flops * bound.seconds)
    )
    assert plan.utilization(bound.compute) == pytest.approx(6 / 5)


def test_the_bandwidth_that_hides_what_crosses(recorded: tuple[Plan, Mesh]):
    """With a network of that bandwidth, the transfers take as long as the rest of the round."""
    plan, _ = recorded
    chip = plan.topology.chip
    rest = max(time for name, time in plan.bound.times.items() if name != "DCN")
    sent = sum(
        transfer.seconds * transfer.runs * chip.network_bandwidth
        for transfer in plan.transfers
        if transfer.network == "DCN"
    )
    assert sent / plan.hidden_bandwidth == pytest.approx(rest)


def test_text_of_two_slices(recorded: tuple[Plan, Mesh]):
    plan, mesh = recorded
    text = to_text(plan)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "two_layers on v5e:2x2: 8 chips in 2 slices"
    for part in ("Mesh", "Memory of a device, GiB", "Work"):
        assert part in lines
    assert "together 8.00 50% of 16.00 GiB: fits" in lines
    assert f"FLOPs a step {6 * PARAMETERS * mesh.shape['islands'] * ROWS:.4g}" in " ".join(lines)
    slices = lines.index("Between slices")
    assert f"a round {plan.sent('DCN'):,} bytes a device" == lines[slices + 1]
    assert ("Between islands" in lines) == (mesh.shape["islands"] == 4)  # else it is the same
    if "Between islands" in lines:
        islands = lines.index("Between islands")
        assert f"a round {plan.sent(axis='islands'):,} bytes a device" == lines[islands + 1]
    assert "inside a loop 0 bytes a device" in lines
    assert f"limited by {plan.bound.limit}" in text
    # The rows of collectives together are all of them.
    start = next(i for i, line in enumerate(lines) if line.startswith("Collectives")) + 2
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()[start:]]
    rows = rows[: rows.index([""])]
    for column, wanted in (
        (5, len(plan.transfers)),
        (6, sum(transfer.runs for transfer in plan.transfers)),
    ):
        assert sum(int(row[column].replace(",", "")) for row in rows) == wanted
    assert {row[2] for row in rows} == {"ICI", "DCN"}
    for line in assumptions(plan):
        assert line in " ".join(lines)
    assert CHIPS["v5e"].source in text and max(map(len, text.splitlines())) <= 120


def test_json_of_two_slices(recorded: tuple[Plan, Mesh]):
    plan, mesh = recorded
    content = json.loads(json.dumps(to_json(plan)))
    assert content["topology"]["chip"]["peak_flops"] == 197e12
    assert {name: axis["size"] for name, axis in content["mesh"].items()} == dict(mesh.shape)
    assert len(content["collectives"]) == len(plan.transfers)
    assert content["memory"]["total"] == 8 * 2**30 + 2**20 and content["memory"]["fits"]
    assert content["placement"]["bytes_per_device_per_round"] == plan.sent(axis="islands")
    assert content["placement"]["bytes_per_device_inside_loops"] == 0
    between = content["between_slices"]
    assert between["bytes_per_device_per_round"] == plan.sent("DCN")
    assert between["bytes_per_device_per_step"] * STEPS == plan.sent("DCN")
    assert between["bytes_per_device_inside_loops"] == 0
    bound = content["bound"]
    assert bound["seconds_per_step"] * STEPS == pytest.approx(plan.bound.seconds)
    assert 0 < bound["model_flops_utilization_without_overlap"] < bound["model_flops_utilization"]
    assert content["work"]["tokens_per_step"] == mesh.shape["islands"] * ROWS


def test_picture_of_two_slices(recorded: tuple[Plan, Mesh], tmp_path: Path):
    plan, mesh = recorded
    grids = _grids(plan, mesh)  # each slice as its chips lie
    for number, (title, grid) in enumerate(grids.items()):
        assert title == f"slice {number}"
        for (y, x), position in np.ndenumerate(grid):
            device = mesh.devices.flat[position]
            assert (device.slice_index, device.coords[:2]) == (number, (x, y))
    if mesh.shape["islands"] == 4:
        draw_mesh(plan, mesh, tmp_path / "mesh.png")
        content = (tmp_path / "mesh.png").read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000


@dataclass(frozen=True)
class GpuDevice:
    id: int
    process_index: int
    platform: str = "gpu"


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_plan_of_gpus(hosts: int):
    devices = tuple(GpuDevice(i, i * hosts // 8) for i in range(8))
    topology = Topology("gpu", CHIPS["H100"], (), 1, devices)
    mesh = Mesh(np.array(devices).reshape(4, 2), ("islands", "fsdp"), axis_types=(Auto, Auto))
    text = (RECORDED / "gpu_4x2_round.hlo").read_text()
    plan = make_plan(text, mesh, topology, workload(mesh), memory(80.0 * 2**30))
    routes = {axis.name: [route.network for route in axis.routes] for axis in plan.axes}
    assert routes == {"islands": ["NVLink", "DCN"][:hosts], "fsdp": ["NVLink"]}
    assert (plan.sent("DCN") > 0) == (hosts == 2)
    assert "989 TFLOP/s" in to_text(plan) and "NVLink carries 450 GB/s" in to_text(plan)
    assert plan.bound.compute == pytest.approx(plan.products / 989.4e12)


def test_a_plan_of_simulated_devices_has_no_times():
    mesh = make_mesh(islands=4, fsdp=2)
    program, arguments = training_round(mesh)
    text = compile_text(mesh, program, *arguments)
    topology = Topology("cpu:8", None, (), 1, tuple(jax.devices()))
    plan = make_plan(text, mesh, topology, workload(mesh), memory(None))
    assert {transfer.network for transfer in plan.transfers} == {"host"}
    assert {transfer.seconds for transfer in plan.transfers} == {None}
    assert (plan.bound, plan.hidden_bandwidth, plan.utilization(1.0)) == (None, None, None)
    assert plan.memory.fits is None and plan.products > 0
    report = to_text(plan)
    assert "nothing crosses" in report and "figures of this device are not known" in report
    assert to_json(plan)["bound"] is None
    assert {title: grid.tolist() for title, grid in _grids(plan, mesh).items()} == {
        "": [[0, 1, 2, 3], [4, 5, 6, 7]]
    }


def test_products_of_eight_bits_have_a_peak_of_their_own(recorded: tuple[Plan, Mesh]):
    plan, mesh = recorded
    name = f"tpu_two_slices_{mesh.shape['islands']}x{mesh.shape['fsdp']}_round.hlo"
    eight = re.sub(r"\b(bf16|f32)\[", "s8[", (RECORDED / name).read_text())
    chip = plan.topology.chip
    narrow = make_plan(eight, mesh, plan.topology, plan.workload, plan.memory)
    assert narrow.int8 == narrow.products == plan.products
    assert narrow.bound.compute == pytest.approx(plan.bound.compute * chip.peak_flops / chip.int8)
    report = to_text(narrow)
    assert "in int8" in report and "100.0%  of these products" in report
    assert f"int8 at {chip.int8 / 1e12:,.0f}" in report and "more than 100%" in report
    assert to_json(narrow)["work"]["of_these_in_int8"] == narrow.products


def test_transfers_to_the_host_are_told(recorded: tuple[Plan, Mesh]):
    plan, _ = recorded
    offloading = plan._replace(host=1e6, memory=plan.memory._replace(host=2**30))
    report = to_text(offloading)
    assert f"{1e6 / plan.workload.steps:,.0f}  bytes a step, between a device" in report
    assert "on the host" in report and "is not published" in report
    assert to_json(offloading)["memory"]["total"] == plan.memory.total
    assert "host transfers" not in to_text(plan)


def test_memory_that_is_not_enough(recorded: tuple[Plan, Mesh]):
    plan, _ = recorded
    full = plan._replace(memory=memory(7.9 * 2**30))
    assert full.memory.fits is False
    assert "DOES NOT FIT" in to_text(full) and to_json(full)["memory"]["fits"] is False


def test_what_is_not_known_is_said(recorded: tuple[Plan, Mesh]):
    plan, _ = recorded
    unknown = plan._replace(
        workload=plan.workload._replace(flops_per_token=None),
        transfers=tuple(
            t._replace(collective=t.collective._replace(executions=None)) for t in plan.transfers
        ),
    )
    text = to_text(unknown)
    assert "unknown" in text and "MFU" not in text
    assert any("unknown number of times" in line for line in assumptions(unknown))
    assert to_json(unknown)["work"]["flops_per_step"] is None
    assert all(c["executions_per_round"] is None for c in to_json(unknown)["collectives"])


def test_the_longest_resource_limits():
    random = np.random.default_rng(0)
    for _ in range(20):
        compute, memory_time, *others = random.random(4)
        bound = Bound(compute, memory_time, {"ICI fsdp": others[0], "DCN": others[1]}, 1.5)
        assert bound.seconds == max(compute, memory_time, *others)
        assert bound.times[bound.limit] == bound.seconds
        assert bound.without_overlap == pytest.approx(compute + memory_time + 1.5)
