"""The devices that a program is compiled for, and the networks between them."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from fedpax.chips import CHIPS, Chip, chip_of
from fedpax.errors import FedpaxError
from fedpax.hlo.collectives import Collective
from fedpax.parallel.compiler_options import MAX_SIMULATED_DEVICES, simulate_devices

TPUS = [name for name, chip in CHIPS.items() if chip.torus_dimensions]

# Without these variables libtpu queries the machine for the type of its TPU, logs errors when it
# finds none, and does not allow a second process to load it.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


class TopologyError(FedpaxError, ValueError):
    """An unknown or unavailable topology; the message lists the known ones."""


class Topology(NamedTuple):
    """Devices to compile for.

    Attributes:
        name: the requested name, such as "v5p:4x8x8".
        chip: the chip's specifications; None if unknown.
        shape: chips along each dimension of a slice; () if the chips form no torus.
        slices: number of slices.
        devices: all devices, slice by slice.
    """

    name: str
    chip: Chip | None
    shape: tuple[int, ...]
    slices: int
    devices: tuple[jax.Device, ...]

    @property
    def chips(self) -> int:
        """Number of chips in all slices together."""
        return len(self.devices) // (self.chip.devices_per_chip if self.chip else 1)


def find_topology(name: str, slices: int = 1) -> Topology:
    """Find the devices of a topology.

    Args:
        name: a TPU and its chips along each dimension of a slice, such as "v5p:4x8x8"; it needs the
            package `libtpu`, and no TPU. Or "cpu:8" for 8 simulated devices, or "gpu" for the GPUs
            of this machine.
        slices: number of slices, joined by the data center's network.

    Raises:
        TopologyError: if the topology does not exist, or `libtpu` or the GPUs are missing.

    Example:
        >>> topology = find_topology("cpu:1")
        >>> len(topology.devices), topology.chip
        (1, None)
    """
    device, _, sizes = name.partition(":")
    if not re.fullmatch(r"(\d+(x\d+)*)?", sizes):
        raise TopologyError(f"topology={name!r}: {sizes!r} is not a size. {_known_topologies()}")
    shape = tuple(int(size) for size in sizes.split("x") if size)
    if slices < 1:
        raise TopologyError(f"slices={slices}: expected at least 1.")
    if device in TPUS:
        return _tpu(name, CHIPS[device], shape, slices)
    if device not in ("cpu", "gpu"):
        near = difflib.get_close_matches(device, [*TPUS, "cpu", "gpu"], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise TopologyError(
            f"topology={name!r}: unknown device {device!r}.{hint} {_known_topologies()}"
        )
    if slices > 1:
        raise TopologyError(
            f"topology={name!r} has no slices, but slices={slices}: only TPUs have slices. "
            f"{_known_topologies()}"
        )
    if len(shape) > 1 or (device == "cpu" and not shape) or 0 in shape:
        raise TopologyError(
            f"topology={name!r}: expected one number of devices. {_known_topologies()}"
        )
    if device == "cpu" and shape[0] > MAX_SIMULATED_DEVICES:
        raise TopologyError(
            f"topology={name!r}: a CPU simulates at most {MAX_SIMULATED_DEVICES:,} devices. Use "
            f"fewer, or a TPU topology. {_known_topologies()}"
        )
    return _cpu(name, *shape) if device == "cpu" else _gpu(name, *shape)


def _known_topologies() -> str:
    flat = [name for name in TPUS if CHIPS[name].torus_dimensions == 2]
    deep = [name for name in TPUS if CHIPS[name].torus_dimensions == 3]
    return (
        f"Known are {' and '.join(flat)} (such as {flat[0]}:4x4), {' and '.join(deep)} (such as "
        f"{deep[-2]}:4x4x4), cpu (such as cpu:8, simulated) and gpu (the GPUs of this machine)."
    )


def foreign_libtpu() -> str | None:
    """Describe a libtpu of another version than the one that the installed JAX names."""
    # With another version, the compiled program of some pods cannot be read back.
    try:
        installed = importlib.metadata.version("libtpu")
        requirements = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    named = [
        match[1]
        for requirement in requirements
        if (match := re.match(r"libtpu==([\d.]+)\*", requirement))
    ]
    if not named or f"{installed}.".startswith(named[0]):
        return None
    return (
        f"libtpu is {installed}, but jax {jax.__version__} names {named[0]}*: "
        f"pip install 'libtpu=={named[0]}*'"
    )


def _tpu(name: str, chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    if len(shape) != chip.torus_dimensions:
        example = "x".join(["4"] * chip.torus_dimensions)
        raise TopologyError(
            f"topology={name!r}: a slice of {chip.name} has {chip.torus_dimensions} dimensions, "
            f"such as {chip.name}:{example}."
        )
    odd = [size for size in shape[:2] if size < 2 or size % 2]
    if odd or 0 in shape or math.prod(shape) > chip.max_chips_per_slice:
        raise TopologyError(
            f"topology={name!r}: the first two sizes must be even, and a slice of {chip.name} has "
            f"at most {chip.max_chips_per_slice:,} chips. Use slices= for more chips."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            f"topology={name!r} needs libtpu, the TPU's compiler, which runs on any Linux machine. "
            "Install the extra `tpu`: pip install 'fedpax[tpu]'."
        )
    for variable, value in _LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    _prefer_cpu()
    options: dict[str, object] = {} if slices == 1 else {"num_slices": slices}
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device
    try:
        description = topologies.get_topology_desc(name, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise TopologyError(f"topology={name!r} is unknown to libtpu: {error}") from None
    return Topology(name, chip, shape, slices, tuple(description.devices))


def _cpu(name: str, count: int) -> Topology:
    _prefer_cpu()
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    # An earlier choice of the number of devices stays, unless it is too small.
    chosen |= "JAX_NUM_CPU_DEVICES" in os.environ
    chosen |= getattr(jax.config, "jax_num_cpu_devices", 0) >= count
    if not chosen:
        with contextlib.suppress(RuntimeError):  # JAX is in use: its number of devices is fixed
            simulate_devices(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise TopologyError(
            f"topology={name!r}: this process has {len(devices)} CPU devices. To simulate more, "
            "leave XLA_FLAGS and JAX_NUM_CPU_DEVICES unset, and call this before JAX is first used."
        )
    return Topology(name, chip_of(devices[0].device_kind), (), 1, tuple(devices[:count]))


def _gpu(name: str, count: int | None = None) -> Topology:
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        devices = []
    if len(devices) < (count or 1):
        remedy = "" if devices else " JAX needs the extra `cuda` for GPUs: fedpax[cuda]."
        raise TopologyError(
            f"topology={name!r}: this machine has {len(devices)} GPUs that JAX can use, and "
            f"compiling for GPUs needs them.{remedy} TPUs, such as v5p:4x4x4, can be compiled for "
            "anywhere."
        )
    devices = devices[:count]
    return Topology(name, chip_of(devices[0].device_kind), (), 1, tuple(devices))


def _prefer_cpu() -> None:
    """Keep JAX from searching for accelerators, which is slow on machines that have none."""
    with contextlib.suppress(RuntimeError):  # JAX is in use: the search is over
        jax.config.update("jax_platforms", "cpu")


# ---- the networks that collectives use, and lower bounds on the time of a collective

ICI = "ICI"  # the links between the chips of a slice
DCN = "DCN"  # the data center's network between slices, or between hosts
NVLINK = "NVLink"
HOST = "host"  # devices that one CPU simulates


class Route(NamedTuple):
    """The network that joins a group of devices, and the part of the torus that they span."""

    network: str  # ICI, DCN, NVLINK or HOST
    chips: int  # number of chips in the group; number of slices if the network is DCN
    # Chips along each dimension of the group's torus; () without a torus.
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
    # A ring uses both directions of its links; the last chip of a line receives in one. Between
    # slices, n is their number, and the participating chips of a slice each send a part. Latency is
    # not counted.
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
