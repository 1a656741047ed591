import json
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from communicating_programs import STEPS, compile_text, shard_bytes, training_round
from jax.sharding import AxisType, Mesh

from fedpax.chips import CHIPS
from fedpax.parallel.mesh import make_mesh
from fedpax.planning.compiled_plan import (
    CompiledPlan,
    DeviceMemory,
    Roofline,
    RoundWorkload,
    make_plan,
)
from fedpax.planning.draw_mesh import _grids, draw_mesh
from fedpax.planning.json_report import to_json
from fedpax.planning.text_report import assumptions, to_text
from fedpax.planning.topology import Topology

Auto = AxisType.Auto
RECORDED = Path(__file__).parent.parent / "hlo" / "compiled"
ROWS = 1024  # of an island's step
PARAMETERS = 2 * 256 * 512


def workload(mesh: Mesh) -> RoundWorkload:
    islands = mesh.shape["islands"]
    return RoundWorkload(
        experiment="two_layers",
        placement="islands",
        num_participants=islands,
        local_steps=STEPS,
        num_parameters=PARAMETERS,
        items_per_round=islands * STEPS * ROWS,
        item_unit="tokens",
        flops_per_item=6.0 * PARAMETERS,
    )


def memory(capacity: float | None) -> DeviceMemory:
    return DeviceMemory(3 * 2**30, 2**30, 2**30, 5 * 2**30, 2**20, 0, capacity)


@pytest.fixture(params=[(2, 4), (4, 2)], ids=["2x4", "4x2"])
def recorded(request: pytest.FixtureRequest, two_slices) -> tuple[CompiledPlan, Mesh]:
    """Return the plan of a round that was compiled for two slices of v5e:2x2."""
    islands, fsdp = request.param
    mesh = two_slices(islands, fsdp)
    text = (RECORDED / f"tpu_two_slices_{islands}x{fsdp}_round.hlo").read_text()
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    topology = Topology("v5e:2x2", CHIPS["v5e"], (2, 2), 2, tuple(devices))
    return make_plan(text, mesh, topology, workload(mesh), memory(16.0 * 2**30)), mesh


def test_two_slices_have_the_known_networks_and_bytes(recorded: tuple[CompiledPlan, Mesh]):
    plan, mesh = recorded
    routes = {axis.name: [route.network for route in axis.routes] for axis in plan.axes}
    two = mesh.shape["islands"] == 2
    assert routes == {"islands": ["DCN"] if two else ["ICI", "DCN"], "fsdp": ["ICI"]}
    for transfer in plan.collectives:
        collective = transfer.collective
        assert (transfer.network == "DCN") == collective.between_slices
        assert transfer.seconds is not None and transfer.seconds > 0
        assert transfer.executions == (STEPS if collective.in_loop else 1)
    # Transfers between slices happen once per round, outside the local steps.
    sent = shard_bytes(mesh) // (1 if two else 2)
    assert (plan.operand_bytes("DCN"), plan.operand_bytes("DCN", in_loop=True)) == (sent, 0)
    assert plan.operand_bytes("DCN", in_loop=False) == sent
    assert plan.operand_bytes() == sum(plan.operand_bytes(network) for network in ("DCN", "ICI"))
    assert (
        plan.operand_bytes(axis="islands", in_loop=True)
        == 0
        < plan.operand_bytes(axis="fsdp", in_loop=True)
    )
    assert plan.operand_bytes(axis="islands") == sent * (
        1 if two else 4
    )  # and within a slice, before, after
    assert plan.operand_bytes("ICI", in_loop=True) > plan.operand_bytes("ICI", in_loop=False)


def test_the_roofline_of_two_slices_follows_from_the_counts(recorded: tuple[CompiledPlan, Mesh]):
    plan, mesh = recorded
    chip = CHIPS["v5e"]
    # Five of the six matmul FLOPs per parameter: the input needs no gradient.
    products = STEPS * ROWS * 5 * 2 * 256 * 512 * mesh.shape["islands"] / 8
    assert plan.matmul_flops == products
    roofline = plan.roofline
    assert roofline.compute_seconds == pytest.approx(products / chip.peak_flops)
    assert roofline.memory_seconds == pytest.approx(plan.memory_traffic / chip.hbm_bandwidth)
    assert roofline.network_seconds["DCN"] == pytest.approx(
        plan.operand_bytes("DCN") / chip.dcn_bandwidth
    )
    assert (
        roofline.full_overlap_seconds
        == max(roofline.times.values())
        == roofline.times[roofline.bottleneck]
    )
    runs = [(transfer, transfer.executions * transfer.seconds) for transfer in plan.collectives]
    assert roofline.collective_seconds == pytest.approx(sum(time for _, time in runs))
    for axis in mesh.axis_names:  # a collective along several axes counts for each
        along = [t for x, t in runs if x.network == "ICI" and axis in x.collective.axes]
        assert roofline.network_seconds.get(f"ICI {axis}", 0.0) == pytest.approx(sum(along))
    # The lower bound on time gives the upper bound on utilization.
    flops = 6 * PARAMETERS * mesh.shape["islands"] * STEPS * ROWS
    assert plan.model_flops_utilization(roofline.full_overlap_seconds) == pytest.approx(
        flops / (8 * chip.peak_flops * roofline.full_overlap_seconds)
    )
    assert plan.model_flops_utilization(roofline.compute_seconds) == pytest.approx(6 / 5)


def test_at_the_bandwidth_for_overlap_dcn_takes_as_long_as_the_rest(
    recorded: tuple[CompiledPlan, Mesh],
):
    plan, _ = recorded
    chip = plan.topology.chip
    rest = max(time for name, time in plan.roofline.times.items() if name != "DCN")
    sent = sum(
        transfer.seconds * transfer.executions * chip.dcn_bandwidth
        for transfer in plan.collectives
        if transfer.network == "DCN"
    )
    assert sent / plan.bandwidth_for_overlap == pytest.approx(rest)


def test_a_mean_at_the_end_of_a_round_is_exposed_at_any_bandwidth(
    recorded: tuple[CompiledPlan, Mesh],
):
    plan, mesh = recorded
    chip, chips = plan.topology.chip, 4
    published = chip.dcn_bandwidth * chips
    rest = max(time for name, time in plan.roofline.times.items() if name != "DCN")
    overlap = plan.overlap
    assert overlap.bandwidth == published
    assert {
        (transfer.local_steps, transfer.start, transfer.in_loop) for transfer in overlap.transfers
    } == {(0, STEPS, False)}
    # Two slices: a chip sends its operands once, in a ring all-reduce.
    assert overlap.bytes_per_round == pytest.approx(plan.operand_bytes("DCN") * chips)
    seconds = overlap.bytes_per_round / published
    assert overlap.exposed_seconds == pytest.approx(seconds)
    assert overlap.compute_utilization == pytest.approx(rest / (rest + seconds))
    assert overlap.peak_bytes_per_second == pytest.approx(overlap.bytes_per_round / rest * STEPS)
    for share, needed in overlap.required_bandwidth.items():
        assert needed == pytest.approx(overlap.bytes_per_round / rest * share / (1 - share))
    islands = mesh.shape["islands"]
    text = (RECORDED / f"tpu_two_slices_{islands}x{8 // islands}_round.hlo").read_text()
    slower = make_plan(
        text, mesh, plan.topology, plan.workload, plan.memory, slice_bandwidth=published / 7
    )
    assert slower.overlap.exposed_seconds == pytest.approx(7 * seconds)
    assert slower.overlap.required_bandwidth == overlap.required_bandwidth
    slowest = to_json(slower)["roofline"]["min_seconds_per_step_without_overlap"] * STEPS
    assert slowest == pytest.approx(plan.no_overlap_seconds + 6 * seconds)
    assert slowest > slower.full_overlap_seconds > plan.no_overlap_seconds
    report, content = to_text(slower), json.loads(json.dumps(to_json(slower)))["between_slices"]
    assert f"compute utilization  {slower.overlap.compute_utilization:.2%}" in report
    assert (
        re.search(r"  95% utilization +\S+ \S+ +required\n", report) and "after step 5 " in report
    )
    assert content["overlap"]["exposed_seconds_per_round"] == slower.overlap.exposed_seconds
    assert content["overlap"]["required_bytes_per_second"].keys() == {"95%", "99%"}
    assert [transfer["local_steps"] for transfer in content["overlap"]["transfers"]] == [0, 0]


def test_the_text_report_has_the_values_of_the_plan(recorded: tuple[CompiledPlan, Mesh]):
    plan, mesh = recorded
    text = to_text(plan)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "two_layers on v5e:2x2: 8 chips in 2 slices"
    for part in ("Mesh", "Memory per device, GiB", "Computation"):
        assert part in lines
    assert "total 8.00 50% of 16.00 GiB: fits" in lines
    assert f"model FLOPs per step {6 * PARAMETERS * mesh.shape['islands'] * ROWS:.4g}" in " ".join(
        lines
    )
    slices = lines.index("Between slices")
    assert f"per round {plan.operand_bytes('DCN'):,} operand bytes per device" == lines[slices + 1]
    assert ("Between islands" in lines) == (
        mesh.shape["islands"] == 4
    )  # otherwise islands are slices
    if "Between islands" in lines:
        islands = lines.index("Between islands")
        assert (
            f"per round {plan.operand_bytes(axis='islands'):,} operand bytes per device"
            == lines[islands + 1]
        )
    assert "inside loops 0 operand bytes per device" in lines
    assert f"limited by {plan.roofline.bottleneck}" in text
    # The rows of the table together have all collectives.
    start = next(i for i, line in enumerate(lines) if line.startswith("Collectives")) + 3
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()[start:]]
    rows = rows[: rows.index([""])]
    for column, wanted in (
        (5, len(plan.collectives)),
        (6, sum(transfer.executions for transfer in plan.collectives)),
    ):
        assert sum(int(row[column].replace(",", "")) for row in rows) == wanted
    assert {row[2] for row in rows} == {"ICI", "DCN"}
    for line in assumptions(plan):
        assert line in " ".join(lines)
    assert CHIPS["v5e"].source in text and max(map(len, text.splitlines())) <= 120


def test_the_json_report_has_the_values_of_the_plan(recorded: tuple[CompiledPlan, Mesh]):
    plan, mesh = recorded
    content = json.loads(json.dumps(to_json(plan)))
    assert content["topology"]["chip"]["peak_flops"] == 197e12
    assert {name: axis["size"] for name, axis in content["mesh"].items()} == dict(mesh.shape)
    assert len(content["collectives"]) == len(plan.collectives)
    assert content["memory"]["total"] == 8 * 2**30 + 2**20 and content["memory"]["fits"]
    assert content["placement"]["operand_bytes_per_device_per_round"] == plan.operand_bytes(
        axis="islands"
    )
    assert content["placement"]["operand_bytes_per_device_per_round_inside_loops"] == 0
    between = content["between_slices"]
    assert between["operand_bytes_per_device_per_round"] == plan.operand_bytes("DCN")
    assert between["operand_bytes_per_device_per_step"] * STEPS == plan.operand_bytes("DCN")
    assert between["operand_bytes_per_device_per_round_inside_loops"] == 0
    roofline = content["roofline"]
    # Nothing hides the transfers after the last step.
    computing = plan.roofline.seconds_within_slices + plan.overlap.exposed_seconds
    assert plan.overlap.exposed_seconds > 0 and computing > plan.roofline.full_overlap_seconds
    assert roofline["min_seconds_per_step"] * STEPS == pytest.approx(computing)
    utilization = plan.model_flops_utilization(computing)
    assert roofline["max_model_flops_utilization"] == pytest.approx(utilization)
    line = next(x for x in to_text(plan).splitlines() if x.startswith("  full overlap"))
    assert f"{1e3 * computing / STEPS:,.3f}" in line and f"MFU at most {utilization:.1%}" in line
    assert "exposed" in line
    slowest = roofline["max_model_flops_utilization_without_overlap"]
    assert 0 < slowest < roofline["max_model_flops_utilization"]
    assert content["computation"]["items_per_step"] == mesh.shape["islands"] * ROWS


def test_the_report_has_the_bits_of_a_parameter_between_two_slices(
    recorded: tuple[CompiledPlan, Mesh],
):
    plan, _ = recorded
    report = json.loads(json.dumps(to_json(plan)))
    sent = report["between_slices"]["overlap"]["bytes_out_of_slice_per_round"]
    bits = 8 * sent / report["computation"]["num_parameters"]
    assert bits == pytest.approx(32, rel=0.01)  # float32, one exchange in a round


def test_the_picture_shows_the_chips_of_each_slice(
    recorded: tuple[CompiledPlan, Mesh], tmp_path: Path
):
    plan, mesh = recorded
    grids = _grids(plan, mesh)  # the chips of each slice by their coordinates
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
def test_gpus_communicate_over_nvlink_and_dcn(hosts: int):
    devices = tuple(GpuDevice(i, i * hosts // 8) for i in range(8))
    topology = Topology("gpu", CHIPS["H100"], (), 1, devices)
    mesh = Mesh(np.array(devices).reshape(4, 2), ("islands", "fsdp"), axis_types=(Auto, Auto))
    text = (RECORDED / "gpu_4x2_round.hlo").read_text()
    plan = make_plan(text, mesh, topology, workload(mesh), memory(80.0 * 2**30))
    routes = {axis.name: [route.network for route in axis.routes] for axis in plan.axes}
    assert routes == {"islands": ["NVLink", "DCN"][:hosts], "fsdp": ["NVLink"]}
    assert (plan.operand_bytes("DCN") > 0) == (hosts == 2)
    assert "989 TFLOP/s" in to_text(plan) and "NVLink carries 450 GB/s" in to_text(plan)
    assert plan.roofline.compute_seconds == pytest.approx(plan.matmul_flops / 989.4e12)


def test_simulated_devices_have_no_roofline():
    mesh = make_mesh(islands=4, fsdp=2)
    program, arguments = training_round(mesh)
    text = compile_text(mesh, program, *arguments)
    topology = Topology("cpu:8", None, (), 1, tuple(jax.devices()))
    plan = make_plan(text, mesh, topology, workload(mesh), memory(None))
    assert {transfer.network for transfer in plan.collectives} == {"host"}
    assert {transfer.seconds for transfer in plan.collectives} == {None}
    assert (plan.roofline, plan.bandwidth_for_overlap, plan.model_flops_utilization(1.0)) == (
        None,
        None,
        None,
    )
    assert plan.memory.fits is None and plan.matmul_flops > 0
    report = to_text(plan)
    assert "no collectives" in report and "specifications of this device are unknown" in report
    assert to_json(plan)["roofline"] is None
    assert {title: grid.tolist() for title, grid in _grids(plan, mesh).items()} == {
        "": [[0, 1, 2, 3], [4, 5, 6, 7]]
    }


def test_eight_bit_matmuls_have_their_own_peak(recorded: tuple[CompiledPlan, Mesh]):
    plan, mesh = recorded
    name = f"tpu_two_slices_{mesh.shape['islands']}x{mesh.shape['fsdp']}_round.hlo"
    eight = re.sub(r"\b(bf16|f32)\[", "s8[", (RECORDED / name).read_text())
    chip = plan.topology.chip
    narrow = make_plan(eight, mesh, plan.topology, plan.workload, plan.memory)
    assert narrow.int8_flops == narrow.matmul_flops == plan.matmul_flops
    assert narrow.roofline.compute_seconds == pytest.approx(
        plan.roofline.compute_seconds * chip.peak_flops / chip.peak_int8_ops
    )
    report = to_text(narrow)
    assert "in int8" in report and "100.0%  of the program's matmul FLOPs" in report
    assert f"int8 at {chip.peak_int8_ops / 1e12:,.0f}" in report and "more than 100%" in report
    assert (
        to_json(narrow)["computation"]["compiled_int8_flops_per_device_per_round"]
        == narrow.matmul_flops
    )


def test_transfers_to_the_host_are_reported(recorded: tuple[CompiledPlan, Mesh]):
    plan, _ = recorded
    offloading = plan._replace(host_transfers=1e6, memory=plan.memory._replace(host=2**30))
    report = to_text(offloading)
    assert (
        f"{1e6 / plan.workload.local_steps:,.0f}  bytes per local step, between a device" in report
    )
    assert "on the host" in report and "is not published" in report
    assert to_json(offloading)["memory"]["total"] == plan.memory.total
    assert "host transfers" not in to_text(plan)


def test_too_little_memory_is_reported(recorded: tuple[CompiledPlan, Mesh]):
    plan, _ = recorded
    full = plan._replace(memory=memory(7.9 * 2**30))
    assert full.memory.fits is False
    assert "DOES NOT FIT" in to_text(full) and to_json(full)["memory"]["fits"] is False


def test_unknown_values_are_reported_as_unknown(recorded: tuple[CompiledPlan, Mesh]):
    plan, _ = recorded
    unknown = plan._replace(
        workload=plan.workload._replace(flops_per_item=None),
        collectives=tuple(
            t._replace(collective=t.collective._replace(executions=None)) for t in plan.collectives
        ),
    )
    text = to_text(unknown)
    assert "unknown" in text and "MFU" not in text
    assert any("unknown number of executions" in line for line in assumptions(unknown))
    assert to_json(unknown)["computation"]["model_flops_per_step"] is None
    assert all(c["executions_per_round"] is None for c in to_json(unknown)["collectives"])


def test_the_slowest_resource_is_the_bottleneck():
    random = np.random.default_rng(0)
    for _ in range(20):
        compute, memory_time, *others = random.random(4)
        roofline = Roofline(compute, memory_time, {"ICI fsdp": others[0], "DCN": others[1]}, 1.5)
        assert roofline.full_overlap_seconds == max(compute, memory_time, *others)
        assert roofline.times[roofline.bottleneck] == roofline.full_overlap_seconds
        assert roofline.no_overlap_seconds == pytest.approx(compute + memory_time + 1.5)
