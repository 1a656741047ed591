"""Over which network a collective goes, and how long it takes there at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpax.hlo.collectives import Collective
from fedpax.planning.topology import Topology

ICI = "ICI"  # the links between the chips of a slice
DCN = "DCN"  # the data centre's network between slices, or hosts
NVLINK = "NVLink"
HOST = "host"  # devices that one CPU simulates


class Route(NamedTuple):
    """How a group of devices is joined.

    Attributes:
      network: ICI within a slice, DCN between slices, NVLink between the GPUs of a host, "host"
        between simulated devices.
      chips: how many chips the group has, or slices if it goes between them.
      extents: chips along each dimension of the torus that the group spans; () without a torus.
      rings: of these dimensions, which close to a ring.
    """

    network: str
    chips: int
    extents: tuple[int, ...] = ()
    rings: tuple[bool, ...] = ()

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
    """The networks that an axis of a mesh runs over: one, or ICI within slices and DCN between.

    Args:
      mesh: the mesh.
      axis: name of one of its axes.
      topology: what its devices are.

    Returns:
      The routes, DCN last.
    """
    index = mesh.axis_names.index(axis)
    positions = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), index, -1)
    lines = positions.reshape(-1, mesh.devices.shape[index]).tolist()
    devices = mesh.devices.flat
    within: list[list[int]] = []
    between = 1
    for line in lines:
        members: dict[int, list[int]] = {}
        for position in line:
            members.setdefault(_network_part(devices[position]), []).append(position)
        within += [part for part in members.values() if len(part) > 1]
        between = max(between, len(members))
    found = [route(within, mesh, topology)] if within else []
    return found + ([Route(DCN, between)] if between > 1 else [])


def route(groups: Sequence[Sequence[int]], mesh: jax.sharding.Mesh, topology: Topology) -> Route:
    """How the devices of a collective's groups are joined.

    Args:
      groups: positions in `mesh.devices.flat`, as `Collective.groups` has them.
      mesh: the mesh.
      topology: what its devices are.

    Returns:
      The route of the widest of the groups.
    """
    devices = mesh.devices.flat
    parts = max(len({_network_part(devices[p]) for p in group}) for group in groups)
    if parts > 1:
        return Route(DCN, parts)
    chips = max(len({_chip(devices[p]) for p in group}) for group in groups)
    if topology.chip is None:
        return Route(HOST, chips)
    shape, ring = topology.shape, topology.chip.ring
    if not shape:
        return Route(NVLINK, chips)
    extents = np.ones(len(shape), int)
    for group in groups:
        places = np.array([devices[p].coords[: len(shape)] for p in group])
        extents = np.maximum(extents, [len(set(places[:, i])) for i in range(len(shape))])
    rings = [bool(e == n and n % ring == 0) for e, n in zip(extents, shape, strict=True)]
    return Route(ICI, chips, tuple(extents.tolist()), tuple(rings))


def seconds(
    collective: Collective, path: Route, mesh: jax.sharding.Mesh, topology: Topology
) -> float | None:
    """How long one execution of a collective takes at least: its bytes over the links it can use.

    With n chips that hand over b bytes each, and w bytes a second leaving a chip over all the
    links along the group's dimensions: an all-gather takes (n - 1) b / w, a reduce-scatter
    (n - 1) / n b / w, an all-reduce both, 2 (n - 1) / n b / w, a permutation b / w. An all-to-all
    is bound by the links in the middle of the longest dimension: n b / 8 over one direction of a
    link on a ring, n b / 4 on a line. On a ring both directions carry; on a line all that the last
    chip receives comes in one. Between slices n counts the slices, and the chips of a slice that
    take part each carry a part. Latency is not counted.

    Args:
      collective: the collective.
      path: its `route`.
      mesh: the mesh.
      topology: what its devices are.

    Returns:
      Seconds, or None where the network's bandwidth is not known.
    """
    chip = topology.chip
    if chip is None or path.network == HOST:
        return None
    group = max((set(group) for group in collective.groups), key=len)
    devices = [mesh.devices.flat[position] for position in group]
    chips = len({_chip(device) for device in devices})
    if chips == 1:
        return 0.0
    # Devices of one chip take part together, or else share its links.
    together = len(devices) // chips
    share = together / chip.devices
    size = float(collective.bytes)
    if path.network == DCN:
        outer = len({_network_part(device) for device in devices})
        bandwidth = chip.network_bandwidth * share
        if collective.kind in ("all-reduce", "reduce-scatter"):
            size *= outer / len(devices)
        chips = outer
    elif path.network == NVLINK:
        bandwidth = chip.link_bandwidth * share
    else:
        both = collective.kind == "collective-permute"  # another can run the other way
        spans = [ring for size, ring in zip(path.extents, path.rings, strict=True) if size > 1]
        bandwidth = chip.link_bandwidth * share * sum(2 if ring or both else 1 for ring in spans)
    match collective.kind:
        case "all-gather":
            return (chips - 1) * together * size / bandwidth
        case "reduce-scatter":
            return (chips - 1) / chips * size / bandwidth
        case "all-reduce":
            return 2 * (chips - 1) / chips * size / bandwidth
        case "all-to-all" | "ragged-all-to-all" if path.network == ICI:
            crossing = [
                extent / (8 if ring else 4)
                for extent, ring in zip(path.extents, path.rings, strict=True)
            ]
            return max(crossing) * together * size / (chip.link_bandwidth * share)
        case "all-to-all" | "ragged-all-to-all":
            return (chips - 1) / chips * together * size / bandwidth
        case _:
            return size / bandwidth


def _network_part(device: jax.Device) -> int:
    """The slice of a TPU, the host of a GPU: what the slower network joins."""
    if device.platform == "gpu":
        return device.process_index
    return getattr(device, "slice_index", None) or 0


def _chip(device: jax.Device) -> tuple[int, ...]:
    """What tells the chips apart; a TPU can show two devices of one."""
    return (_network_part(device), *getattr(device, "coords", (device.id,)))
