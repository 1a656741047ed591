"""A site cannot send other values in a later stage than those that it showed before."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.sites.site_worker import SiteWorker
from sites.federation import run
from sites.small_experiment import small, train_together
from sites.test_rounds import three_sites


def test_krum_sums_the_updates_that_it_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = SiteWorker._run_clients, set[int]()

    def lie(worker: SiteWorker, divided: Any, header: Any, *args: Any) -> dict[str, np.ndarray]:
        sent = dict(honest(worker, divided, header, *args))
        asked.add(header["stage"])
        if header["stage"] == 1:  # honest when Krum looks, and not when the sum is made
            sent = {name: 1e6 * x for name, x in sent.items()}
        return sent

    monkeypatch.setattr(SiteWorker, "_run_clients", lie)
    sites = three_sites("krum", rounds=2)
    outcome = run(small("krum", 2), sites, tmp_path)
    expected = train_together(sites, 2, lambda _: list(sites)).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    assert asked == {0}
