"""What a site says that its clients weigh: bounded by the coordinator, not by the site."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedpax
from fedpax.sites.coordinator_program import (
    divide,
    expected_arrays,
    weight_limits,
    weighted_terms,
)
from fedpax.sites.downlink import whole
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import read_sites
from fedpax.sites.tasks import Task, find_fault
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import METHODS, make_data, small, train_together


def divided_of(method: str) -> Any:
    """Return the round of a method in stages, for clients with two examples each."""
    algorithm, params = METHODS[method](2, 2), small(method).init(None)
    ids = np.arange(2, dtype=np.int32)
    cohort = fedpax.Cohort(make_data(2, 0), ids + 2, ids + 1, ids)
    return divide(algorithm, jax.eval_shape(algorithm.init, params), cohort, None)


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize(
    ("rule", "weight", "fault"),
    [
        ("examples", 1e9, None),
        ("examples", -1.0, "its weight is -1"),
        ("examples", 0.0, "its weight is 0 and its values are not"),
        ("equal", 2.0, None),
        ("equal", 3.0, "its weight is 3, expected 0 to 2"),
        ("capped:10", 20.0, None),
        ("capped:10", 21.0, "its weight is 21, expected 0 to 20"),
        ("examples", 2.0**40, "its weight is 1.09951e+12, expected 0 to 4.29497e+09"),
        ("equal", 2.0**40, "its weight is 1.09951e+12, expected 0 to 2"),
        ("capped:1000", 2.0**40, "its weight is 1.09951e+12, expected 0 to 2000"),
    ],
)
def test_weights_are_checked(method: str, rule: str, weight: float, fault: str | None) -> None:
    divided = divided_of(method)
    expected, limits = expected_arrays(divided[0]), weight_limits(divided[0], rule)
    weighted = weighted_terms(divided, 0)
    assert len(limits) == 1 and {*weighted.values()} == {*limits}
    task = Task("t", {}, whole({}), {}, expected, limits, weighted)
    arrays = {name: np.ones(shape, dtype) for name, (shape, dtype) in expected.items()}
    arrays |= {name: np.float32(weight) for name in limits}
    result = find_fault(task, {"clients": [0, 1]}, arrays)
    assert result is None if fault is None else result is not None and fault in result


class Claims(Line):
    """A line that sends large values without a weight."""

    def call(self, message: Message, timeout: float) -> Message:
        header = message.header
        if header["kind"] == "reply" and "examples" in header["fields"]:
            arrays = {
                name: x * np.float32(0 if x.ndim == 0 else 1e6)
                for name, x in message.arrays.items()
            }
            message = message._replace(arrays=arrays)
        return super().call(message, timeout)


class ClaimsExamples(Line):
    """A line of a site that says that it has 2^40 examples, and weighs its update so."""

    def call(self, message: Message, timeout: float) -> Message:
        fields = message.header.get("fields", {})
        if "examples" in fields:
            factor = np.float32(2.0**40 / fields["examples"])
            message = Message(
                {**message.header, "fields": {"examples": 2**40}},
                {name: x * factor for name, x in message.arrays.items()},
            )
        return super().call(message, timeout)


@pytest.mark.parametrize(
    "weights",
    ["examples", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("equal", "capped:100"))],
)
def test_a_site_cannot_claim_all_examples(tmp_path: Path, weights: str) -> None:
    sites = {name: small(rounds=1, data_seed=seed) for seed, name in enumerate("abc")}
    rules = RoundRules(2, 60.0, weights=weights)
    lines = {"c": ClaimsExamples}
    outcome = run(small(rounds=1), sites, tmp_path, rules=rules, first_round_needs=3, lines=lines)
    rows = {site.name: site for site in read_sites(outcome.folder / "coordinator")}
    assert {name: (row.rounds, row.dropped) for name, row in rows.items()} == {
        "a": (1, 0),
        "b": (1, 0),
        "c": (0, 1),
    }


def test_a_site_cannot_have_more_clients_than_the_coordinator_allows(tmp_path: Path) -> None:
    sites = {
        name: small(rounds=1, clients=n, data_seed=n)
        for name, n in {"a": 1, "b": 2, "c": 4}.items()
    }
    outcome = run(
        small(rounds=1),
        sites,
        tmp_path,
        rules=RoundRules(2, 60.0, clients_per_site=3),
        may_be_refused=["c"],
    )
    words = "site 'c' has 4 clients, expected at most 3. Start `fedpax syncer` with --clients_per"
    assert words in outcome.refused["c"]
    assert outcome.coordinator.exchange.sites.num_clients == 3
    with pytest.raises(ValueError, match="clients_per_site=0, expected at least 1"):
        RoundRules(clients_per_site=0).check()


def test_values_without_a_weight_are_not_merged(tmp_path: Path) -> None:
    sites = {name: small(rounds=2, data_seed=seed) for seed, name in enumerate("abc")}
    rules = RoundRules(2, 60.0, norm_factor=3.0)
    lines = {"c": Claims}
    outcome = run(small(rounds=2), sites, tmp_path, rules=rules, first_round_needs=3, lines=lines)
    rows = {site.name: site for site in read_sites(outcome.folder / "coordinator")}
    assert (rows["c"].rounds, rows["c"].dropped) == (0, 2)
    wanted = train_together(sites, 2, lambda _: ["a", "b"]).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)
