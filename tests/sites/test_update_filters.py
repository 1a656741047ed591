"""Guards of updates: which are dropped, against plain references and laws."""

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.sites.update_filters import (
    NO_NORMS,
    AcceptIf,
    NormHistory,
    drop_harmful,
    drop_large,
    parse_accept_if,
)

positive = st.floats(1e-6, 1e6)
norms = st.dictionaries(st.text(min_size=1, max_size=3), positive, min_size=1, max_size=9)


@given(st.lists(norms, min_size=1, max_size=6), st.floats(0.5, 5), st.integers(1, 4))
@settings(deadline=None)
def test_norms_are_bounded_by_the_median_of_the_window(rounds, factor, window) -> None:
    history, seen = NO_NORMS, []
    for result in rounds:
        dropped, history = drop_large(result, history, factor=factor, window=window)
        seen = [*seen, list(result.values())][-window:]
        limit = factor * statistics.median(np.concatenate(seen).tolist())
        assert set(dropped) == {site for site, norm in result.items() if norm > limit}


@given(st.integers(1, 4), st.data())
@settings(deadline=None)
def test_a_minority_cannot_move_the_limit_beyond_the_honest(cheaters, data) -> None:
    honest = cheaters + 1
    history, largest, smallest = NO_NORMS, 0.0, math.inf
    for _ in range(5):
        good = data.draw(st.lists(positive, min_size=honest, max_size=honest))
        bad = data.draw(st.lists(st.floats(0, 1e30), min_size=cheaters, max_size=cheaters))
        largest, smallest = max(largest, *good), min(smallest, *good)
        result = {f"g{i}": x for i, x in enumerate(good)} | {f"b{i}": x for i, x in enumerate(bad)}
        dropped, history = drop_large(result, history)
        for i, norm in enumerate(bad):
            assert norm <= 3 * largest or f"b{i}" in dropped
        for i, norm in enumerate(good):
            assert norm > 3 * smallest or f"g{i}" not in dropped


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_values_that_are_not_finite_are_dropped_and_forgotten(norm: float) -> None:
    dropped, history = drop_large({"a": norm, "b": 1.0})
    assert dropped == {"a": "it has values that are not finite"}
    assert history == NormHistory(((1.0,),))
    dropped, history = drop_large({"a": norm}, history)
    assert "a" in dropped and history == NormHistory(((1.0,),))
    assert drop_large({}, history) == ({}, history)


@pytest.mark.parametrize("options", [{"factor": 0}, {"factor": math.nan}, {"window": 0}])
def test_limits_that_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"expected numbers above 0\. Use factor=3"):
        drop_large({"a": 1.0}, **options)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("loss+0.05", AcceptIf("loss", 0.05)),
        ("loss + 0.05", AcceptIf("loss", 0.05)),
        ("loss+0", AcceptIf("loss", 0.0)),
        ("accuracy-1e-2", AcceptIf("accuracy", 0.01, larger_is_better=True)),
        ("top_5-.5", AcceptIf("top_5", 0.5, larger_is_better=True)),
    ],
)
def test_rules(text: str, rule: AcceptIf) -> None:
    assert parse_accept_if(text) == rule


@pytest.mark.parametrize(
    "text", ["", "loss", "loss+", "+0.05", "loss+x", "loss*2", "loss+-1", "1+1"]
)
def test_rules_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rule, expected METRIC\+TOLERANCE"):
        parse_accept_if(text)


def losses_of_a_merge(quality: dict[str, float]) -> Callable[[frozenset[str]], dict[str, float]]:
    """Return an evaluation: the loss is the mean of what the updates do, 1 without any."""
    return lambda sites: {"loss": statistics.fmean([quality[s] for s in sites]) if sites else 1.0}


@given(st.lists(st.floats(0.0, 0.9), min_size=3, max_size=6), st.floats(20.0, 1e6), st.data())
@settings(deadline=None)
def test_what_makes_the_model_worse_is_dropped(good, bad, data) -> None:
    quality = {f"s{i}": loss for i, loss in enumerate(good)}
    cheater = f"s{data.draw(st.integers(0, len(good)))}x"
    quality |= {cheater: bad}
    dropped = drop_harmful(quality, losses_of_a_merge(quality), parse_accept_if("loss+0.9"))
    assert set(dropped) == {cheater}  # the good ones differ by less than the tolerance


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(allow_nan=False), min_size=1),
    st.floats(0, 10),
    st.booleans(),
)
@settings(deadline=None)
def test_the_rest_does_no_more_harm_than_the_tolerance(values, tolerance, larger) -> None:
    calls: list[frozenset[str]] = []
    table: dict[frozenset[str], float] = {}
    pool = itertools.cycle(values.values())

    def evaluate(sites: frozenset[str]) -> dict[str, float]:
        calls.append(sites)
        return {"m": table.setdefault(sites, next(pool))}  # any function of the sites

    rule = AcceptIf("m", tolerance, larger)
    dropped = drop_harmful(values, evaluate, rule)
    left = frozenset(values) - set(dropped)
    for i, site in enumerate(dropped):  # each one did harm, and most of all
        before = frozenset(values) - set(list(dropped)[:i])
        losses = {s: rule.loss({"m": table[before - {s}]}) for s in before}
        assert losses[site] == min(losses.values())
        assert losses[site] + tolerance < rule.loss({"m": table[before]})
        assert dropped[site].startswith("m ")
    for site in left:
        assert not rule.loss({"m": table[left - {site}]}) + tolerance < rule.loss(
            {"m": table[left]}
        )
    assert len(calls) == 1 + sum(len(values) - i for i in range(len(dropped) + bool(left)))


def test_sites_that_complement_each_other_are_kept() -> None:
    # Each update alone makes the model worse; together they make it better.
    def evaluate(sites: frozenset[str]) -> dict[str, float]:
        return {"loss": {0: 1.0, 1: 3.0, 2: 0.5, 3: 0.2}[len(sites)]}

    assert drop_harmful("abc", evaluate, parse_accept_if("loss+0.01")) == {}


def test_metrics_that_are_not_finite_are_worst() -> None:
    def evaluate(sites: frozenset[str]) -> dict[str, float]:
        return {"loss": math.nan if "b" in sites else 1.0, "accuracy": 0.5 + 0.1 * len(sites)}

    assert list(drop_harmful("abc", evaluate, parse_accept_if("loss+0.01"))) == ["b"]
    assert drop_harmful("abc", evaluate, parse_accept_if("accuracy-0.01")) == {}
    assert drop_harmful("", evaluate, parse_accept_if("loss+0.01")) == {}
    with pytest.raises(ValueError, match=r"metric 'lossy', expected one of .*: accuracy, loss\."):
        drop_harmful("a", evaluate, parse_accept_if("lossy+1"))
