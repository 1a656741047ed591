"""The meshes that the passes are tested on."""

from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AxisType, Mesh

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "no mesh": None,
    "automatic": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "clients explicit": (EXPLICIT, AUTO),
}


@pytest.fixture(
    params=[
        pytest.param(k, marks=pytest.mark.slow) if k == "clients explicit" else k for k in KINDS
    ]
)
def current_mesh(request: pytest.FixtureRequest) -> Iterator[Mesh | None]:
    """Runs a test without a mesh, and under the 4 x 2 mesh (clients, fsdp) of several kinds."""
    types = KINDS[request.param]
    if types is None:
        yield None
        return
    mesh = jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=types)
    with jax.set_mesh(mesh):
        yield mesh
