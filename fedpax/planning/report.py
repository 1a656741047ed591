"""A plan as text to read and as values for JSON."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from fedpax.planning.compiled_plan import Plan, Transfer
from fedpax.planning.interconnect import DCN

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def to_text(plan: Plan) -> str:
    """Writes a plan as text.

    Args:
      plan: the plan.

    Returns:
      Lines, under headings.
    """
    parts = [_head(plan), _mesh(plan), _memory(plan), _work(plan), _collectives(plan)]
    parts += [_between(plan), _bound(plan)]
    return "\n\n".join(parts) + "\n"


def to_json(plan: Plan) -> dict[str, Any]:
    """Turns a plan into values that JSON can hold.

    Args:
      plan: the plan.

    Returns:
      Nested dicts and lists; bytes, seconds and FLOPs as plain numbers, None for what is unknown.
    """
    workload, topology, chip = plan.workload, plan.topology, plan.topology.chip
    bound = plan.bound
    return {
        "experiment": workload.experiment,
        "topology": {
            "name": topology.name,
            "slices": topology.slices,
            "chips": topology.chips,
            "devices": len(topology.devices),
            "chip": None if chip is None else chip._asdict(),
        },
        "mesh": {
            axis.name: {"size": axis.size, "networks": [str(route) for route in axis.routes]}
            for axis in plan.axes
        },
        "placement": {
            "name": workload.placement,
            "participants": workload.participants,
            "bytes_per_device_per_round": plan.sent(axis=workload.placement),
            "bytes_per_device_inside_loops": plan.sent(axis=workload.placement, in_loop=True),
        },
        "memory": {
            **plan.memory._asdict(),
            "total": plan.memory.total,
            "fits": plan.memory.fits,
        },
        "work": {
            "parameters": workload.parameters,
            "local_steps": workload.steps,
            "tokens_per_step": workload.tokens / workload.steps,
            "items_per_round": workload.tokens,
            "flops_per_token": workload.flops_per_token,
            "flops_per_step": _times(workload.flops_per_token, workload.tokens / workload.steps),
            "compiled_flops_per_device_per_round": plan.products,
            "of_these_in_int8": plan.int8,
            "of_these_in_fp8": plan.fp8,
            "host_transfers_per_device_per_round": plan.host,
            "memory_traffic_per_device_per_round": plan.traffic,
            "kernels_not_counted": list(plan.silent),
            "loops_counted_once": list(plan.once),
        },
        "collectives": [
            {
                "kind": transfer.collective.kind,
                "axes": list(transfer.collective.axes),
                "network": transfer.network,
                "bytes": transfer.collective.bytes,
                "shapes": list(transfer.collective.shapes),
                "in_loop": transfer.collective.in_loop,
                "executions_per_round": transfer.collective.executions,
                "seconds": transfer.seconds,
                "name": transfer.collective.name,
            }
            for transfer in plan.transfers
        ],
        "between_slices": {
            "bytes_per_device_per_round": plan.sent(DCN),
            "bytes_per_device_per_step": plan.sent(DCN) / workload.steps,
            "bytes_per_device_inside_loops": plan.sent(DCN, in_loop=True),
            "hidden_from_bytes_per_second_per_chip": plan.hidden_bandwidth,
        },
        "bound": None
        if bound is None
        else {
            "seconds_per_step": bound.seconds / workload.steps,
            "seconds_per_step_without_overlap": bound.without_overlap / workload.steps,
            "limit": bound.limit,
            "seconds_per_round": bound.times | {"all collectives": bound.collectives},
            "model_flops_utilization": plan.utilization(bound.seconds),
            "model_flops_utilization_without_overlap": plan.utilization(bound.without_overlap),
            "assumptions": assumptions(plan),
        },
    }


def assumptions(plan: Plan) -> list[str]:
    """What the bound on time takes for granted.

    Args:
      plan: the plan, of a chip whose figures are known.

    Returns:
      Sentences.
    """
    chip = plan.topology.chip
    if chip is None:
        return []
    narrow = [("int8", plan.int8, chip.int8), ("fp8", plan.fp8, chip.fp8)]
    others = "".join(
        f", those in {name} at {peak / 1e12:,.0f}" for name, count, peak in narrow if count
    )
    lines = [
        f"Products run at the chip's bfloat16 peak, {chip.peak_flops / 1e12:,.0f} TFLOP/s{others}, "
        "and those counted are the compiled program's, with what is computed again.",
        f"A device's memory moves {chip.memory_bandwidth / chip.devices / 1e9:,.0f} GB/s.",
    ]
    if chip.dimensions:
        lines.append(
            f"A chip has {chip.links} links of {chip.link_bandwidth / 1e9:,.0f} GB/s in each "
            "direction. A collective uses those along its own axes, both directions of a ring, and "
            "its steps take no time but that of their bytes."
        )
    else:
        lines.append(f"NVLink carries {chip.link_bandwidth / 1e9:,.0f} GB/s out of a GPU.")
    if plan.sent(DCN):
        lines.append(
            f"Between slices a chip sends {_bits(chip.network_bandwidth)}, its share of its host's "
            "network, and the slices form a ring."
        )
    if plan.int8 or plan.fp8:
        lines.append("MFU is the share of the bfloat16 peak, so that it can be more than 100%.")
    if plan.host:
        lines.append(
            "Transfers between a device and its host's memory take no time: what the links between "
            "them carry is not published."
        )
    if any(transfer.collective.executions is None for transfer in plan.transfers):
        lines.append("A collective that runs an unknown number of times is counted once.")
    if plan.once:
        lines.append(
            f"{len(plan.once)} loops run as often as the data say; of each, one turn is counted, "
            "so that what takes longer is not bounded."
        )
    if plan.silent:
        lines.append(
            f"{len(plan.silent)} kernels do not say how many products they compute, and take no "
            f"time here: {', '.join(plan.silent)}."
        )
    return [*lines, f"Published figures of {chip.name}: {chip.source}."]


def _head(plan: Plan) -> str:
    topology = plan.topology
    count = f"{topology.chips:,} chips" if topology.chip else f"{len(topology.devices):,} devices"
    where = ""
    if topology.slices > 1:
        where = f" in {topology.slices} slices"
    if topology.chip and topology.chip.devices > 1:
        count += f" ({len(topology.devices):,} devices)"
    return f"{plan.workload.experiment} on {topology.name}: {count}{where}"


def _mesh(plan: Plan) -> str:
    rows = [
        (axis.name, f"{axis.size:,}", " + ".join(map(str, axis.routes)) or "-")
        for axis in plan.axes
    ]
    workload = plan.workload
    if workload.participants > 1 and workload.placement not in [axis.name for axis in plan.axes]:
        rows.append((workload.placement, "-", "no axis of the mesh: one after another"))
    return _section("Mesh", [("axis", "size", "network"), *rows], right={1})


def _memory(plan: Plan) -> str:
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
        ("arguments", size(memory.arguments), "the state and the batches"),
        ("outputs", size(memory.outputs), "the new state and the metrics"),
        ("shared", f"-{size(memory.aliased)}", "outputs in the place of donated arguments"),
        ("temporaries", size(memory.temporaries), "all between, at its peak"),
        ("program", size(memory.code), ""),
        ("together", size(memory.total), fits),
    ]
    if memory.host:
        rows.append(("on the host", size(memory.host), "activations offloaded, and the like"))
    return _section(f"Memory of a device, {unit}", rows, right={1})


def _work(plan: Plan) -> str:
    workload = plan.workload
    step = workload.tokens / workload.steps
    rows = [
        ("parameters", f"{workload.parameters:,}", ""),
        ("local steps", f"{workload.steps:,}", "in a round"),
        (
            "tokens",
            f"{step:,.0f}",
            f"a step, {workload.tokens:,} a round, of all {workload.placement} together",
        ),
    ]
    if workload.flops_per_token is None:
        rows.append(("FLOPs a token", "unknown", "the experiment's Run has no flops_per_token"))
    else:
        model = workload.flops_per_token * workload.tokens
        again = plan.products * len(plan.topology.devices) / model
        rows += [
            (
                "FLOPs a token",
                f"{workload.flops_per_token:.4g}",
                "6 N + 12 L H d T, T at most the window",
            ),
            ("FLOPs a step", f"{workload.flops_per_token * step:.4g}", "of all devices"),
            ("compiled", f"{again:.2f} x", "products in the program, with those computed again"),
        ]
    narrow = {"int8": plan.int8, "fp8": plan.fp8}
    rows += [
        (f"in {name}", f"{of_type / plan.products:.1%}", "of these products")
        for name, of_type in narrow.items()
        if of_type
    ]
    if plan.host:
        moved = f"{plan.host / workload.steps:,.0f}"
        rows.append(("host transfers", moved, "bytes a step, between a device and its host"))
    return _section("Work", rows, right={1})


def _collectives(plan: Plan) -> str:
    """Every collective, those on one line that differ in how often they run alone."""
    rows: list[tuple[str, ...]] = [
        ("kind", "axes", "network", "bytes", "ms", "number", "runs a round", "in a loop")
    ]

    def key(transfer: Transfer) -> tuple:
        one = transfer.collective
        known = one.executions is not None
        return (not one.in_loop, transfer.network, one.axes, one.kind, -one.bytes, known)

    for _, same in itertools.groupby(sorted(plan.transfers, key=key), key):
        group = list(same)
        one, seconds = group[0].collective, group[0].seconds
        runs = sum(transfer.runs for transfer in group)
        rows.append(
            (
                one.kind,
                ", ".join(one.axes),
                group[0].network,
                f"{one.bytes:,}",
                "-" if seconds is None else f"{1e3 * seconds:,.3f}",
                f"{len(group):,}",
                "unknown" if one.executions is None else f"{runs:,}",
                "yes" if one.in_loop else "no",
            )
        )
    if len(rows) == 1:
        return "Collectives\n  none"
    title = "Collectives: bytes and least time of each, how many there are and run, of a device"
    return _section(title, rows, right={3, 4, 5, 6})


def _between(plan: Plan) -> str:
    """What crosses between slices, and between participants, be they slices or not."""
    workload, chip, topology = plan.workload, plan.topology.chip, plan.topology
    parts = []
    sent, along = plan.sent(DCN), plan.sent(axis=workload.placement)
    if along and along != sent:
        inside = plan.sent(axis=workload.placement, in_loop=True)
        parts.append(_section(f"Between {workload.placement}", _crossing(plan, along, inside)))
    if not sent:
        return "\n\n".join([*parts, "Between slices\n  nothing crosses"])
    rows = _crossing(plan, sent, plan.sent(DCN, in_loop=True))
    devices = len(topology.devices) // topology.slices
    rows.insert(1, ("", f"{_bytes(sent * devices)} a slice", ""))
    hidden = plan.hidden_bandwidth
    if hidden is not None and chip is not None:
        chips = topology.chips // topology.slices
        rows += [
            ("hidden from", f"{_bits(hidden)} a chip", "if it overlaps with the whole round"),
            ("", f"{_bits(hidden * chips)} a slice", ""),
            ("there is", f"{_bits(chip.network_bandwidth)} a chip", f"{chip.name}, as published"),
        ]
    return "\n\n".join([*parts, _section("Between slices", rows)])


def _crossing(plan: Plan, sent: int, inside: int) -> list[tuple[str, str, str]]:
    steps = plan.workload.steps
    return [
        ("a round", f"{sent:,} bytes a device", ""),
        ("a step", f"{sent / steps:,.0f} bytes a device", f"of {steps:,} in a round"),
        ("inside a loop", f"{inside:,} bytes a device", ""),
    ]


def _bound(plan: Plan) -> str:
    bound, steps = plan.bound, plan.workload.steps
    if bound is None:
        return (
            "Bound on time\n  none: the figures of this device are not known "
            "(fedpax/parallel/chips.py has those of TPUs and some GPUs)"
        )
    rows = [(name, f"{1e3 * time / steps:,.3f}", "") for name, time in bound.times.items()]
    for name, seconds in (
        ("overlapping", bound.seconds),
        ("one by one", bound.without_overlap),
    ):
        share = plan.utilization(seconds)
        at = "" if share is None else f"MFU {share:.1%}, full attention"
        if name == "overlapping":
            at = f"limited by {bound.limit}" + (f": at most {at}" if at else "")
        rows.append((name, f"{1e3 * seconds / steps:,.3f}", at))
    lines = [
        textwrap.fill(line, 100, initial_indent="  - ", subsequent_indent="    ")
        for line in assumptions(plan)
    ]
    table = _section("Bound on a step, ms (a round's, divided by its steps)", rows, right={1})
    return "\n".join([table, "", "Assumptions", *lines])


def _section(
    title: str, rows: Sequence[Sequence[str]], right: set[int] | frozenset[int] = frozenset()
) -> str:
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
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.1f} {unit}"


def _bits(bytes_per_second: float) -> str:
    rate = 8 * bytes_per_second
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"):
        if rate < 1000 or unit == "Tbit/s":
            break
        rate /= 1000
    return f"{rate:,.1f} {unit}"


def _times(left: float | None, right: float) -> float | None:
    return None if left is None else left * right
