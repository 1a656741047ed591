"""The meshes on which the passes are tested."""

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
    """Run a test without a mesh, and on 4 x 2 meshes (clients, fsdp) of several kinds."""
    yield from under(request.param)
