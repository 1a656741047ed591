"""A coordinator that ends between two writes of its files, and its sites after that."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.sites.coordinator import Coordinator
from fedpax.sites.coordinator_files import read_federation
from fedpax.sites.run_coordinator import run_coordinator
from sites.federation import run
from sites.small_experiment import small, train_together


@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_round_whose_state_is_not_saved_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    sites = {name: small("scaffold", 3, data_seed=seed) for seed, name in enumerate("ab")}
    save = Checkpoints.save

    def fail(self: Checkpoints, number: int, *content: Any) -> None:
        if number == lost:
            raise OSError("killed")
        save(self, number, *content)

    monkeypatch.setattr(Checkpoints, "save", fail)
    with pytest.raises(OSError, match="killed"):
        run(small("scaffold", 3), sites, tmp_path)
    monkeypatch.setattr(Checkpoints, "save", save)
    outcome = run(small("scaffold", 3), sites, tmp_path, done=lost - 1)
    wanted = train_together(sites, 3, lambda _: list(sites)).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def test_a_run_keeps_its_name_before_the_sites_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grpc")
    names = []

    def end(self: Coordinator) -> None:
        names.append(self.exchange.run)
        raise InterruptedError

    monkeypatch.setattr(Coordinator, "run", end)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            run_coordinator(small(), tmp_path, "127.0.0.1:0")
    assert names[0] == names[1]
    saved = read_federation(tmp_path)
    assert saved is not None and saved["run"] == names[0] and saved["inputs"] is None
