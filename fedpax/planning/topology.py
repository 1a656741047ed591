"""The devices that a program is compiled for: a TPU pod that is not there, CPUs, GPUs."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from fedpax.parallel.simulated_devices import simulate_devices
from fedpax.planning.chips import CHIPS, Chip, chip_of

TPUS = [name for name, chip in CHIPS.items() if chip.dimensions]

# Without these libtpu asks the machine what TPU it is, complains that it is none, and refuses to
# share it with another process.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


class TopologyError(ValueError):
    """A topology that there is not; the message says which there are."""


class Topology(NamedTuple):
    """Devices to compile for.

    Attributes:
      name: as it was asked for, such as "v5p:4x8x8".
      chip: the chip's figures, None where they are not known.
      shape: chips along each dimension of a slice; () where the chips form no torus.
      slices: how many slices.
      devices: all devices, slice by slice.
    """

    name: str
    chip: Chip | None
    shape: tuple[int, ...]
    slices: int
    devices: tuple[jax.Device, ...]

    @property
    def chips(self) -> int:
        """How many chips the slices have together."""
        return len(self.devices) // (self.chip.devices if self.chip else 1)


def find_topology(name: str, slices: int = 1) -> Topology:
    """Finds the devices of a topology.

    Args:
      name: a TPU and the chips along each dimension of a slice, such as "v5p:4x8x8", "v5e:16x16",
        for which `libtpu` must be installed and no TPU is needed; "cpu:8" for simulated devices
        of this process; "gpu" for the GPUs that there are.
      slices: how many slices, joined by the data centre's network.

    Returns:
      The topology.

    Raises:
      TopologyError: there is no such topology, or `libtpu` or the GPUs are missing.

    Example:
      >>> topology = find_topology("cpu:1")
      >>> len(topology.devices), topology.chip
      (1, None)
    """
    kind, _, sizes = name.partition(":")
    if not re.fullmatch(r"(\d+(x\d+)*)?", sizes):
        raise TopologyError(f"topology={name!r}: {sizes!r} is not a size. {_known()}")
    shape = tuple(int(size) for size in sizes.split("x") if size)
    if slices < 1:
        raise TopologyError(f"slices={slices}: expected at least 1.")
    if kind in TPUS:
        return _tpu(name, CHIPS[kind], shape, slices)
    if kind not in ("cpu", "gpu"):
        near = difflib.get_close_matches(kind, [*TPUS, "cpu", "gpu"], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise TopologyError(f"topology={name!r}: there is no {kind!r}.{hint} {_known()}")
    if slices > 1:
        raise TopologyError(
            f"topology={name!r} has no slices, but slices={slices}: only TPUs have. {_known()}"
        )
    if len(shape) > 1 or (kind == "cpu" and not shape) or 0 in shape:
        raise TopologyError(f"topology={name!r}: give one number of devices. {_known()}")
    return _cpu(name, *shape) if kind == "cpu" else _gpu(name, *shape)


def _known() -> str:
    flat = [name for name in TPUS if CHIPS[name].dimensions == 2]
    deep = [name for name in TPUS if CHIPS[name].dimensions == 3]
    return (
        f"Known are {' and '.join(flat)} (such as {flat[0]}:4x4), {' and '.join(deep)} (such as "
        f"{deep[-2]}:4x4x4), cpu (cpu:8, simulated) and gpu (those that there are)."
    )


def _tpu(name: str, chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    if len(shape) != chip.dimensions:
        example = "x".join(["4"] * chip.dimensions)
        raise TopologyError(
            f"topology={name!r}: a slice of {chip.name} has {chip.dimensions} dimensions, such as "
            f"{chip.name}:{example}."
        )
    odd = [size for size in shape[:2] if size < 2 or size % 2]
    if odd or 0 in shape or math.prod(shape) > chip.largest:
        raise TopologyError(
            f"topology={name!r}: the first two sizes must be even, and a slice of {chip.name} has "
            f"at most {chip.largest:,} chips; with slices= there can be more of them."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            f"topology={name!r} needs libtpu, the TPU's compiler, which runs on any Linux machine: "
            "install the extra `tpu`, pip install 'fedpax[tpu]'."
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    _prefer_cpu()
    options: dict[str, object] = {} if slices == 1 else {"num_slices": slices}
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # a chip's two cores as one device
    try:
        found = topologies.get_topology_desc(name, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise TopologyError(f"topology={name!r} is not one that libtpu knows: {error}") from None
    return Topology(name, chip, shape, slices, tuple(found.devices))


def _cpu(name: str, count: int) -> Topology:
    _prefer_cpu()
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    # What was asked for before stays, unless it is less.
    chosen |= "JAX_NUM_CPU_DEVICES" in os.environ
    chosen |= getattr(jax.config, "jax_num_cpu_devices", 0) >= count
    if not chosen:
        with contextlib.suppress(RuntimeError):  # devices are in use already: those must do
            simulate_devices(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise TopologyError(
            f"topology={name!r}: this process shows {len(devices)} CPU devices. Leave XLA_FLAGS "
            "and JAX_NUM_CPU_DEVICES unset, and ask before JAX is first used, to simulate more."
        )
    return Topology(name, chip_of(devices[0].device_kind), (), 1, tuple(devices[:count]))


def _gpu(name: str, count: int | None = None) -> Topology:
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        devices = []
    if len(devices) < (count or 1):
        remedy = "" if devices else " JAX needs the extra `cuda` for them, fedpax[cuda]."
        raise TopologyError(
            f"topology={name!r}: this machine shows {len(devices)} GPUs, and a GPU is compiled for "
            f"only where there is one.{remedy} TPUs, such as v5p:4x4x4, need not be there."
        )
    devices = devices[:count]
    return Topology(name, chip_of(devices[0].device_kind), (), 1, tuple(devices))


def _prefer_cpu() -> None:
    """Keeps JAX from looking for accelerators of its own, which takes long where there are none."""
    with contextlib.suppress(RuntimeError):  # it has looked already
        jax.config.update("jax_platforms", "cpu")
