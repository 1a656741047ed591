"""A plan as values for JSON."""

from __future__ import annotations

from typing import Any

from fedpax.planning.compiled_plan import CompiledPlan
from fedpax.planning.overlap import Overlap
from fedpax.planning.text_report import assumptions
from fedpax.planning.topology import DCN


def to_json(plan: CompiledPlan) -> dict[str, Any]:
    """Convert a plan to values that JSON can represent: plain numbers; unknown ones are None.

    Bytes of collectives are the bytes of their operands (`CompiledPlan.operand_bytes`).
    """
    topology, chip = plan.topology, plan.topology.chip
    return {
        "experiment": plan.workload.experiment,
        "topology": {
            "name": topology.name,
            "slices": topology.slices,
            "chips": topology.chips,
            "devices": len(topology.devices),
            "chip": None if chip is None else chip._asdict(),
        },
        "mesh_devices": plan.num_devices,
        "mesh": {
            axis.name: {"size": axis.size, "networks": [str(route) for route in axis.routes]}
            for axis in plan.axes
        },
        "placement": {
            "name": plan.workload.placement,
            "num_participants": plan.workload.num_participants,
            **_operand_bytes(plan, axis=plan.workload.placement),
        },
        "memory": {
            **plan.memory._asdict(),
            "total": plan.memory.total,
            "fits": plan.memory.fits,
        },
        "computation": _computation(plan),
        "collectives": [
            {
                "name": timed.collective.name,
                "kind": timed.collective.kind,
                "axes": list(timed.collective.axes),
                "network": timed.network,
                "operands": list(timed.collective.shapes),
                "operand_bytes_per_device_per_execution": timed.collective.bytes,
                "min_seconds_per_execution": timed.seconds,
                "executions_per_round": timed.collective.executions,
                "in_loop": timed.collective.in_loop,
            }
            for timed in plan.collectives
        ],
        "between_slices": {
            **_operand_bytes(plan, network=DCN),
            "bytes_per_second_per_chip_for_overlap": plan.bandwidth_for_overlap,
            "overlap": None if plan.overlap is None else _overlap(plan.overlap),
        },
        "roofline": _roofline(plan),
    }


def _operand_bytes(
    plan: CompiledPlan, network: str | None = None, axis: str | None = None
) -> dict[str, float]:
    total = plan.operand_bytes(network, axis)
    return {
        "operand_bytes_per_device_per_round": total,
        "operand_bytes_per_device_per_step": total / plan.workload.local_steps,
        "operand_bytes_per_device_per_round_inside_loops": plan.operand_bytes(
            network, axis, in_loop=True
        ),
    }


def _overlap(overlap: Overlap) -> dict[str, Any]:
    return {
        "bytes_per_second_out_of_slice": overlap.bandwidth,
        "seconds_per_step": overlap.step_seconds,
        "exposed_seconds_per_round": overlap.exposed_seconds,
        "compute_utilization": overlap.compute_utilization,
        "bytes_out_of_slice_per_round": overlap.bytes_per_round,
        "mean_bytes_per_second": overlap.mean_bytes_per_second,
        "peak_bytes_per_second": overlap.peak_bytes_per_second,
        "required_bytes_per_second": {
            f"{share:.0%}": needed for share, needed in overlap.required_bandwidth.items()
        },
        "transfers": [
            {
                "name": transfer.name,
                "bytes_out_of_slice_per_execution": transfer.bytes,
                "executions_per_round": transfer.executions,
                "in_loop": transfer.in_loop,
                "starts_after_step": None if transfer.in_loop else transfer.start,
                "local_steps": transfer.local_steps,
                "exposed_seconds_per_round": transfer.exposed_seconds,
            }
            for transfer in overlap.transfers
        ],
    }


def _computation(plan: CompiledPlan) -> dict[str, Any]:
    workload = plan.workload
    items_per_step = workload.items_per_round / workload.local_steps
    per_item = workload.flops_per_item
    return {
        "num_parameters": workload.num_parameters,
        "local_steps": workload.local_steps,
        "item_unit": workload.item_unit,
        "items_per_step": items_per_step,
        "items_per_round": workload.items_per_round,
        "model_flops_per_item": per_item,
        "model_flops_per_step": None if per_item is None else per_item * items_per_step,
        "compiled_matmul_flops_per_device_per_round": plan.matmul_flops,
        "compiled_int8_flops_per_device_per_round": plan.int8_flops,
        "compiled_fp8_flops_per_device_per_round": plan.fp8_flops,
        "memory_traffic_bytes_per_device_per_round": plan.memory_traffic,
        "host_transfer_bytes_per_device_per_round": plan.host_transfers,
        "uncounted_kernels": list(plan.uncounted_kernels),
        "loops_of_unknown_trip_count": list(plan.unknown_trip_counts),
    }


def _roofline(plan: CompiledPlan) -> dict[str, Any] | None:
    roofline, steps = plan.roofline, plan.workload.local_steps
    if roofline is None:
        return None
    return {
        "bottleneck": roofline.bottleneck,
        "min_seconds_per_step": plan.full_overlap_seconds / steps,
        "min_seconds_per_step_without_overlap": plan.no_overlap_seconds / steps,
        "min_seconds_per_round": roofline.times | {"all collectives": roofline.collective_seconds},
        "max_model_flops_utilization": plan.model_flops_utilization(plan.full_overlap_seconds),
        "max_model_flops_utilization_without_overlap": plan.model_flops_utilization(
            plan.no_overlap_seconds
        ),
        "assumptions": assumptions(plan),
    }
