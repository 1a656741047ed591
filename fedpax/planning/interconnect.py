"""The networks that collectives use, and lower bounds on the time of a collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpax.hlo.collectives import Collective
from fedpax.planning.topology import Topology

ICI = "ICI"  # the links between the chips of a slice
DCN = "DCN"  # the data center's network between slices, or between hosts
NVLINK = "NVLink"
HOST = "host"  # devices that one CPU simulates


class Route(NamedTuple):
    """The network that joins a group of devices, and the part of the torus that they span."""

    # ICI within a slice, DCN between slices, NVLink between the GPUs of a host, "host" between
    # simulated devices.
    network: str
    chips: int  # number of chips in the group; number of slices if the network is DCN
    # Chips along each dimension of the torus that the group spans; () without a torus.
    extents: tuple[int, ...] = ()
    rings: tuple[bool, ...] = ()  # for each dimension, whether the group closes to a ring

    def __str__(self) -> str:
        if self.network == DCN:
            return f"DCN ({self.chips} slices)" if self.chips > 1 else DCN
        spanned = [
            f"{'ring' if ring else 'line'} of {size}"
            for size, ring in zip(self.extents, self.rings, strict=True)
            if size > 1
        ]
        if not spanned:
            return self.network if self.chips > 1 else "within a chip"
        if math.prod(self.extents) != self.chips:  # not a box of the torus
            return f"{self.network} ({self.chips} chips of {' x '.join(map(str, self.extents))})"
        return f"{self.network} ({' x '.join(spanned)})"


def axis_routes(mesh: jax.sharding.Mesh, axis: str, topology: Topology) -> list[Route]:
    """Find the networks along a mesh axis: one, or ICI within slices and then DCN between them."""
    index = mesh.axis_names.index(axis)
    positions = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), index, -1)
    lines = positions.reshape(-1, mesh.devices.shape[index]).tolist()
    devices = mesh.devices.flat
    within: list[list[int]] = []
    between = 1
    for line in lines:
        members: dict[int, list[int]] = {}
        for position in line:
            members.setdefault(slice_or_host(devices[position]), []).append(position)
        within += [part for part in members.values() if len(part) > 1]
        between = max(between, len(members))
    routes = [find_route(within, mesh, topology)] if within else []
    return routes + ([Route(DCN, between)] if between > 1 else [])


def find_route(
    groups: Sequence[Sequence[int]], mesh: jax.sharding.Mesh, topology: Topology
) -> Route:
    """Find the route of the widest of the groups, which are positions in `mesh.devices.flat`."""
    devices = mesh.devices.flat
    parts = max(len({slice_or_host(devices[p]) for p in group}) for group in groups)
    if parts > 1:
        return Route(DCN, parts)
    chips = max(len({_chip(devices[p]) for p in group}) for group in groups)
    if topology.chip is None:
        return Route(HOST, chips)
    shape, multiple = topology.shape, topology.chip.ring_multiple
    if not shape:
        return Route(NVLINK, chips)
    extents = np.ones(len(shape), int)
    for group in groups:
        coords = np.array([devices[p].coords[: len(shape)] for p in group])
        extents = np.maximum(extents, [len(set(coords[:, i])) for i in range(len(shape))])
    rings = [bool(e == n and n % multiple == 0) for e, n in zip(extents, shape, strict=True)]
    return Route(ICI, chips, tuple(extents.tolist()), tuple(rings))


def min_seconds(
    collective: Collective, route: Route, mesh: jax.sharding.Mesh, topology: Topology
) -> float | None:
    """Return a lower bound on the time of a collective; None if the bandwidth is unknown."""
    # The bound is its bytes divided by the bandwidth of the links that it can use. With n chips,
    # operands of b bytes on each, and w bytes per second out of a chip over all links along the
    # group's dimensions:
    # - an all-gather takes (n - 1) b / w;
    # - a reduce-scatter takes (n - 1) / n b / w;
    # - an all-reduce takes both, 2 (n - 1) / n b / w;
    # - a collective-permute takes b / w;
    # - an all-to-all is limited by the links in the middle of the longest dimension: n b / 8 over
    #   one direction of a link on a ring, n b / 4 on a line.
    # A ring uses both directions of its links. On a line, everything that the last chip receives
    # arrives in one direction. Between slices, n is the number of slices, and the participating
    # chips of a slice each send a part. Latency is not counted.
    chip = topology.chip
    if chip is None or route.network == HOST:
        return None
    group = max((set(group) for group in collective.groups), key=len)
    devices = [mesh.devices.flat[position] for position in group]
    chips = len({_chip(device) for device in devices})
    if chips == 1:
        return 0.0
    # Devices of a chip are in the same group, or in different groups that share the chip's links.
    devices_per_chip = len(devices) // chips
    share = devices_per_chip / chip.devices_per_chip
    size = float(collective.bytes)
    if route.network == DCN:
        slices = len({slice_or_host(device) for device in devices})
        bandwidth = chip.dcn_bandwidth * share
        if collective.kind in ("all-reduce", "reduce-scatter"):
            size *= slices / len(devices)
        chips = slices
    elif route.network == NVLINK:
        bandwidth = chip.link_bandwidth * share
    else:
        # A second collective-permute can use the other direction of a line.
        both = collective.kind == "collective-permute"
        spans = [ring for size, ring in zip(route.extents, route.rings, strict=True) if size > 1]
        bandwidth = chip.link_bandwidth * share * sum(2 if ring or both else 1 for ring in spans)
    match collective.kind:
        case "all-gather":
            return (chips - 1) * devices_per_chip * size / bandwidth
        case "reduce-scatter":
            return (chips - 1) / chips * size / bandwidth
        case "all-reduce":
            return 2 * (chips - 1) / chips * size / bandwidth
        case "all-to-all" | "ragged-all-to-all" if route.network == ICI:
            loads = [
                extent / (8 if ring else 4)
                for extent, ring in zip(route.extents, route.rings, strict=True)
            ]
            return max(loads) * devices_per_chip * size / (chip.link_bandwidth * share)
        case "all-to-all" | "ragged-all-to-all":
            return (chips - 1) / chips * devices_per_chip * size / bandwidth
        case _:
            return size / bandwidth


def slice_or_host(device: jax.Device) -> int:
    """Return the index of a TPU's slice or a GPU's host; DCN joins devices that differ in it."""
    if device.platform == "gpu":
        return device.process_index
    return getattr(device, "slice_index", None) or 0


def _chip(device: jax.Device) -> tuple[int, ...]:
    """Return the identity of a device's chip; a TPU chip can have two devices."""
    return (slice_or_host(device), *getattr(device, "coords", (device.id,)))
