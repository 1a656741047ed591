"""The meshes that the passes are tested on."""

from collections.abc import Iterator

import pytest
from jax.sharding import Mesh
from mesh_kinds import under


@pytest.fixture(
    params=[
        pytest.param("no mesh", marks=pytest.mark.slow),
        "automatic",
        "explicit",
        pytest.param("clients explicit", marks=pytest.mark.slow),
    ]
)
def current_mesh(request: pytest.FixtureRequest) -> Iterator[Mesh | None]:
    """Runs a test without a mesh, and under the 4 x 2 mesh (clients, fsdp) of several kinds."""
    yield from under(request.param)
