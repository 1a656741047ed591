"""Device meshes with named axes, arranged so that each axis uses the network that suits it."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from fedpax.errors import ArgumentError, ArgumentTypeError, FedpaxError
from fedpax.parallel.compiler_options import MAX_SIMULATED_DEVICES

# The axes that communicate least, in this order: the first one in a mesh runs between slices.
BETWEEN_SLICES = ("islands", "clients", "data")

_DEFAULT_DEVICES: ContextVar[tuple[jax.Device, ...] | None] = ContextVar(
    "default_devices", default=None
)


class MeshSizeError(FedpaxError, ValueError):
    """The sizes of a `MeshConfig` do not fit the devices; the message names the flags."""


@contextlib.contextmanager
def default_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Set the default devices of meshes, such as the devices of a pod to compile for.

    Args:
        devices: the devices in place of `jax.devices()`.

    Example:
        >>> with default_devices(jax.devices()[:1]):
        ...     make_mesh(fsdp=-1).size
        1
    """
    token = _DEFAULT_DEVICES.set(tuple(devices))
    try:
        yield
    finally:
        _DEFAULT_DEVICES.reset(token)


def make_mesh(
    *,
    devices: Sequence[jax.Device] | None = None,
    axis_types: AxisType | Mapping[str, AxisType] | None = None,
    between_slices: str | None = None,
    **axis_sizes: int,
) -> Mesh:
    """Make a mesh of devices with named axes, such as `make_mesh(islands=4, fsdp=-1)`.

    - The axes have the order of the arguments. One size can be -1: all remaining devices.
    - The mesh uses all devices.
    - On several TPU slices, the axis that communicates least runs between slices and every other
      axis stays within one.

    Args:
        devices: the devices to use. Default None: those of `default_devices`, or `jax.devices()`.
        axis_types: one type for all axes, or a type by axis name. Default: automatic.
        between_slices: name of the axis that runs between slices. Default None: the first axis of
            more than one device among islands, clients and data.
        **axis_sizes: size of each axis, at least 1, or -1 for all remaining devices.

    Returns:
        The mesh, to run programs under: `with jax.set_mesh(mesh): ...`.

    Raises:
        ValueError: if the sizes do not fit the devices or the slices (the message gives sizes that
            fit), or `axis_types` or `between_slices` names an axis that the mesh does not have.
        TypeError: if a size is not an integer.

    Example:
        >>> mesh = make_mesh(islands=1, fsdp=-1)
        >>> mesh.axis_names, mesh.size == jax.device_count()
        (('islands', 'fsdp'), True)
    """
    devices = list(available_devices() if devices is None else devices)
    sizes = _resolve(axis_sizes, devices)
    if isinstance(axis_types, str):
        raise ArgumentTypeError(
            f"make_mesh(axis_types={axis_types!r}): expected a jax.sharding.AxisType, such as "
            "AxisType.Explicit, or a dict of them by axis name."
        )
    if axis_types is None or isinstance(axis_types, AxisType):
        types = dict.fromkeys(sizes, axis_types or AxisType.Auto)
    else:
        _check_names("axis_types", axis_types, sizes)
        types = dict.fromkeys(sizes, AxisType.Auto) | dict(axis_types)
    if between_slices is not None:
        _check_names("between_slices", [between_slices], sizes)
    candidates = [name for name in BETWEEN_SLICES if name in sizes]
    larger = [name for name in candidates if sizes[name] > 1]
    outer = between_slices or next(iter(larger + candidates), None)
    return Mesh(_arrange(sizes, devices, outer), tuple(sizes), tuple(types[name] for name in sizes))


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes, in their order; one size can be -1: all remaining devices.

    The axes of placements are islands and clients; the others shard the model and the batch. A size
    that is not stated (None) follows as in `fedpax.parallel.mesh_sizes.follow`; in `make` it is 1.

    Attributes:
        islands: groups of devices that share the islands of a round.
        clients: groups of devices that share the clients of a round.
        data: replicas of the model that synchronize gradients in every step.
        fsdp: shards of parameters, optimizer state and batch.
        tensor: shards of heads and of the layers' inner dimensions.
        sequence: shards of the sequence.
        expert: shards of the experts of a mixture.
        stage: stages of the pipeline.

    Raises:
        ValueError: if a size is 0 or below -1.

    Example:
        >>> MeshConfig(islands=4, fsdp=2).size
        8
        >>> mesh = MeshConfig(fsdp=-1).make()
        >>> mesh.shape["fsdp"] == jax.device_count(), mesh.shape["clients"]
        (True, 1)
    """

    islands: int | None = None
    clients: int | None = None
    data: int | None = None
    fsdp: int | None = None
    tensor: int | None = None
    sequence: int | None = None
    expert: int | None = None
    stage: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name, size in self.stated.items():
            if size < 1 and size != -1:
                raise ArgumentError(
                    f"mesh.{name}={size} is not a size: expected at least 1, or -1 for all "
                    "remaining devices."
                )

    @property
    def stated(self) -> dict[str, int]:
        """The sizes that are stated, by axis."""
        return {name: size for name, size in asdict(self).items() if size is not None}

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes; 1 where none is stated."""
        return dict.fromkeys(asdict(self), 1) | self.stated

    @property
    def size(self) -> int:
        """Number of devices of the mesh; all available devices if an axis is -1."""
        sizes = self.sizes.values()
        return len(available_devices()) if -1 in sizes else math.prod(sizes)

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Make the mesh; all its axes are automatic.

        The mesh has all axes of the configuration, also of size 1, so that
        `PartitionSpec("clients")` is valid on every mesh.

        Args:
            devices: as in `make_mesh`. If all sizes are 1, the mesh is the first device alone.

        Raises:
            MeshSizeError: if the sizes do not fit the devices or the slices.
        """
        devices = list(available_devices() if devices is None else devices)
        sizes: dict[str, Any] = self.sizes
        larger = {name: size for name, size in sizes.items() if size != 1}
        # Devices are arranged along the larger axes: axes of size 1 do not change their order.
        try:
            mesh = (
                make_mesh(devices=devices, **larger)
                if larger
                else make_mesh(devices=devices[:1], data=1)
            )
        except ValueError as error:
            flags = _join([f"--mesh.{name}" for name in larger])
            raise MeshSizeError(f"{error} On the command line, leave out {flags}.") from None
        shape = tuple(mesh.shape.get(name, 1) for name in sizes)
        return Mesh(mesh.devices.reshape(shape), tuple(sizes), (AxisType.Auto,) * len(sizes))


SINGLE_DEVICE = MeshConfig(*(1,) * len(fields(MeshConfig)))
"""The mesh of one device, whatever devices there are."""


def available_devices() -> Sequence[jax.Device]:
    """Return the devices of `default_devices`, or else `jax.devices()`.

    Example:
        >>> with default_devices(jax.devices()[:1]):
        ...     len(available_devices())
        1
    """
    return _DEFAULT_DEVICES.get() or jax.devices()


def _check_names(argument: str, names: Sequence[str] | Mapping, sizes: Mapping[str, int]) -> None:
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise ArgumentError(
            f"{argument} names {_join(unknown)}, which the mesh does not have. "
            f"Its axes: {_join(sizes)}."
        )


def _resolve(axis_sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, int]:
    """Check the sizes and replace -1 by the number of remaining devices."""
    given = f"make_mesh({', '.join(f'{name}={size!r}' for name, size in axis_sizes.items())})"
    if not axis_sizes:
        raise ArgumentError(
            "make_mesh needs at least one axis and its size, such as "
            "make_mesh(islands=4, fsdp=-1), where -1 means all remaining devices."
        )
    if not devices:
        raise ArgumentError(f"{given}: devices is empty. Leave it out to use all of jax.devices().")
    sizes = {name: _integer(given, name, size) for name, size in axis_sizes.items()}
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ArgumentError(
            f"{given}: only one axis can take all remaining devices, but {_join(rest)} are -1. "
            "Set a size for all of them except one."
        )
    taken = math.prod(size for size in sizes.values() if size != -1)
    if rest and len(devices) % taken == 0:
        return {name: len(devices) // taken if size == -1 else size for name, size in sizes.items()}
    if not rest and len(devices) == taken:
        return sizes
    needs = f"a multiple of {taken} devices" if rest else f"{taken} devices"
    raise ArgumentError(
        f"{given} needs {needs}, but there are {len(devices)}. {_fitting(sizes, devices)}"
    )


def _integer(given: str, name: str, size: int) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        number = operator.index(size)
    except TypeError:
        raise ArgumentTypeError(
            f"{given}: {name}={size!r} is not an integer. A size is an integer of at least 1, or "
            "-1 for all remaining devices."
        ) from None
    if number < 1 and number != -1:
        raise ArgumentError(
            f"{given}: {name}={number} is not a size. A size is an integer of at least 1, or -1 "
            "for all remaining devices."
        )
    return number


def _fitting(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> str:
    total = len(devices)
    taken = math.prod(size for size in sizes.values() if size != -1)
    fits = []
    for name, size in sizes.items():
        other_sizes = {other: n for other, n in sizes.items() if other != name}
        taken_by_others = math.prod(other_sizes.values())
        if size != -1 and -1 not in other_sizes.values() and total % taken_by_others == 0:
            left = total // taken_by_others
            call = ", ".join(f"{other}={-1 if other == name else n}" for other, n in sizes.items())
            fits.append(f"{call} gives {name}={left} on {total} devices")
    if -1 in sizes.values():
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        *names, last = [name for name, size in sizes.items() if size != -1]
        rest = next(name for name, size in sizes.items() if size == -1)
        near = min(divisors, key=lambda n: (abs(n - taken), -n))
        product = f"the product of {_join([*names, last])}" if names else last
        fits.append(
            f"{product} can be {_join(divisors, 'or')} ({near} gives {rest}={total // near}) on "
            f"{total} devices"
        )
    if not fits:
        fits.append(
            f"the product of the sizes must be {total}; a size of -1 takes all remaining devices"
        )
    text = f"Sizes that fit: {'; '.join(fits)}."
    if taken < total and -1 not in sizes.values():
        text += f" To use {taken} of them, pass devices=jax.devices()[:{taken}]."
    if taken > total and devices[0].platform == "cpu" and taken > MAX_SIMULATED_DEVICES:
        text += f" A CPU simulates at most {MAX_SIMULATED_DEVICES:,} devices."
    elif taken > total and devices[0].platform == "cpu":
        text += (
            f" To simulate more on a CPU, set JAX_NUM_CPU_DEVICES={taken} in the environment, or "
            f'call jax.config.update("jax_num_cpu_devices", {taken}) before JAX is first used.'
        )
    return text


def _arrange(sizes: Mapping[str, int], devices: list[jax.Device], outer: str | None) -> np.ndarray:
    """Arrange the devices in the shape of the mesh; `outer` is the axis between slices."""
    shape = tuple(sizes.values())
    if devices[0].platform == "tpu":
        slices = _group_by(devices, "slice_index")
        if len(slices) == 1:
            if not _form_a_cuboid(devices):  # no order of the devices follows the links
                return np.array(devices).reshape(shape)
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        between = tuple(len(slices) if name == outer else 1 for name in sizes)
        within = tuple(size // n for size, n in zip(shape, between, strict=True))
        _check_slices(sizes, slices, outer)
        return mesh_utils.create_hybrid_device_mesh(
            within, between, devices, allow_split_physical_axes=True
        )
    processes = _group_by(devices, "process_index")
    if outer is None or len(processes) == 1:
        return mesh_utils.create_device_mesh(shape, devices)
    # Process by process along the outer axis, so that the other axes stay within a process.
    position = list(sizes).index(outer)
    ordered = np.array([device for process in sorted(processes) for device in processes[process]])
    other_sizes = shape[:position] + shape[position + 1 :]
    return np.moveaxis(ordered.reshape(shape[position], *other_sizes), 0, position)


def _form_a_cuboid(devices: Sequence[jax.Device]) -> bool:
    """Return whether the devices are all TPU cores of a cuboid of chips."""
    coords = np.array([(*device.coords, device.core_on_chip) for device in devices])
    return bool(np.prod(np.ptp(coords, axis=0) + 1) == len(devices))


def _group_by(devices: Sequence[jax.Device], attribute: str) -> dict[int, list[jax.Device]]:
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute, 0), []).append(device)
    return groups


def _check_slices(
    sizes: Mapping[str, int], slices: Mapping[int, Sequence[jax.Device]], outer: str | None
) -> None:
    """Raise a ValueError if the axis between slices is not a multiple of their number."""
    held = sorted({len(members) for members in slices.values()})
    if len(held) > 1:
        raise ArgumentError(
            f"the {len(slices)} slices have {_join(held)} devices. Pass the same number of devices "
            "of each slice."
        )
    if outer is None:
        raise ArgumentError(
            f"the devices are in {len(slices)} slices, but the mesh has no axis to run between "
            f"them: {_join(BETWEEN_SLICES, 'or')}. Add one, such as "
            f"islands={len(slices)}, or name one of {_join(sizes)} with between_slices=."
        )
    if sizes[outer] % len(slices):
        total = math.prod(sizes.values())
        fits = [n for n in range(len(slices), total + 1, len(slices)) if total % n == 0]
        raise ArgumentError(
            f"{outer}={sizes[outer]} runs between slices, but is not a multiple of their number, "
            f"{len(slices)} (of {held[0]} devices each). Sizes that fit: "
            f"{outer}={_join(fits, 'or')}, or another axis between slices, named with "
            "between_slices=."
        )


def _join(items: Sequence | Mapping, word: str = "and") -> str:
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} {word} {last}" if most else last
