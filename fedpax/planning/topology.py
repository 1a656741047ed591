"""The devices that a program is compiled for: a TPU pod without the hardware, CPUs, or GPUs."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from fedpax.chips import CHIPS, Chip, chip_of
from fedpax.errors import FedpaxError
from fedpax.parallel.simulated_devices import MAX_SIMULATED_DEVICES, simulate_devices

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
        name: a TPU and its chips along each dimension of a slice, such as "v5p:4x8x8" or
            "v5e:16x16"; it needs the package `libtpu`, and no TPU. Or "cpu:8" for 8 simulated
            devices of this process, or "gpu" for the GPUs of this machine.
        slices: number of slices, joined by the data center's network. Default 1.

    Returns:
        The topology.

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
