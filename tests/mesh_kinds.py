"""Variants of the 4 x 2 mesh (clients, fsdp) that differ in the types of the two axes."""

from collections.abc import Iterator

import jax
from jax.sharding import AxisType, Mesh

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "no mesh": None,
    "automatic": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "clients explicit": (EXPLICIT, AUTO),
    "fsdp explicit": (AUTO, EXPLICIT),
}


def under(kind: str) -> Iterator[Mesh | None]:
    """Set the mesh of a kind while a test runs; used by fixtures."""
    types = KINDS[kind]
    if types is None:
        yield None
        return
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=types)
    with jax.set_mesh(mesh):
        yield mesh
