"""Eight simulated CPU devices, and the meshes that the tests share."""

import os
import tempfile
from collections.abc import Callable

import hypothesis
import jax
import pytest
from jax.sharding import AxisType, Mesh

from fedpax.parallel.simulation import simulate_devices

# Before any test can start a backend; the variable is for the processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
simulate_devices(8)

# Datasets are prepared anew, in one folder for all workers, and by the code under test.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _data_dir = tempfile.TemporaryDirectory(prefix="fedpax-tests-")
    os.environ["TFDS_DATA_DIR"] = _data_dir.name

# JAX compiles at the first example, so a deadline would measure the compiler.
hypothesis.settings.register_profile("fedpax", deadline=None, max_examples=20)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("fedpax"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "fedpax")

AXIS_TYPES = {
    "automatic": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@pytest.fixture
def clients_fsdp() -> Callable[[str], Mesh]:
    """Makes the 4 x 2 mesh (clients, fsdp) with "automatic", "explicit" or "mixed" axes."""

    def make(axis_types: str = "automatic") -> Mesh:
        return jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=AXIS_TYPES[axis_types])

    return make


@pytest.fixture(params=[None, *AXIS_TYPES])
def any_mesh(request: pytest.FixtureRequest, clients_fsdp: Callable[[str], Mesh]) -> Mesh | None:
    """Runs a test on no mesh and on the 4 x 2 mesh (clients, fsdp) with each kind of axes."""
    return request.param and clients_fsdp(request.param)
