"""Every method equals its NumPy reference on random data: eager and jitted, on every mesh."""

import numpy as np
import pytest
from method_problem import TOLERANCE
from method_table import MESHES, METHODS, problem, run_eager, trainer

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")

ROUNDS = 3
# float32 against float64; atol is for entries that are themselves near 0.
OFTEN = ("none", "4x2 automatic", "4x2 explicit")


def check(history: list, expected: list) -> None:
    assert len(history) == len(expected)
    for (state, metrics), (params, expected_metrics) in zip(history, expected, strict=True):
        assert metrics.keys() == expected_metrics.keys()
        assert state.params.keys() == params.keys()
        for got, want in ((state.params, params), (metrics, expected_metrics)):
            for name in want:
                np.testing.assert_allclose(got[name], want[name], err_msg=name, **TOLERANCE)


def is_quick(name: str, mesh: str) -> bool:
    # MuLoCo's unrolled Newton-Schulz steps compile slowly; MimeLiteAdam has both changes of Mime.
    is_slow = name in ("MuLoCo", "MimeLite", "MimeAdam")
    often = name in ("FedAdam", "DiLoCo") and mesh == "4x2 explicit"
    return (mesh == "none" and not is_slow) or often


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if is_quick(name, mesh) else pytest.mark.slow)
        for name in METHODS
        for mesh in MESHES
    ],
)
def test_jitted(name: str, mesh: str):
    check(trainer(name, mesh).run(*problem(ROUNDS)), METHODS[name].reference(*problem(ROUNDS)))


@pytest.mark.parametrize(
    "mesh", ["8 automatic", *[pytest.param(m, marks=pytest.mark.slow) for m in OFTEN]]
)
@pytest.mark.parametrize(
    "name",
    [n if n in ("FedAvg", "DiLoCo") else pytest.param(n, marks=pytest.mark.slow) for n in METHODS],
)
def test_eager(name: str, mesh: str):
    check(run_eager(name, mesh, *problem(ROUNDS)), METHODS[name].reference(*problem(ROUNDS)))
