"""Compressed means over sites: equal to one program, and a site of one client sends words."""

from pathlib import Path

import jax
import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import format_sites, read_sites
from fedpax.sites.site_worker import SiteWorker
from fedpax.transport.calls import RefusedError
from sites.federation import HeavyLine, run
from sites.small_experiment import small, train_together

FEATURES = 600


@pytest.mark.parametrize("name", [pytest.param("compressed", marks=pytest.mark.slow), "feedback"])
def test_equal_to_one_program(tmp_path: Path, name: str) -> None:
    sizes = {"a": 1, "b": 1, "c": 2}
    sites = {
        site: small(name, 3, clients=count, data_seed=seed, features=FEATURES)
        for seed, (site, count) in enumerate(sizes.items())
    }
    outcome = run(small(name, 3, features=FEATURES), sites, tmp_path)
    expected = train_together(sites, 3, lambda _: list(sites)).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
    rows = {site.name: site for site in read_sites(outcome.folder / "coordinator")}
    whole = 3 * 4 * FEATURES
    assert rows["a"].received_bytes < whole / 5  # 4 bits a number, scales of blocks, few more
    assert whole < rows["c"].received_bytes < 1.1 * whole  # the sum over its two clients
    lines = select(read_metrics(outcome.folder / "coordinator"), "training")
    received = sum(line["received_bytes"] for line in lines)
    assert received == sum(site.received_bytes for site in rows.values())
    assert "| up" in format_sites(list(rows.values()))


def test_a_site_of_several_clients_sends_their_sum_alone(tmp_path: Path) -> None:
    worker = SiteWorker(
        small("compressed", clients=2, features=FEATURES),
        tmp_path,
        seed=0,
        save=lambda *_: None,
        on_metrics=lambda *_: None,
    )
    header = {"task": "round", "token": "t", "stage": 0, "first_client": 0, "num_clients": 2}
    header |= {"clients": [1], "slots": [1], "counted": None, "round": 1, "weights": "equal"}
    arrays = {"shared 0": np.float32(0), "shared 1": np.zeros(FEATURES, np.float32)}
    arrays |= {"shared 2": np.zeros(2, np.uint32), "row 0": np.ones(1, np.int32)}
    assert worker.work(header, arrays)[0] == {"examples": 1}
    with pytest.raises(RefusedError, match="expected the sum over this site's 2 clients"):
        worker.work({**header, "coded": True}, arrays)


def test_a_weight_in_words_is_checked(tmp_path: Path) -> None:
    class Heavy(HeavyLine):
        weight = 8

    sites = {
        s: small("compressed", 1, data_seed=seed, features=FEATURES) for seed, s in enumerate("ab")
    }
    rules = RoundRules(1, 60.0, weights="capped:100")
    coordinator = small("compressed", 1, features=FEATURES)
    run(coordinator, sites, tmp_path, rules=rules, first_round_needs=2, lines={"a": Heavy})
    rows = {site.name: site for site in read_sites(tmp_path / "coordinator")}
    assert (rows["a"].rounds, rows["a"].dropped) == (0, 1)
    assert (rows["b"].rounds, rows["b"].dropped) == (1, 0)
