"""Placements: named groups of participants, and which are active where a function is traced."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

# A pytree whose leaves are arrays or numbers.
ArrayTree = Any

ChunkSize = int | Literal["auto"] | None


class Placement(NamedTuple):
    """A named group of participants, for example 1000 `clients` or 4 `islands`."""

    name: str
    size: int

    def __str__(self) -> str:
        """Returns `name=size`, as a program declares it."""
        return f"{self.name}={self.size}"


class Active(NamedTuple):
    """A placement of a program that is being traced.

    `inside` says that the code at hand runs on one of its participants. Where programs nest, the
    innermost is meant by a call that names no placement; `depth` tells them apart.
    """

    placement: Placement
    chunk_size: ChunkSize
    inside: bool = False
    depth: int = 0  # how many placements the programs around its own declare


# A user context is a context variable that the caches of `jax.jit` depend on too: a jitted helper
# that is called in programs of different sizes is traced once for each.
_active = jax.make_user_context(())


def active() -> tuple[Active, ...]:
    """The placements of all programs around the caller, the outermost first."""
    return _active.value


@contextmanager
def activate(entries: tuple[Active, ...]) -> Iterator[None]:
    """Makes these the active placements of this thread while the context lasts."""
    with _active(entries):
        yield


@contextmanager
def enter(name: str) -> Iterator[None]:
    """Marks that the code inside runs on one participant of the placement called `name`."""
    entries = tuple(a._replace(inside=True) if a.placement.name == name else a for a in active())
    with activate(entries):
        yield


def declare(sizes: Mapping[str, int], chunk_size: ChunkSize) -> tuple[Active, ...]:
    """Checks a program's placements and returns the entries that its body runs under."""
    if not sizes:
        raise ValueError(
            "fedpax.program() got no placement, expected at least one. Name the participants and "
            "how many there are: @fedpax.program(clients=1000)."
        )
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                f"fedpax.program() got the placement name {name!r}, expected an identifier, "
                "because a mesh axis bears the same name. Use one such as 'clients'."
            )
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"fedpax.program() got {name}={size!r} of type {type(size).__name__}, expected an "
                f"int that is known before tracing. Pass {name}=int(...)."
            )
        if size < 1:
            raise ValueError(
                f"fedpax.program() got {name}={size}, expected at least one participant. Where a "
                "cohort is empty, skip the round."
            )
    check_chunk_size(chunk_size)
    return tuple(Active(Placement(name, size), chunk_size) for name, size in sizes.items())


def check_chunk_size(value: Any) -> None:
    """Raises unless the value is None, "auto" or a positive int."""
    if value is None or value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"chunk_size={value!r}, expected a positive int (how many participants a device "
            "runs at once), 'auto', or None for all of them."
        )


def resolve_placement(function: str, name: str | None) -> Active:
    """Finds the placement that a call of a federated function is meant for.

    Args:
        function: the public function's name, for messages.
        name: what the user gave as `placement`, or None.

    Raises:
        RuntimeError: outside of a program.
        ValueError: an unknown placement, none named where there are several, or one on whose
            participant the call was made.
    """
    entries = active()
    if not entries:
        raise RuntimeError(
            f"{function}() was called outside of a fedpax program, where no placement is declared. "
            "Decorate the function that calls it: @fedpax.program(clients=1000)."
        )
    free = [a for a in entries if not a.inside]
    free = [a for a in free if a.depth == free[-1].depth]
    if name is None:
        if len(free) == 1:
            return free[0]
        if free:
            raise ValueError(
                f"{function}() got no placement, but there are several here: "
                f"{', '.join(str(a.placement) for a in free)}. Name one, for example "
                f"placement={free[0].placement.name!r}."
            )
        raise ValueError(
            f"{function}() was called on a participant of "
            f"{', '.join(repr(a.placement.name) for a in entries)}, where no other placement is "
            "declared. Call it after federated_map(), or declare a placement to nest: "
            "@fedpax.program(islands=4, clients=8)."
        )
    for entry in entries:
        if entry.placement.name == name and entry.inside:
            raise ValueError(
                f"{function}(placement={name!r}) was called on a participant of {name!r}, which "
                "sees its own values alone. Call it after federated_map()."
            )
        if entry.placement.name == name:
            return entry
    known = ", ".join(repr(a.placement.name) for a in entries)
    raise ValueError(
        f"{function}(placement={name!r}): there is no such placement here, only {known}. Pass one "
        f"of these, or declare it: @fedpax.program({name}=...)."
    )


def check_placed(function: str, tree: Any, placement: Placement, argument: str) -> list[jax.Array]:
    """Checks that every leaf has the placement's axis in front, and returns the leaves as arrays.

    Raises:
        TypeError: a leaf that is no array and no number.
        ValueError: a leaf without a leading axis of the placement's size; the message names its
            path.
    """
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        where = argument + jax.tree_util.keystr(path)
        array = check_array(function, leaf, where)
        if array.ndim == 0 or array.shape[0] != placement.size:
            found = f"has shape {array.shape}" if array.ndim else "is a scalar"
            raise ValueError(
                f"{function}(): {where} {found}, expected a leading axis of size {placement.size}, "
                f"as of every value placed at {placement.name!r}. Pass a server value through "
                "federated_broadcast() first, or let the mapped function close over it."
            )
        leaves.append(array)
    return leaves


def check_array(function: str, leaf: Any, where: str) -> jax.Array:
    """Returns a leaf as an array, or raises a TypeError that names it."""
    try:
        jax.typeof(leaf)
    except TypeError:
        raise TypeError(
            f"{function}(): {where} is of type {type(leaf).__name__}, expected arrays or numbers. "
            "Take it out of the tree; a function may close over it."
        ) from None
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
