"""Placements: named groups of participants, active during tracing; the primitive of a program."""

import operator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import Primitive
from fedpax.primitives.casts import conversion, device_array, is_host_number

# A pytree whose leaves are arrays or numbers.
ArrayTree = Any
# The same where a result has the structure of an argument.
Tree = TypeVar("Tree")

# Number of participants that a device runs at once; None runs all of them.
ChunkSize = int | Literal["auto"] | None


class Placement(NamedTuple):
    """A named group of participants, for example 1000 `clients` or 4 `islands`."""

    name: str
    size: int

    def __str__(self) -> str:
        """Return `name=size`, as a program declares it."""
        return f"{self.name}={self.size}"


class ActivePlacement(NamedTuple):
    """A placement of a program that is being traced."""

    placement: Placement
    chunk_size: ChunkSize
    inside: bool = False  # the code being traced runs on one participant of the placement
    # number of placements of the enclosing programs; a call without `placement` refers to the
    # innermost program, which has the largest
    depth: int = 0


# The cache of `jax.jit` depends on a user context: a jitted helper is traced for each size.
_active = jax.make_user_context(())


def active_placements() -> tuple[ActivePlacement, ...]:
    """Return the placements of all enclosing programs, the outermost first."""
    return _active.value


def activate(entries: tuple[ActivePlacement, ...]) -> AbstractContextManager[None]:
    """Set the active placements of this thread within the context."""
    return _active(entries)


def enter_participant(name: str) -> AbstractContextManager[None]:
    """Mark the code within the context as running on one participant of the placement `name`."""
    return activate(
        tuple(
            a._replace(inside=True) if a.placement.name == name else a for a in active_placements()
        )
    )


def declare_placements(
    sizes: Mapping[str, int], chunk_size: ChunkSize
) -> tuple[ActivePlacement, ...]:
    """Check a program's placements and return the entries that its body is traced under."""
    if not sizes:
        raise ArgumentError(
            "fedpax.program() got no placement, expected at least one. Name the participants and "
            "their number: @fedpax.program(clients=1000)."
        )
    entries = []
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(
                f"fedpax.program() got the placement name {name!r}, expected an identifier, "
                "because the mesh axis has the same name. Use for example 'clients'."
            )
        integer: Any = None if isinstance(size, bool) else size
        try:
            number = operator.index(integer)
        except TypeError:
            raise ArgumentTypeError(
                f"fedpax.program() got {name}={size!r} of type {type(size).__name__}, expected an "
                "int that is known before tracing: a keyword that is not an option declares a "
                f"placement and its size. Pass {name}=int(...)."
            ) from None
        if number < 1:
            raise ArgumentError(
                f"fedpax.program() got {name}={size}, expected at least one participant. If a "
                "cohort is empty, skip the round."
            )
        entries.append(ActivePlacement(Placement(name, number), chunk_size))
    check_chunk_size(chunk_size)
    return tuple(entries)


def check_chunk_size(value: Any) -> None:
    """Raise a ValueError unless the value is None, "auto" or a positive int."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            f"chunk_size={value!r}, expected a positive int (the number of participants that a "
            "device runs at once), 'auto', or None to run all of them at once."
        )


def resolve_placement(function: str, name: str | None) -> ActivePlacement:
    """Find the placement that a call of a federated function refers to."""
    entries = active_placements()
    if not entries:
        raise RuntimeError(
            f"{function}() was called outside a fedpax program, where no placement is declared. "
            "Decorate the function that calls it: @fedpax.program(clients=1000)."
        )
    free = [a for a in entries if not a.inside]
    free = [a for a in free if a.depth == free[-1].depth]
    if name is None:
        if len(free) == 1:
            return free[0]
        if free:
            raise ArgumentError(
                f"{function}() got no placement, but several are active: "
                f"{', '.join(str(a.placement) for a in free)}. Name one, for example "
                f"placement={free[0].placement.name!r}."
            )
        raise ArgumentError(
            f"{function}() was called on a participant of "
            f"{', '.join(repr(a.placement.name) for a in entries)}, and no other placement is "
            "declared. Call it after federated_map(), or declare a nested placement: "
            "@fedpax.program(islands=4, clients=8)."
        )
    for entry in entries:
        if entry.placement.name == name and entry.inside:
            raise ArgumentError(
                f"{function}(placement={name!r}) was called on a participant of {name!r}, which "
                "sees only its own values. Call it after federated_map()."
            )
        if entry.placement.name == name:
            return entry
    known = ", ".join(repr(a.placement.name) for a in entries)
    raise ArgumentError(
        f"{function}(placement={name!r}): no such placement is active, only {known}. Pass one "
        f"of these, or declare it: @fedpax.program({name}=...)."
    )


def check_placed(
    function: str, tree: ArrayTree, placement: Placement, argument: str
) -> list[jax.Array]:
    """Check that every leaf has the placement's axis first, and return the leaves as arrays."""
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        where = argument + jax.tree_util.keystr(path)
        array = check_array(f"{function}()", leaf, where)
        if array.ndim == 0 or array.shape[0] != placement.size:
            shape = f"has shape {array.shape}" if array.ndim else "is a scalar"
            raise ArgumentError(
                f"{function}(): {where} {shape}, expected a leading axis of size {placement.size}, "
                f"one entry per participant of {placement.name!r}. Pass a server value through "
                "federated_broadcast() first, or use it in the mapped function as a closure."
            )
        leaves.append(array)
    return leaves


def check_array(
    function: str,
    leaf: Any,
    where: str,
    remedy: str = "Remove it from the pytree, or use it in the function as a closure.",
) -> jax.Array:
    """Return a leaf as an array."""
    if is_host_number(leaf):
        array = device_array(leaf, f"{function}: {where}")
        return jnp.asarray(array if isinstance(leaf, np.ndarray | np.generic) else leaf)
    try:
        is_array = jax.typeof(leaf) is not None and not conversion(leaf)
    except TypeError:
        is_array = False
    if not is_array:
        raise ArgumentTypeError(
            f"{function}: {where} {describe_type(leaf)}, expected arrays or numbers. "
            f"{' '.join(filter(None, (conversion(leaf), remedy)))}"
        )
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def describe_type(value: Any) -> str:
    """Describe the type of a value that is not an array of numbers, for messages."""
    if isinstance(value, np.ndarray | np.generic):
        return f"is of type {type(value).__name__} with dtype {value.dtype}"
    return f"is of type {type(value).__name__}"


# The primitive of a program. Its rules are in `fedpax.transforms.program`, above the passes.
federated_program_p = Primitive("federated_program")
"""The primitive of a call of `fedpax.program`'s result."""
federated_program_p.multiple_results = True


# Whether a program is traced for stages, whose server waits for participants. The cache of
# `jax.jit` depends on it.
_for_stages = jax.make_user_context(False)


def trace_for_stages() -> AbstractContextManager[None]:
    """Trace programs with noise of the participants, and without simulated masks."""
    return _for_stages(True)


def is_for_stages() -> bool:
    """Return whether a program is traced for stages, whose engine masks the sums."""
    return bool(_for_stages.value)
