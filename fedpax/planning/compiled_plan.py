"""The plan of a compiled round: memory, matmuls, collectives, and lower bounds of its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedpax.hlo import costs, parsing, transfer_schedule
from fedpax.hlo.collectives import Collective, collectives
from fedpax.planning.overlap import Overlap, find_overlap
from fedpax.planning.topology import (
    DCN,
    ICI,
    Route,
    Topology,
    axis_routes,
    find_route,
    min_seconds,
    slice_or_host,
)


class RoundWorkload(NamedTuple):
    """The work of a round, independent of the devices."""

    experiment: str
    placement: str  # also the name of its mesh axis
    num_participants: int
    local_steps: int
    num_parameters: int
    items_per_round: int  # summed over all participants
    item_unit: str  # "tokens" or "examples"
    flops_per_item: float | None  # None if unknown


class MeshAxis(NamedTuple):
    """An axis of the mesh and the networks that its collectives use."""

    name: str
    size: int
    routes: tuple[Route, ...]


class DeviceMemory(NamedTuple):
    """The memory that a round needs on one device, in bytes."""

    arguments: int  # the state and the cohort
    outputs: int  # the new state and the metrics
    aliased: int  # the part of the outputs that reuses the memory of donated arguments
    temporaries: int
    code: int
    host: int  # not part of `total`
    capacity: float | None  # None if unknown

    @property
    def total(self) -> int:
        """Bytes needed on the device; aliased memory counts once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Compare `total` with `capacity`; None if the capacity is unknown."""
        # A successful compilation does not imply it: ahead of time, the compiler of TPUs checks the
        # temporaries alone.
        return None if self.capacity is None else self.total <= self.capacity


class TimedCollective(NamedTuple):
    """A collective, its network, and a lower bound on its time."""

    collective: Collective
    network: str  # "ICI", "DCN", "NVLink" or "host"
    # A lower bound; None if the bandwidth is unknown.
    seconds: float | None

    @property
    def executions(self) -> int:
        """Number of executions per round; 1 if the number is known only at run time."""
        return 1 if self.collective.executions is None else self.collective.executions


class Roofline(NamedTuple):
    """Lower bounds on the seconds of a round, one for each resource."""

    compute_seconds: float  # all matmuls, at the chip's peak for their dtype
    memory_seconds: float  # at the device memory's bandwidth
    # Collectives by the links that they share: "DCN", "NVLink", and "ICI fsdp" for all collectives
    # along that mesh axis. A collective along several axes counts for each.
    network_seconds: Mapping[str, float]
    collective_seconds: float  # all collectives, one after another

    @property
    def times(self) -> dict[str, float]:
        """Seconds by the name of the resource."""
        return {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            **self.network_seconds,
        }

    @property
    def bottleneck(self) -> str:
        """Name of the resource with the largest bound."""
        return max(self.times, key=lambda name: self.times[name])

    @property
    def full_overlap_seconds(self) -> float:
        """Seconds of a round in which all resources overlap."""
        return self.times[self.bottleneck]

    @property
    def seconds_within_slices(self) -> float:
        """Seconds of a round in which all resources but DCN overlap."""
        return max(time for name, time in self.times.items() if name != DCN)

    @property
    def no_overlap_seconds(self) -> float:
        """Seconds of a round in which matmuls, memory and collectives follow one another."""
        return self.compute_seconds + self.memory_seconds + self.collective_seconds


class CompiledPlan(NamedTuple):
    """The content of the report of `fedpax plan`.

    Attributes:
        axes: the mesh axes of more than one device; the first axis on a mesh of one device.
        memory: memory needed on a device.
        matmul_flops: FLOPs of a device's matmuls and convolutions in a round, recomputation
            included.
        int8_flops: the part of them with 8-bit integer operands.
        fp8_flops: the part of them with 8-bit float operands.
        memory_traffic: bytes that a device reads from and writes to its memory in a round.
        host_transfers: bytes that a device exchanges with the host's memory in a round.
        uncounted_kernels: names of kernels that do not state their FLOPs; they count as 0.
        unknown_trip_counts: names of loops of unknown trip count, whose bodies count once.
        collectives: the collectives of the compiled program.
        roofline: lower bounds on the time of a round; None if the chip's specifications are
            unknown.
        overlap: the transfers between slices and the local steps that hide them; None without
            transfers, matmuls or specifications.
    """

    workload: RoundWorkload
    topology: Topology
    axes: tuple[MeshAxis, ...]
    memory: DeviceMemory
    matmul_flops: float
    int8_flops: float
    fp8_flops: float
    memory_traffic: float
    host_transfers: float
    uncounted_kernels: tuple[str, ...]
    unknown_trip_counts: tuple[str, ...]
    collectives: tuple[TimedCollective, ...]
    roofline: Roofline | None
    overlap: Overlap | None

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh; the topology can have more."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def full_overlap_seconds(self) -> float:
        """Seconds of a round in which everything overlaps but exposed transfers between slices."""
        assert self.roofline is not None
        exposed = 0.0 if self.overlap is None else self.overlap.exposed_seconds
        hidden = self.roofline.full_overlap_seconds
        return max(hidden, self.roofline.seconds_within_slices + exposed)

    @property
    def no_overlap_seconds(self) -> float:
        """Seconds of a round without overlap, at the bandwidth out of a slice."""
        assert self.roofline is not None
        seconds = self.roofline.no_overlap_seconds
        if self.overlap is None:
            return seconds
        transfers = self.overlap.bytes_per_round / self.overlap.bandwidth
        return seconds + max(0.0, transfers - self.roofline.network_seconds.get(DCN, 0.0))

    def operand_bytes(
        self, network: str | None = None, axis: str | None = None, in_loop: bool | None = None
    ) -> int:
        """Sum the bytes of the operands that a device passes to collectives in a round.

        In a ring all-reduce over n devices, a device sends 2 (n - 1) / n times the operand; bounds
        on time include this factor.

        Args:
            network: count collectives over this network alone, such as `DCN`. Default None: all.
            axis: count collectives along this mesh axis alone. Default None: all.
            in_loop: True counts collectives inside loops alone, False outside loops alone. Default
                None: both.
        """
        return sum(
            timed.collective.bytes * timed.executions
            for timed in self.collectives
            if network in (None, timed.network)
            and (axis is None or axis in timed.collective.axes)
            and in_loop in (None, timed.collective.in_loop)
        )

    def model_flops_utilization(self, seconds: float) -> float | None:
        """Return the model FLOPs utilization of a round that takes `seconds`.

        None if the model FLOPs or the chip's peak are unknown.
        """
        flops, chip = self.workload.flops_per_item, self.topology.chip
        if flops is None or chip is None:
            return None
        peak = self.num_devices / chip.devices_per_chip * chip.peak_flops
        return flops * self.workload.items_per_round / (peak * seconds)

    @property
    def bandwidth_for_overlap(self) -> float | None:
        """DCN bandwidth per chip, in bytes per second, that DCN collectives need to be hidden.

        Collectives over DCN then take as long as the largest other bound. None: no DCN, or an
        unknown chip.
        """
        chip = self.topology.chip
        if self.roofline is None or chip is None or DCN not in self.roofline.network_seconds:
            return None
        rest = self.roofline.seconds_within_slices
        return self.roofline.network_seconds[DCN] * chip.dcn_bandwidth / rest


def memory_of(compiled: jax.stages.Compiled, topology: Topology) -> DeviceMemory:
    """Read the memory in bytes that a compiled program needs on a device."""
    analysis: Any = compiled.memory_analysis()
    chip = topology.chip
    return DeviceMemory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        host=analysis.host_temp_size_in_bytes,
        capacity=chip.usable_hbm_bytes / chip.devices_per_chip if chip else None,
    )


def make_plan(
    text: str,
    mesh: jax.sharding.Mesh,
    topology: Topology,
    workload: RoundWorkload,
    memory: DeviceMemory,
    slice_bandwidth: float | None = None,
) -> CompiledPlan:
    """Make the plan of a round from its compiled text."""
    # `slice_bandwidth`: bytes per second out of a slice; None: the published bandwidth of its chips
    # together.
    timed = []
    for collective in collectives(text, mesh):
        route = find_route(collective.groups, mesh, topology)
        seconds = min_seconds(collective, route, mesh, topology)
        timed.append(TimedCollective(collective, route.network, seconds))
    module = parsing.parse(text)
    counted = costs.count_costs(module)
    # An axis of one device has no collectives.
    axes = [item for item in mesh.shape.items() if item[1] > 1] or list(mesh.shape.items())[:1]
    plan = CompiledPlan(
        workload=workload,
        topology=topology,
        axes=tuple(
            MeshAxis(name, size, tuple(axis_routes(mesh, name, topology))) for name, size in axes
        ),
        memory=memory,
        **counted._asdict(),
        collectives=tuple(timed),
        roofline=None,
        overlap=None,
    )
    plan = plan._replace(roofline=_roofline(plan))
    return plan._replace(overlap=_overlap(plan, module, mesh, slice_bandwidth))


def _roofline(plan: CompiledPlan) -> Roofline | None:
    chip = plan.topology.chip
    if chip is None:
        return None
    networks: dict[str, float] = {}
    for timed in plan.collectives:
        names = [timed.network]
        if timed.network == ICI:
            names = [f"{ICI} {axis}" for axis in timed.collective.axes]
        for name in names:
            networks[name] = networks.get(name, 0.0) + timed.executions * (timed.seconds or 0.0)
    wide = plan.matmul_flops - plan.int8_flops - plan.fp8_flops
    compute = (
        wide / chip.peak_flops
        + plan.int8_flops / chip.peak_int8_ops
        + plan.fp8_flops / chip.peak_fp8_flops
    )
    return Roofline(
        compute_seconds=compute * chip.devices_per_chip,
        memory_seconds=plan.memory_traffic / (chip.hbm_bandwidth / chip.devices_per_chip),
        network_seconds=networks,
        collective_seconds=sum(t.executions * (t.seconds or 0.0) for t in plan.collectives),
    )


def _overlap(
    plan: CompiledPlan, module: parsing.Module, mesh: jax.sharding.Mesh, bandwidth: float | None
) -> Overlap | None:
    chip, topology = plan.topology.chip, plan.topology
    if plan.roofline is None or chip is None:
        return None
    steps = plan.workload.local_steps
    return find_overlap(
        transfer_schedule.schedule(module),
        {
            timed.collective.name: _bytes_out_of_slice(timed, mesh, topology)
            for timed in plan.collectives
            if timed.network == DCN
        },
        num_steps=steps,
        step_seconds=plan.roofline.seconds_within_slices / steps,
        bandwidth=bandwidth or chip.dcn_bandwidth * topology.chips / topology.slices,
    )


def _bytes_out_of_slice(
    timed: TimedCollective, mesh: jax.sharding.Mesh, topology: Topology
) -> float:
    """Return the bytes that leave the slice which sends most, in one execution; a lower bound."""
    chip, collective = topology.chip, timed.collective
    assert chip is not None and timed.seconds is not None
    permute = collective.kind == "collective-permute"
    senders = {member for group in collective.groups for member in group[: 1 if permute else None]}
    by_slice = Counter(slice_or_host(mesh.devices.flat[s]) for s in senders)
    return timed.seconds * chip.dcn_bandwidth * max(by_slice.values()) / chip.devices_per_chip
