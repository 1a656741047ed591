"""What a compiled round needs of the machine it was compiled for, and how fast it can be at best.

Memory, collectives, products and their sizes are read from the compiled program. Times are bounds
from the chip's published figures: what the work takes if one resource alone limits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedpax.hlo import costs, parsing
from fedpax.hlo.collectives import Collective, collectives
from fedpax.planning import interconnect
from fedpax.planning.interconnect import DCN, ICI
from fedpax.planning.topology import Topology


class Workload(NamedTuple):
    """What a round computes, apart from where.

    Attributes:
      experiment: its name.
      placement: the placement's name, also that of its mesh axis.
      participants: its size.
      steps: local steps of a participant in a round.
      parameters: how many numbers the model has.
      tokens: tokens (or examples) of a round, of all participants together.
      flops_per_token: floating-point operations of the model for a token; None if not known.
    """

    experiment: str
    placement: str
    participants: int
    steps: int
    parameters: int
    tokens: int
    flops_per_token: float | None


class Axis(NamedTuple):
    """An axis of the mesh.

    Attributes:
      name: its name.
      size: its size.
      routes: what it runs over, such as ICI within a slice and DCN between slices.
    """

    name: str
    size: int
    routes: tuple[interconnect.Route, ...]


class Memory(NamedTuple):
    """Bytes of a device's memory, by kind.

    Attributes:
      arguments: the state and the batches.
      outputs: the new state and the metrics.
      aliased: what the outputs share with arguments that were donated.
      temporaries: everything between, at its peak.
      code: the program itself.
      host: what it has of the host's memory, beside all these.
      capacity: what a program can have; None if not known.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int
    capacity: float | None

    @property
    def total(self) -> int:
        """All of them together, what is shared once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Whether the device has as much; None if not known.

        That it compiled does not say so: ahead of time the compiler of TPUs looks at temporaries
        alone.
        """
        return None if self.capacity is None else self.total <= self.capacity


class Transfer(NamedTuple):
    """A collective on its network.

    Attributes:
      collective: what is sent, along which axes, how often.
      network: ICI, DCN, NVLink or host.
      seconds: of one execution, at least; None if the bandwidth is not known.
    """

    collective: Collective
    network: str
    seconds: float | None

    @property
    def runs(self) -> int:
        """How often it runs in a round; where only running it can tell, once."""
        return 1 if self.collective.executions is None else self.collective.executions


class Bound(NamedTuple):
    """Seconds that a round takes at least of each resource.

    Attributes:
      compute: products at the chip's peak of their type.
      memory: what is read from and written to the device's memory, at its bandwidth.
      networks: collectives, by what shares links: "DCN", "NVLink", and "ICI fsdp" for all that
        run along that axis of the mesh, be it along others too.
      collectives: all of them, one after another.
    """

    compute: float
    memory: float
    networks: Mapping[str, float]
    collectives: float

    @property
    def times(self) -> dict[str, float]:
        """All of them by name."""
        return {"compute": self.compute, "memory": self.memory, **self.networks}

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(self.times, key=lambda name: self.times[name])

    @property
    def seconds(self) -> float:
        """A round in which everything overlaps."""
        return self.times[self.limit]

    @property
    def without_overlap(self) -> float:
        """A round in which products wait for memory, and both for every collective."""
        return self.compute + self.memory + self.collectives


class Plan(NamedTuple):
    """What `fedpax plan` reports.

    Attributes:
      workload: what is computed.
      topology: on what.
      axes: the mesh.
      memory: of a device.
      products: operations of a device in a round, of the products in the compiled program.
      int8: of these, those of 8-bit integers.
      fp8: of these, those of 8-bit floats.
      traffic: bytes that a device reads from and writes to its memory in a round.
      host: bytes that it moves to and from its host's memory in a round.
      silent: names of kernels whose products are not counted, as they do not tell them.
      once: names of loops of unknown length, of which one turn is counted.
      transfers: the collectives.
      bound: the roofline; None if the chip's figures are not known.
    """

    workload: Workload
    topology: Topology
    axes: tuple[Axis, ...]
    memory: Memory
    products: float
    int8: float
    fp8: float
    traffic: float
    host: float
    silent: tuple[str, ...]
    once: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    bound: Bound | None

    def sent(
        self, network: str | None = None, axis: str | None = None, in_loop: bool | None = None
    ) -> int:
        """Bytes that a device hands to collectives in a round.

        Args:
          network: only over this network, such as `interconnect.DCN`.
          axis: only along this axis of the mesh, such as the placement's.
          in_loop: only those inside a loop, or only those outside.

        Returns:
          Bytes.
        """
        return sum(
            transfer.collective.bytes * transfer.runs
            for transfer in self.transfers
            if network in (None, transfer.network)
            and (axis is None or axis in transfer.collective.axes)
            and in_loop in (None, transfer.collective.in_loop)
        )

    def utilization(self, seconds: float) -> float | None:
        """Model FLOPs utilization of a round that takes so long; None if something is not known."""
        flops, chip = self.workload.flops_per_token, self.topology.chip
        if flops is None or chip is None:
            return None
        peak = self.topology.chips * chip.peak_flops
        return flops * self.workload.tokens / (peak * seconds)

    @property
    def hidden_bandwidth(self) -> float | None:
        """Bytes a second out of a chip at which DCN takes as long as the rest of the round.

        From there on, what crosses between slices can hide behind the local steps. None if
        nothing crosses, or if the chip is not known.
        """
        chip = self.topology.chip
        if self.bound is None or chip is None:
            return None
        within = {name: time for name, time in self.bound.networks.items() if name != DCN}
        if DCN not in self.bound.networks:
            return None
        rest = self.bound._replace(networks=within).seconds
        return self.bound.networks[DCN] * chip.network_bandwidth / rest


def memory_of(compiled: jax.stages.Compiled, topology: Topology) -> Memory:
    """Reads from a compiled program what memory a device needs for it."""
    found: Any = compiled.memory_analysis()
    chip = topology.chip
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
        host=found.host_temp_size_in_bytes,
        capacity=chip.usable / chip.devices if chip else None,
    )


def make_plan(
    text: str, mesh: jax.sharding.Mesh, topology: Topology, workload: Workload, memory: Memory
) -> Plan:
    """Reads a plan from the text of a compiled round.

    Args:
      text: the round's compiled text.
      mesh: the mesh that it was compiled for.
      topology: what the mesh's devices are.
      workload: what the round computes.
      memory: what it needs on a device, from `memory_of`.

    Returns:
      The plan.

    Raises:
      ValueError: the text is not a compiled program, or of another number of devices.
    """
    transfers = []
    for collective in collectives(text, mesh):
        path = interconnect.route(collective.groups, mesh, topology)
        seconds = interconnect.seconds(collective, path, mesh, topology)
        transfers.append(Transfer(collective, path.network, seconds))
    done = costs.count(parsing.read(text))
    axes = tuple(
        Axis(name, size, tuple(interconnect.axis_routes(mesh, name, topology)))
        for name, size in mesh.shape.items()
    )
    plan = Plan(
        workload=workload,
        topology=topology,
        axes=axes,
        memory=memory,
        products=done.products,
        int8=done.int8,
        fp8=done.fp8,
        traffic=done.traffic,
        host=done.host,
        silent=done.silent,
        once=done.once,
        transfers=tuple(transfers),
        bound=None,
    )
    return plan._replace(bound=_bound(plan))


def _bound(plan: Plan) -> Bound | None:
    chip = plan.topology.chip
    if chip is None:
        return None
    times: dict[str, float] = {}
    for transfer in plan.transfers:
        names = [transfer.network]
        if transfer.network == ICI:
            names = [f"{ICI} {axis}" for axis in transfer.collective.axes]
        for name in names:
            times[name] = times.get(name, 0.0) + transfer.runs * (transfer.seconds or 0.0)
    wide = plan.products - plan.int8 - plan.fp8
    compute = wide / chip.peak_flops + plan.int8 / chip.int8 + plan.fp8 / chip.fp8
    return Bound(
        compute=compute * chip.devices,
        memory=plan.traffic / (chip.memory_bandwidth / chip.devices),
        networks=times,
        collectives=sum(t.runs * (t.seconds or 0.0) for t in plan.transfers),
    )
