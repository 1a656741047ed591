"""Fixtures for meshes: no mesh, and clients x fsdp with each kind of axes."""

from collections.abc import Iterator

import pytest
from jax.sharding import Mesh
from mesh_kinds import KINDS, under

MAIN = ("automatic", "explicit")


@pytest.fixture(
    params=[
        k if k in ("no mesh", *MAIN) else pytest.param(k, marks=pytest.mark.slow) for k in KINDS
    ]
)
def current_mesh(request: pytest.FixtureRequest) -> Iterator[Mesh | None]:
    """Run a test without a mesh, and on the 4 x 2 mesh (clients, fsdp) of every kind."""
    yield from under(request.param)


@pytest.fixture(params=[k if k in MAIN else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def main_mesh(request: pytest.FixtureRequest) -> Iterator[Mesh | None]:
    """Run as `current_mesh`; for tests that compile long, only two of the five kinds are fast."""
    yield from under(request.param)


@pytest.fixture(
    params=[
        k if k in (*MAIN, "clients explicit") else pytest.param(k, marks=pytest.mark.slow)
        for k in KINDS
        if KINDS[k]
    ]
)
def mesh_only(request: pytest.FixtureRequest) -> Iterator[Mesh | None]:
    """Run as `current_mesh`, but always with a mesh."""
    yield from under(request.param)


@pytest.fixture
def explicit_mesh() -> Iterator[Mesh | None]:
    """Run a test on the 4 x 2 mesh (clients, fsdp) with explicit axes."""
    yield from under("explicit")
