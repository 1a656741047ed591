"""Device meshes with named axes, laid out so that each axis runs over the network that suits it."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# Axes that communicate least, and so run between slices: the first of them that a mesh has.
BETWEEN_SLICES = ("islands", "clients", "data")

_DEFAULT_DEVICES: ContextVar[tuple[jax.Device, ...] | None] = ContextVar(
    "default_devices", default=None
)


@contextlib.contextmanager
def default_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Makes meshes of these devices where none are given, such as those of a pod to compile for.

    Args:
      devices: what `make_mesh` and `MeshConfig` take in the place of `jax.devices()`.

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
    """Makes a mesh of devices with named axes: `make_mesh(islands=4, fsdp=-1)`.

    The axes come in the order of the arguments; one of them may be -1 and takes the devices that
    the others leave. The mesh uses all devices. On TPUs, their order follows the physical links.
    On several TPU slices, joined by a slower network, the axis that communicates least runs
    between slices, and every other axis stays within one. Several processes without TPUs are
    treated in the same way where the sizes allow it.

    Args:
      devices: the devices to use, by default those of `default_devices`, or `jax.devices()`.
      axis_types: one type for all axes, or a type by axis name; automatic where none is given.
      between_slices: name of the axis that runs between slices, by default the first that there
        is among islands, clients and data.
      **axis_sizes: size of each axis, at least 1, or -1 for the rest of the devices.

    Returns:
      The mesh, to run programs under: `with jax.set_mesh(mesh): ...`.

    Raises:
      ValueError: the sizes do not fit the devices or the slices (the message says which would),
        or `axis_types` or `between_slices` names an axis that the mesh does not have.
      TypeError: a size is not an integer.

    Example:
      >>> mesh = make_mesh(islands=1, fsdp=-1)
      >>> mesh.axis_names, mesh.size == jax.device_count()
      (('islands', 'fsdp'), True)
    """
    devices = list(available_devices() if devices is None else devices)
    sizes = _resolve(axis_sizes, devices)
    if isinstance(axis_types, str):
        raise TypeError(
            f"make_mesh(axis_types={axis_types!r}): expected a jax.sharding.AxisType, such as "
            "AxisType.Explicit, or one by axis name."
        )
    if axis_types is None or isinstance(axis_types, AxisType):
        types = dict.fromkeys(sizes, axis_types or AxisType.Auto)
    else:
        _check_names("axis_types", axis_types, sizes)
        types = dict.fromkeys(sizes, AxisType.Auto) | dict(axis_types)
    if between_slices is not None:
        _check_names("between_slices", [between_slices], sizes)
    outer = between_slices or next((name for name in BETWEEN_SLICES if name in sizes), None)
    return Mesh(_arrange(sizes, devices, outer), tuple(sizes), tuple(types[name] for name in sizes))


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes, in their order; -1, once, stands for the rest of the devices.

    The axis of a placement (islands, clients) bears its name; the others shard the model and the
    batch.

    Attributes:
      islands: replicas of the model that train apart and synchronize seldom.
      clients: participants of a federated round that are simulated at once.
      data: replicas of the model that share every step.
      fsdp: parts into which parameters and batch are cut.
      tensor: parts into which heads and the layers' inner width are cut.
      sequence: parts into which the sequence is cut.
      expert: parts into which the experts of a mixture are divided.
      stage: stages of the pipeline.

    Raises:
      ValueError: a size is 0, or below -1.

    Example:
      >>> MeshConfig(islands=4, fsdp=2).size
      8
      >>> MeshConfig(fsdp=-1).make().axis_names
      ('fsdp',)
    """

    islands: int = 1
    clients: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    stage: int = 1

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for name, size in asdict(self).items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"mesh.{name}={size} is not a size: make it at least 1, or -1 for the rest of "
                    "the devices."
                )

    @property
    def size(self) -> int:
        """Number of devices of the mesh; all that there are if an axis is -1."""
        sizes = asdict(self).values()
        return len(available_devices()) if -1 in sizes else math.prod(sizes)

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Makes the mesh, of the axes whose size is not 1.

        Args:
          devices: the devices to use, by default those of `default_devices`, or `jax.devices()`.
            If every size is 1, the mesh is the first of them alone, as an axis `data`.

        Returns:
          The mesh.

        Raises:
          ValueError: as `make_mesh`.
        """
        sizes = {name: size for name, size in asdict(self).items() if size != 1}
        if not sizes:
            devices, sizes = list(devices or available_devices())[:1], {"data": 1}
        return make_mesh(devices=devices, **sizes)


def available_devices() -> Sequence[jax.Device]:
    """The devices that meshes are made of: those of `default_devices`, or else all that JAX has.

    Example:
      >>> with default_devices(jax.devices()[:1]):
      ...     len(available_devices())
      1
    """
    return _DEFAULT_DEVICES.get() or jax.devices()


def _check_names(argument: str, names: Sequence[str] | Mapping, sizes: Mapping[str, int]) -> None:
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise ValueError(
            f"{argument} names {_join(unknown)}, which the mesh does not have. "
            f"Its axes: {_join(sizes)}."
        )


def _resolve(axis_sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, int]:
    """Checks the sizes and puts a number in the place of -1."""
    given = f"make_mesh({', '.join(f'{name}={size!r}' for name, size in axis_sizes.items())})"
    if not axis_sizes:
        raise ValueError(
            "make_mesh needs at least one axis and its size, such as "
            "make_mesh(islands=4, fsdp=-1), where -1 stands for the rest of the devices."
        )
    if not devices:
        raise ValueError(f"{given}: devices is empty. Leave it out to use all of jax.devices().")
    sizes = {name: _integer(given, name, size) for name, size in axis_sizes.items()}
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(
            f"{given}: only one axis can take the rest of the devices, but {_join(rest)} are -1. "
            "Give all of them but one a size."
        )
    taken = math.prod(size for size in sizes.values() if size != -1)
    if rest and len(devices) % taken == 0:
        return {name: len(devices) // taken if size == -1 else size for name, size in sizes.items()}
    if not rest and len(devices) == taken:
        return sizes
    needs = f"a multiple of {taken} devices" if rest else f"{taken} devices"
    raise ValueError(
        f"{given} needs {needs}, but there are {len(devices)}. {_fitting(sizes, devices)}"
    )


def _integer(given: str, name: str, size: int) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        number = operator.index(size)
    except TypeError:
        raise TypeError(
            f"{given}: {name}={size!r} is not an integer. A size is an integer of at least 1, or "
            "-1 for the rest of the devices."
        ) from None
    if number < 1 and number != -1:
        raise ValueError(
            f"{given}: {name}={number} is not a size. A size is an integer of at least 1, or -1 "
            "for the rest of the devices."
        )
    return number


def _fitting(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> str:
    """Says which sizes would fit the devices."""
    total = len(devices)
    taken = math.prod(size for size in sizes.values() if size != -1)
    fits = []
    for name, size in sizes.items():
        others = {other: n for other, n in sizes.items() if other != name}
        if size != -1 and -1 not in others.values() and total % math.prod(others.values()) == 0:
            left = total // math.prod(others.values())
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
        fits.append(f"the sizes must multiply to {total}; with -1 one takes what the others leave")
    text = f"What fits: {'; '.join(fits)}."
    if taken < total and -1 not in sizes.values():
        text += f" To use {taken} of them, pass devices=jax.devices()[:{taken}]."
    if taken > total and devices[0].platform == "cpu":
        text += (
            f' jax.config.update("jax_num_cpu_devices", {taken}), before JAX is first used, '
            "simulates more on a CPU."
        )
    return text


def _arrange(sizes: Mapping[str, int], devices: list[jax.Device], outer: str | None) -> np.ndarray:
    """Lays the devices out in the mesh's shape; `outer` is the axis to run between slices."""
    shape = tuple(sizes.values())
    if devices[0].platform == "tpu":
        slices = _by(devices, "slice_index")
        if len(slices) == 1:
            if not _fill_a_box(devices):  # no arrangement of theirs follows the links
                return np.array(devices).reshape(shape)
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        between = tuple(len(slices) if name == outer else 1 for name in sizes)
        within = tuple(size // n for size, n in zip(shape, between, strict=True))
        _check_slices(sizes, slices, outer)
        return mesh_utils.create_hybrid_device_mesh(
            within, between, devices, allow_split_physical_axes=True
        )
    processes = _by(devices, "process_index")
    if outer is None or len(processes) == 1:
        return mesh_utils.create_device_mesh(shape, devices)
    # Process by process along the outer axis, so that the others stay within one if they can.
    position = list(sizes).index(outer)
    ordered = np.array([device for process in sorted(processes) for device in processes[process]])
    others = shape[:position] + shape[position + 1 :]
    return np.moveaxis(ordered.reshape(shape[position], *others), 0, position)


def _fill_a_box(devices: Sequence[jax.Device]) -> bool:
    """Whether TPU cores are all those of a cuboid of chips."""
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    return bool(np.prod(np.ptp(places, axis=0) + 1) == len(devices))


def _by(devices: Sequence[jax.Device], attribute: str) -> dict[int, list[jax.Device]]:
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute, 0), []).append(device)
    return groups


def _check_slices(
    sizes: Mapping[str, int], slices: Mapping[int, Sequence[jax.Device]], outer: str | None
) -> None:
    """Refuses an axis between slices that does not divide over them."""
    held = sorted({len(members) for members in slices.values()})
    if len(held) > 1:
        raise ValueError(
            f"the {len(slices)} slices hold {_join(held)} devices. Pass as devices the same number "
            "of each slice."
        )
    if outer is None:
        raise ValueError(
            f"the devices are in {len(slices)} slices, but the mesh has no axis that is meant to "
            f"run between them: {_join(BETWEEN_SLICES, 'or')}. Add one, such as "
            f"islands={len(slices)}, or name one of {_join(sizes)} with between_slices=."
        )
    if sizes[outer] % len(slices):
        total = math.prod(sizes.values())
        fits = [n for n in range(len(slices), total + 1, len(slices)) if total % n == 0]
        raise ValueError(
            f"{outer}={sizes[outer]} runs between slices, but is not a multiple of their number, "
            f"{len(slices)} (of {held[0]} devices each). What fits: {outer}={_join(fits, 'or')}, "
            "or another axis between slices, named with between_slices=."
        )


def _join(items: Sequence | Mapping, word: str = "and") -> str:
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} {word} {last}" if most else last
