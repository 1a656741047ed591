"""Clients that disagree on quadratics: who finds the optimum of their mean, and who drifts.

The problem is from the benchmark `client_drift`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Float

from fedpax.experiments.benchmarks import client_drift
from fedpax.experiments.benchmarks.client_drift import Quadratics, distances, draw_quadratics

PROBLEM = draw_quadratics()


def fixed_point(
    problem: Quadratics, *, mu: float = 0.0, local_steps: int = 10, rate: float = 0.1
) -> Float[np.ndarray, " size"]:
    """Return the point to which FedAvg converges, or FedProx with weight `mu`.

    From x, client i ends at x - M_i (x - b_i), with M_i the sum over k < K of
    (I - eta (A_i + mu I))^k eta A_i. At the fixed point, these moves have mean 0.
    """
    hessians, centers = problem
    moves = np.zeros_like(hessians)
    for _ in range(local_steps):
        moves += rate * (hessians - (hessians + mu * np.eye(len(centers[0]))) @ moves)
    return np.linalg.solve(moves.sum(0), np.einsum("ijk,ik->j", moves, centers))


@pytest.mark.parametrize(("method", "mu"), [("FedAvg", 0.0), ("FedProx", 0.5)])
def test_fedavg_and_fedprox_drift_to_a_point_that_is_not_the_optimum(method: str, mu: float):
    params, errors = distances(PROBLEM, method, rounds=100)
    np.testing.assert_allclose(params, fixed_point(PROBLEM, mu=mu), rtol=1e-9)
    assert errors[-1] > 0.1


def test_a_proximal_term_reduces_the_drift():
    errors = [
        np.linalg.norm(fixed_point(PROBLEM, mu=mu) - PROBLEM.optimum) for mu in (0.0, 0.5, 5.0)
    ]
    assert errors[0] > errors[1] > errors[2] > 0.1


def test_more_local_steps_drift_further():
    errors = [
        np.linalg.norm(fixed_point(PROBLEM, local_steps=k) - PROBLEM.optimum) for k in (1, 2, 10)
    ]
    assert errors[0] < 1e-12 < 0.01 < errors[1] < errors[2]


@pytest.mark.parametrize("method", ["SCAFFOLD I", "SCAFFOLD II", "FedDyn", "Mime"])
def test_corrected_methods_converge_linearly_to_the_optimum(method: str):
    """The error falls at least tenfold every ten rounds, down to rounding."""
    _, errors = distances(PROBLEM, method, rounds=100)
    assert errors[0] > 0.1
    assert (errors[10:] < np.maximum(0.1 * errors[:-10], 1e-13)).all()
    assert errors[-1] < 1e-13


def test_mime_lite_drifts():
    assert distances(PROBLEM, "MimeLite", rounds=100)[1][-1] > 0.1


def test_the_command_prints_the_distances_and_draws_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    file, plot = tmp_path / "drift.json", tmp_path / "drift.png"
    arguments = ["--rounds=60", "--local_steps=1,10", "--methods=FedAvg;SCAFFOLD I"]
    assert client_drift.main([*arguments, f"--json={file}", f"--plot={plot}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    result = {(row["local_steps"], row["method"]): row["distances"] for row in rows}
    expected = distances(PROBLEM, "SCAFFOLD I", rounds=60)[1]
    np.testing.assert_allclose(result[10, "SCAFFOLD I"], expected, rtol=1e-6)
    assert result[10, "FedAvg"][-1] > 0.1 > result[1, "FedAvg"][-1]
    out = capsys.readouterr().out
    assert "10 local steps:" in out and f"{expected[9]:.1e}" in out
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--methods=Fedavg", "unknown methods"), ("--rounds=0", "expected at least 1")],
)
def test_the_command_raises_for_unknown_methods_and_empty_runs(
    capsys: pytest.CaptureFixture[str],
    argument: str,
    words: str,
):
    with pytest.raises(SystemExit):
        client_drift.main([argument])
    assert words in capsys.readouterr().err
