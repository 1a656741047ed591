"""Guards of a syncer's merges: what is dropped is not merged, is named, and is counted."""

import json

import jax
import numpy as np
import pytest
from islands.syncer_methods import three

from fedpax.errors import ArgumentError
from fedpax.islands.syncer.merge_votes import GuardedMerges, GuardRules
from fedpax.islands.syncer.syncer_store import SyncerStore

pytestmark = pytest.mark.xdist_group("sites")


def guarded(rules, evaluate=None, **options):
    guard = GuardedMerges(rules, 1, evaluate)
    return three("plain", quorum=3, options={"guard": guard}, **options), guard


def merged_by_a_and_b(values):
    sites = three("plain", quorum=2, grace_seconds=0.0)
    for name in "ab":
        sites.push(name, values[name])
    assert sites.syncer.merges == 1
    return sites.params()


def assert_equal(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.abs(y).max() > 0.01
        np.testing.assert_allclose(x, y, rtol=1e-6)


VALUES = {"a": 0.01, "b": 0.011, "c": -0.5}


@pytest.mark.parametrize("rules", [GuardRules(norm_factor=3.0), GuardRules(accept_if="loss+0.001")])
def test_an_update_that_harms_is_not_merged(rules):
    expected = merged_by_a_and_b(VALUES)

    def evaluate(params):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
        return {"loss": float(sum(np.sum((np.asarray(x) - y) ** 2) for x, y in pairs))}

    sites, _ = guarded(rules, evaluate)
    for name, value in VALUES.items():
        assert sites.push(name, value) == "accepted"
    assert sites.syncer.merges == 1
    assert_equal(sites.params(), expected)
    (report,) = sites.reports
    assert report.islands == ("a", "b") and report.metrics["dropped_islands"] == 1.0
    assert sites.syncer.totals.guarded == 1
    assert {i.name: i.dropped for i in sites.syncer.islands()} == {"a": 0, "b": 0, "c": 1}


def test_honest_updates_are_merged_as_without_a_guard():
    plain = three("plain", quorum=3)
    sites, _ = guarded(GuardRules(3.0, "loss+10"), lambda params: {"loss": 1.0})
    for each in (plain, sites):
        for name, value in {**VALUES, "c": 0.02}.items():
            each.push(name, value)
    assert sites.syncer.merges == plain.syncer.merges == 1
    assert_equal(sites.params(), plain.params())
    assert sites.reports[0].metrics["dropped_islands"] == 0.0


def test_a_merge_of_which_all_is_dropped_changes_nothing():
    sites, _ = guarded(GuardRules(accept_if="loss+0"), None)
    before = sites.params()

    def evaluate(params):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True)
        return {"loss": float(sum(np.sum((np.asarray(x) - y) ** 2) for x, y in pairs))}

    sites.options["guard"] = GuardedMerges(GuardRules(accept_if="loss+0"), 1, evaluate)
    sites.syncer._guard = sites.options["guard"]
    for name, value in VALUES.items():
        sites.push(name, value)
    assert sites.syncer.merges == 1 and sites.syncer.totals.guarded == 3
    assert_equal(sites.params(), before)


def test_the_norms_outlive_the_process(tmp_path):
    sites, guard = guarded(GuardRules(3.0), store=SyncerStore(tmp_path))
    for name, value in VALUES.items():
        sites.push(name, value)
    saved = json.loads(json.dumps(guard.to_json()))
    assert len(saved[0][0]) == 3
    again = GuardedMerges(GuardRules(3.0), 1)
    sites.options, sites.store = {"guard": again}, SyncerStore(tmp_path)
    sites.start_syncer()
    assert again.to_json() == saved


def test_rules_are_checked():
    with pytest.raises(ArgumentError, match="expected a number of at least 1"):
        GuardRules(0.5).check()
    with pytest.raises(ArgumentError, match="is not a rule"):
        GuardRules(accept_if="loss").check()
