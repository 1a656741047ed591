"""States of a site's clients belong to their names, whatever their places in the site's list."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedpax.errors import ArgumentError
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_files import KeptValues, check_names
from fedpax.sites.site_table import SiteTable
from sites.federation import run
from sites.small_experiment import small
from sites.test_rounds import three_sites


def test_reordered_clients_keep_their_states(tmp_path: Path) -> None:
    rules = RoundRules(3, 60.0, weights="equal")
    plain = run(small("scaffold"), three_sites("scaffold"), tmp_path / "plain", rules=rules)
    run(small("scaffold", 2), three_sites("scaffold", 2), tmp_path / "moved", rules=rules)
    sites = three_sites("scaffold")
    sites["c"] = dataclasses.replace(sites["c"], order=(2, 0, 1))
    moved = run(small("scaffold"), sites, tmp_path / "moved", rules=rules, done=2)
    for leaf, other in zip(plain.params, moved.params, strict=True):
        assert np.abs(leaf).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def test_states_of_absent_clients_are_kept(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    states = {name: {"control": random.normal(size=3)} for name in ("a/b", "ü", "..")}
    KeptValues(tmp_path).propose("t1", states)
    KeptValues(tmp_path).settle("t1", "t2")
    later = KeptValues(tmp_path)  # another process, in which a client is absent
    new = {"ü": {"control": random.normal(size=3)}}
    later.propose("t2", new)
    np.testing.assert_array_equal(later.read("ü")["control"], states["ü"]["control"])
    later.settle("t2", "t3")
    for name, state in {**states, **new}.items():
        np.testing.assert_array_equal(later.read(name)["control"], state["control"])
    assert later.read("another") == {}
    assert all(path.parent == tmp_path / "kept" for path in tmp_path.rglob("*.state"))


@pytest.mark.parametrize(
    ("names", "words"),
    [(["x", "y", "x"], "'x' names several clients"), (["x"], "1 names of this site")],
)
def test_each_client_needs_a_name_of_its_own(names: list[str], words: str) -> None:
    check_names(["x", "y", "z"], 3)
    with pytest.raises(ArgumentError, match=words):
        check_names(names, 3)


def test_a_site_with_more_clients_keeps_the_token_of_its_states() -> None:
    sites = SiteTable(30.0)
    sites.add("a", 2).counted = "t1"
    sites.add("b", 1)
    site = sites.add("a", 3)
    assert (site.first, site.count, site.counted, sites.num_clients) == (3, 3, "t1", 6)
