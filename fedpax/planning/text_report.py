"""A plan as text to read."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from fedpax.planning.compiled_plan import CompiledPlan, TimedCollective
from fedpax.planning.overlap import Overlap, grouped
from fedpax.planning.topology import DCN

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def to_text(plan: CompiledPlan) -> str:
    """Format a plan as text, in sections with headings."""
    sections = [_head(plan), _mesh(plan), _memory(plan), _computation(plan), _collectives(plan)]
    sections.append(_networks(plan))
    if plan.overlap is not None:
        sections.append(_overlap(plan, plan.overlap))
    sections.append(_roofline(plan))
    return "\n\n".join(sections) + "\n"


def assumptions(plan: CompiledPlan) -> list[str]:
    """List the assumptions behind the roofline of a plan; none for an unknown chip."""
    chip = plan.topology.chip
    if chip is None:
        return []
    narrow = [
        ("int8", plan.int8_flops, chip.peak_int8_ops),
        ("fp8", plan.fp8_flops, chip.peak_fp8_flops),
    ]
    narrow_peaks = "".join(
        f", those in {name} at {peak / 1e12:,.0f}" for name, count, peak in narrow if count
    )
    lines = [
        f"Matmuls run at the chip's bfloat16 peak, {chip.peak_flops / 1e12:,.0f} "
        f"TFLOP/s{narrow_peaks}. "
        "Their FLOPs are counted in the compiled program, recomputation included.",
        "The memory bandwidth of a device is "
        f"{chip.hbm_bandwidth / chip.devices_per_chip / 1e9:,.0f} GB/s.",
    ]
    if chip.torus_dimensions:
        lines.append(
            f"A chip has {chip.links} links of {chip.link_bandwidth / 1e9:,.0f} GB/s in each "
            "direction. A collective uses the links along its own axes, both directions of a "
            "ring. Latency is not counted."
        )
    else:
        lines.append(f"NVLink carries {chip.link_bandwidth / 1e9:,.0f} GB/s out of a GPU.")
    if plan.operand_bytes(DCN):
        lines.append(
            f"Between slices a chip sends {_bits(chip.dcn_bandwidth)}, its share of its host's "
            "network, and the slices form a ring."
        )
    if plan.overlap is not None:
        lines.append(
            "A local step that waits for no transfer between slices takes the largest bound but "
            "DCN's. Transfers use the bandwidth out of a slice one after another, in the "
            "order of their starts."
        )
    if plan.int8_flops or plan.fp8_flops:
        lines.append("MFU is relative to the bfloat16 peak, so it can be more than 100%.")
    if plan.host_transfers:
        lines.append(
            "Transfers between a device and its host's memory are not timed: the bandwidth of the "
            "links between them is not published."
        )
    if any(timed.collective.executions is None for timed in plan.collectives):
        lines.append("A collective with an unknown number of executions counts once.")
    if plan.unknown_trip_counts:
        lines.append(
            f"{len(plan.unknown_trip_counts)} loops have a trip count that depends on data. Their "
            "bodies count once, so the local step can take longer than the bounds say."
        )
    if plan.uncounted_kernels:
        lines.append(
            f"{len(plan.uncounted_kernels)} kernels do not state their FLOPs, and count as 0: "
            f"{', '.join(plan.uncounted_kernels)}."
        )
    return [*lines, f"Published specifications of {chip.name}: {chip.source}."]


def _head(plan: CompiledPlan) -> str:
    topology = plan.topology
    count = f"{topology.chips:,} chips" if topology.chip else f"{len(topology.devices):,} devices"
    if topology.chip and topology.chip.devices_per_chip > 1:
        count += f" ({len(topology.devices):,} devices)"
    if plan.num_devices < len(topology.devices):
        count = f"{plan.num_devices:,} of {len(topology.devices):,} devices"
    slices = f" in {topology.slices} slices" if topology.slices > 1 else ""
    return f"{plan.workload.experiment} on {topology.name}: {count}{slices}"


def _mesh(plan: CompiledPlan) -> str:
    rows = [
        (axis.name, f"{axis.size:,}", " + ".join(map(str, axis.routes)) or "-")
        for axis in plan.axes
    ]
    workload = plan.workload
    if workload.num_participants > 1 and workload.placement not in [
        axis.name for axis in plan.axes
    ]:
        rows.append((workload.placement, "1", "not on the mesh: all run on the same devices"))
    return _section("Mesh", [("axis", "size", "network"), *rows], right={1})


def _memory(plan: CompiledPlan) -> str:
    memory = plan.memory
    unit = next((unit for unit in _UNITS if memory.total >= _UNITS[unit]), "B")

    def size(count: float) -> str:
        return f"{count / _UNITS[unit]:,.2f}"

    fits = ""
    if memory.capacity is not None:
        verdict = "fits" if memory.fits else "DOES NOT FIT"
        share = memory.total / memory.capacity
        fits = f"{share:.0%} of {memory.capacity / _UNITS['GiB']:,.2f} GiB: {verdict}"
    rows = [
        ("arguments", size(memory.arguments), "state and cohort"),
        ("outputs", size(memory.outputs), "new state and metrics"),
        ("aliased", f"-{size(memory.aliased)}", "outputs in the memory of donated arguments"),
        ("temporaries", size(memory.temporaries), "peak of all intermediate values"),
        ("program", size(memory.code), ""),
        ("total", size(memory.total), fits),
    ]
    if memory.host:
        rows.append(("on the host", size(memory.host), "offloaded activations and similar"))
    return _section(f"Memory per device, {unit}", rows, right={1})


def _computation(plan: CompiledPlan) -> str:
    workload = plan.workload
    items = workload.items_per_round / workload.local_steps
    rows = [
        ("parameters", f"{workload.num_parameters:,}", ""),
        ("local steps", f"{workload.local_steps:,}", "per round"),
        (
            workload.item_unit,
            f"{items:,.0f}",
            f"per local step, {workload.items_per_round:,} per round, all {workload.placement} "
            "together",
        ),
    ]
    per_item = f"model FLOPs per {workload.item_unit.removesuffix('s')}"
    if workload.flops_per_item is None:
        rows.append((per_item, "unknown", "the experiment's Run has no flops_per_item"))
    else:
        model = workload.flops_per_item * workload.items_per_round
        ratio = plan.matmul_flops * plan.num_devices / model
        rows += [
            (
                per_item,
                f"{workload.flops_per_item:.4g}",
                "6 N + 12 L H d T, T at most the window",
            ),
            (
                "model FLOPs per step",
                f"{workload.flops_per_item * items:.4g}",
                "all devices together",
            ),
            (
                "compiled / model FLOPs",
                f"{ratio:.2f}",
                "compiled: matmuls of the program, recomputation included",
            ),
        ]
    narrow = {"int8": plan.int8_flops, "fp8": plan.fp8_flops}
    rows += [
        (f"in {name}", f"{of_dtype / plan.matmul_flops:.1%}", "of the program's matmul FLOPs")
        for name, of_dtype in narrow.items()
        if of_dtype
    ]
    if plan.host_transfers:
        moved = f"{plan.host_transfers / workload.local_steps:,.0f}"
        rows.append(
            ("host transfers", moved, "bytes per local step, between a device and its host")
        )
    return _section("Computation", rows, right={1})


def _collectives(plan: CompiledPlan) -> str:
    """Format all collectives; those that differ in their executions alone share a line."""
    rows: list[tuple[str, ...]] = [
        ("kind", "axes", "network", "bytes", "ms", "number", "executions", "in a loop")
    ]

    def key(timed: TimedCollective) -> tuple:
        collective = timed.collective
        known = collective.executions is not None
        return (
            not collective.in_loop,
            timed.network,
            collective.axes,
            collective.kind,
            -collective.bytes,
            known,
        )

    for _, same in itertools.groupby(sorted(plan.collectives, key=key), key):
        group = list(same)
        collective, seconds = group[0].collective, group[0].seconds
        executions = sum(timed.executions for timed in group)
        rows.append(
            (
                collective.kind,
                ", ".join(collective.axes),
                group[0].network,
                f"{collective.bytes:,}",
                "-" if seconds is None else f"{1e3 * seconds:,.3f}",
                f"{len(group):,}",
                "unknown" if collective.executions is None else f"{executions:,}",
                "yes" if collective.in_loop else "no",
            )
        )
    if len(rows) == 1:
        return "Collectives\n  none"
    title = (
        "Collectives: operand bytes per device and execution, lower bound on its time, number of\n"
        "  collectives, their executions per round"
    )
    return _section(title, rows, right={3, 4, 5, 6})


def _networks(plan: CompiledPlan) -> str:
    """Format the operand bytes between slices, and between participants if these differ."""
    workload, chip, topology = plan.workload, plan.topology.chip, plan.topology
    sections = []
    dcn, placement = plan.operand_bytes(DCN), plan.operand_bytes(axis=workload.placement)
    if placement and placement != dcn:
        inside = plan.operand_bytes(axis=workload.placement, in_loop=True)
        rows = _operand_bytes(plan, placement, inside)
        sections.append(_section(f"Between {workload.placement}", rows))
    if not dcn:
        return "\n\n".join([*sections, "Between slices\n  no collectives"])
    rows = _operand_bytes(plan, dcn, plan.operand_bytes(DCN, in_loop=True))
    devices = len(topology.devices) // topology.slices
    rows.insert(1, ("", f"{_bytes(dcn * devices)} per slice", ""))
    if chip is not None:
        available = f"{_bits(chip.dcn_bandwidth)} per chip"
        rows.append(("available", available, f"published for {chip.name}"))
    return "\n\n".join([*sections, _section("Between slices", rows)])


def _overlap(plan: CompiledPlan, overlap: Overlap) -> str:
    """Format the transfers between slices, one line for the same local steps."""
    rows: list[tuple[str, ...]] = [
        ("starts", "number", "executions", "out of a slice", "local steps", "exposed, ms")
    ]
    for group in grouped(overlap.transfers):
        first = group[0]
        rows.append(
            (
                "in a loop" if first.in_loop else f"after step {first.start:,.4g}",
                f"{len(group):,}",
                f"{sum(transfer.executions for transfer in group):,}",
                _bytes(sum(transfer.bytes * transfer.executions for transfer in group)),
                f"{first.local_steps:,.2f}",
                f"{1e3 * sum(transfer.exposed_seconds for transfer in group):,.3f}",
            )
        )
    title = (
        "Transfers between slices: number of transfers, their executions and bytes out of a slice\n"
        "  per round, local steps between start and completion, time that the round waits for them"
    )
    table = _section(title, rows, right={1, 2, 3, 4, 5})
    chips = plan.topology.chips // plan.topology.slices
    rows = [
        ("used", _bits(overlap.bandwidth), f"{_bits(overlap.bandwidth / chips)} per chip"),
        (
            "compute utilization",
            f"{overlap.compute_utilization:.2%}",
            f"a round waits {1e3 * overlap.exposed_seconds:,.3f} ms "
            f"in {overlap.num_steps:,} steps of {1e3 * overlap.step_seconds:,.3f} ms",
        ),
        ("mean", _bits(overlap.mean_bytes_per_second), "over the round"),
        ("peak", _bits(overlap.peak_bytes_per_second), "to spread each transfer over its steps"),
        *[
            (f"{share:.0%} utilization", _bits(needed), "required")
            for share, needed in overlap.required_bandwidth.items()
        ],
    ]
    return f"{table}\n\n{_section('Bandwidth out of a slice', rows)}"


def _operand_bytes(plan: CompiledPlan, total: int, inside: int) -> list[tuple[str, str, str]]:
    steps = plan.workload.local_steps
    return [
        ("per round", f"{total:,} operand bytes per device", ""),
        (
            "per local step",
            f"{total / steps:,.0f} operand bytes per device",
            f"{steps:,} local steps per round",
        ),
        ("inside loops", f"{inside:,} operand bytes per device", ""),
    ]


def _roofline(plan: CompiledPlan) -> str:
    roofline, steps = plan.roofline, plan.workload.local_steps
    if roofline is None:
        return (
            "Roofline\n  none: the specifications of this device are unknown "
            "(fedpax/chips.py has TPUs and some GPUs)"
        )
    rows = [(name, f"{1e3 * time / steps:,.3f}", "") for name, time in roofline.times.items()]
    seconds = plan.full_overlap_seconds
    overlapping = plan.model_flops_utilization(seconds)
    limit = f"limited by {roofline.bottleneck}"
    if seconds > roofline.full_overlap_seconds:
        limit += " and exposed DCN" if roofline.bottleneck != DCN else ", which is exposed"
    if overlapping is not None:
        limit += f": MFU at most {overlapping:.1%}, full attention"
    rows.append(("full overlap", f"{1e3 * seconds / steps:,.3f}", limit))
    no_overlap = plan.model_flops_utilization(plan.no_overlap_seconds)
    limit = "" if no_overlap is None else f"MFU at most {no_overlap:.1%}, full attention"
    rows.append(("no overlap", f"{1e3 * plan.no_overlap_seconds / steps:,.3f}", limit))
    lines = [
        textwrap.fill(line, 100, initial_indent="  - ", subsequent_indent="    ")
        for line in assumptions(plan)
    ]
    title = (
        "Roofline: lower bounds on the time of a local step, ms (a round's time / its local steps)"
    )
    return "\n".join([_section(title, rows, right={1}), "", "Assumptions", *lines])


def _section(
    title: str, rows: Sequence[Sequence[str]], right: set[int] | frozenset[int] = frozenset()
) -> str:
    """Format a table under a title; the columns `right` are aligned to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _bytes(count: float) -> str:
    return _scaled(count, ("B", "KB", "MB", "GB", "TB"))


def _bits(bytes_per_second: float) -> str:
    return _scaled(8 * bytes_per_second, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units:
        if number < 1000 or unit == units[-1]:
            break
        number /= 1000
    return f"{number:,.1f} {unit}"
