"""The updates of clients that a server part reads: in files where they are large."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from fedpax.sites import stage_calls
from fedpax.sites.stage_calls import UpdateRows
from fedpax.transforms.client_stages import Value
from sites.federation import run
from sites.small_experiment import small, train_together

VALUES = [Value("x", (3, 50), np.dtype(np.float32)), Value("here", (), np.dtype(np.bool_))]
HALF = Value("half", (2,), np.dtype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("limit", [1, 2000, 1 << 26], ids=["files", "a file", "memory"])
def test_rows_have_the_places_of_their_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(stage_calls, "LARGEST_IN_MEMORY", limit)
    random = np.random.default_rng(0)
    x, here = np.float32(random.normal(size=(5, 3, 50))), np.ones(5, bool)
    half = random.normal(size=(5, 2)).astype(ml_dtypes.bfloat16)
    with UpdateRows([*VALUES, HALF], 6, tmp_path) as rows:
        rows.add([4, 0], [x[:2], here[:2], half[:2]])
        rows.add([2, 5, 1], [x[2:], here[2:], half[2:]])
        completed, places = rows.finish()
    assert places == (list(range(6)) if limit < 1 << 26 else [4, 0, 2, 5, 1])
    for leaf, values in zip(completed, (x, here, half), strict=True):
        placed = np.zeros((6, *values.shape[1:]), values.dtype)
        placed[[4, 0, 2, 5, 1]] = values
        np.testing.assert_array_equal(leaf, placed if limit < 1 << 26 else values)
    assert list(tmp_path.iterdir()) == []


def test_a_mapped_value_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_calls, "LARGEST_IN_MEMORY", 1)
    with UpdateRows(VALUES[:1], 1, tmp_path) as rows:
        rows.add([0], [np.ones((1, 3, 50), np.float32)])
        (completed,), _ = rows.finish()
    assert completed.unsafe_buffer_pointer() % 4096 == 0  # of the map
    assert isinstance(completed, jax.Array)


def test_no_client_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_calls, "LARGEST_IN_MEMORY", 1)
    with UpdateRows(VALUES, 6, tmp_path) as rows:
        completed, places = rows.finish()
    assert places == [] and [x.shape for x in completed] == [(0, 3, 50), (0,)]


@pytest.mark.parametrize("method", ["median", pytest.param("krum", marks=pytest.mark.slow)])
def test_rounds_are_equal_with_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(stage_calls, "LARGEST_IN_MEMORY", 1)
    sites = {
        name: small(method, 2, clients=clients, data_seed=seed)
        for seed, (name, clients) in enumerate({"a": 3, "b": 1, "c": 2}.items())
    }
    outcome = run(small(method, 2), sites, tmp_path)
    wanted = train_together(sites, 2, lambda _: list(sites)).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(wanted), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
