"""The meshes on which the passes are tested."""

from collections.abc import Iterator

import pytest
from jax.sharding import Mesh
from mesh_kinds import under
from program_table import slow


@pytest.fixture(params=[slow("no mesh"), "automatic", "explicit", slow("clients explicit")])
def current_mesh(request: pytest.FixtureRequest) -> Iterator[Mesh | None]:
    """Run a test without a mesh, and on 4 x 2 meshes (clients, fsdp) of several kinds."""
    yield from under(request.param)
