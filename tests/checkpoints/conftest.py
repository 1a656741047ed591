"""Shared by the tests of checkpoints."""

import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.parallel.mesh import make_mesh


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding(make_mesh(clients=4, fsdp=2), PartitionSpec("clients", "fsdp"))
