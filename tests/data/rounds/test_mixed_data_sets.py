"""Mixtures: weights are met over any steps, and data sets keep their own order."""

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedpax.data import Mixture, token_rounds
from fedpax.data.rounds.mixture import apportion, check_weights, weight_at

LETTERS = "abcd"
SOURCES = {
    letter: [{"text": letter * (5 + n % 7)} for n in range(40 + 30 * k)]
    for k, letter in enumerate(LETTERS)
}
SIZES: dict[str, Any] = {"islands": 2, "local_steps": 3, "batch_size": 4, "seq_len": 16}

positive = st.floats(1e-3, 1e3)


def counts_of(inputs: Any, axes: tuple[int, ...] = (0, 1, 2)) -> Any:
    """Count the rows of each data set, whose texts repeat one letter."""
    return np.stack([(inputs == ord(c)).any(axis=-1).sum(axis=axes) for c in LETTERS], axis=-1)


@given(st.lists(positive, min_size=1, max_size=8), st.integers(1, 300))
@settings(deadline=None)
def test_counts_follow_constant_shares_within_one_row(weights: list[float], rows: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    chosen, credits = apportion([0.0] * len(shares), shares, rows)
    counts = np.cumsum(chosen[:, None] == np.arange(len(shares)), axis=0)
    quotas = np.arange(1, rows + 1)[:, None] * np.array(shares)
    bound = 1 - 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0.0
    assert np.abs(counts - quotas).max() <= bound + 1e-6
    np.testing.assert_allclose(credits, (quotas - counts)[-1], atol=1e-9)


@given(st.lists(positive, min_size=2, max_size=5), st.integers(0, 200), st.integers(0, 200))
def test_apportioning_in_parts_is_the_same(weights: list[float], first: int, second: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    whole, credits = apportion([0.0] * len(shares), shares, first + second)
    before, between = apportion([0.0] * len(shares), shares, first)
    after, ends = apportion(json.loads(json.dumps(between)), shares, second)
    np.testing.assert_array_equal(np.concatenate([before, after]), whole)
    assert ends == credits


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=20, deadline=None)
def test_counts_follow_changing_shares_within_two_rows(seed: int, jumps: bool) -> None:
    rng = np.random.default_rng(seed)
    ends = rng.dirichlet(np.full(4, 0.3), 2)
    ends[:, 0] = [0.0, 1e-3]
    credits, quotas, counts = [0.0] * 4, np.zeros(4), np.zeros(4)
    for step in range(60):
        shares = ends[step % 2] if jumps else ends[0] + (ends[1] - ends[0]) * step / 59
        shares = shares / shares.sum()
        chosen, credits = apportion(credits, shares.tolist(), 5)
        assert not np.any(np.bincount(chosen, minlength=4)[shares == 0])
        quotas += 5 * shares
        counts += np.bincount(chosen, minlength=4)
        assert np.abs(quotas - counts).max() < 2


def test_rows_of_any_steps_have_the_shares_of_their_weights() -> None:
    weights = {"a": 5.0, "b": 2.0, "c": 0.0, "d": 1.5}
    rounds = token_rounds(Mixture(SOURCES, weights), **SIZES)
    counts = np.concatenate(
        [counts_of(next(rounds).batches["inputs"], (0, 2)) for _ in range(20)]
    )  # steps, data sets
    assert counts.sum(axis=1).tolist() == [8] * 60  # one data set a row
    shares = np.array([*weights.values()]) / 8.5
    sums = np.concatenate([np.zeros((1, 4)), np.cumsum(counts - 8 * shares, axis=0)])
    windows = sums[:, None] - sums[None]  # between any two steps
    assert np.abs(windows).max() < 2
    assert not counts[:, 2].any()


def test_every_island_gets_every_data_set() -> None:
    # Two data sets of equal weight would alternate: an island of even rows would get one of them.
    weights = {"a": 1.0, "b": 1.0}
    rounds = token_rounds(Mixture({c: SOURCES[c] for c in "ab"}, weights), **SIZES)
    counts = sum(counts_of(next(rounds).batches["inputs"], (1,)) for _ in range(20))
    assert counts.shape == (2, 4, 4) and counts[..., :2].min() > 15


def test_scheduled_weights_change_the_shares_by_round() -> None:
    weights = {"a": 1.0, "b": [(2, 0.0), (4, 1.0)], "c": [(6, 0.0), (6, 2.0)]}
    sources = {letter: SOURCES[letter] for letter in "abc"}
    rounds = token_rounds(Mixture(sources, weights), **SIZES)
    counts = np.stack([counts_of(next(rounds).batches["inputs"])[:3] for _ in range(8)])
    expected = 24 * np.array(
        [[1, 0, 0]] * 3
        + [[2 / 3, 1 / 3, 0]]
        + [[1 / 2, 1 / 2, 0]] * 2
        + [[1 / 4, 1 / 4, 1 / 2]] * 2
    )
    assert np.abs(counts - expected).max() < 2


def test_a_data_set_has_the_rows_that_it_has_alone_in_any_mixture() -> None:
    def rows_of_a(weights: dict[str, float]) -> list[bytes]:
        source = [{"text": f"a{n:04}" * 3} for n in range(60)]  # one shard
        mixture = Mixture({"a": source, **{c: SOURCES[c] for c in "bc"}}, weights)
        rounds = token_rounds(mixture, **SIZES)
        collected = []
        for _ in range(6):
            inputs = next(rounds).batches["inputs"].transpose(1, 0, 2, 3).reshape(-1, 16)
            collected += [row.tobytes() for row in inputs if (row == ord("a")).any()]
        return collected

    many = rows_of_a({"a": 1.0, "b": 0.0, "c": 0.0})
    few = rows_of_a({"a": 1.0, "b": 3.0, "c": 1.0})
    assert 20 < len(few) < len(many) and many[: len(few)] == few


def test_weights_can_change_and_data_sets_can_join_and_leave_in_a_restart() -> None:
    stream = token_rounds(Mixture({c: SOURCES[c] for c in "ab"}, {"a": 1.0, "b": 1.0}), **SIZES)
    next(stream)
    state = stream.get_state()
    joined = token_rounds(Mixture({c: SOURCES[c] for c in "bc"}, {"b": 1.0, "c": 1.0}), **SIZES)
    joined.set_state(state)
    assert joined.get_state()["shards"]["b"] == state["shards"]["b"]
    assert counts_of(next(joined).batches["inputs"]).tolist() == [0, 12, 12, 0]
    other = token_rounds(Mixture({"a": SOURCES["b"]}, {"a": 1.0}), **SIZES)
    with pytest.raises(ValueError, match=r"mixture: a is .list, 70 doc.* was .list, 40 doc"):
        other.set_state(state)


def test_fields_of_data_sets() -> None:
    sources = {"a": SOURCES["a"], "b": [{"body": "b" * 20}]}
    with pytest.raises(KeyError, match="no field 'text', but 'body': name one of these"):
        token_rounds(Mixture(sources, {"a": 1.0, "b": 1.0}), **SIZES)
    mixture = Mixture(sources, {"a": 1.0, "b": 1.0}, fields={"b": "body"})
    counts = counts_of(next(token_rounds(mixture, **SIZES)).batches["inputs"])
    assert counts.tolist() == [12, 12, 0, 0]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "no weight for 'a'.*add it to weights"),
        ({"a": 1.0, "x": 1.0}, "weight or field for 'x'.*name one of these"),
        ({"a": -1.0}, "weight of 'a' is -1.0 at round 0, expected.*correct it, or leave"),
        ({"a": float("nan")}, "weight of 'a' is nan"),
        ({"a": float("inf")}, "weight of 'a' is inf"),
        ({"a": 0.0}, "weights of 'a' sum to 0 in round 0.*raise one of them"),
        ({"a": [(0, 1.0), (9, 0.0)]}, "sum to 0 in round 9"),
        ({"a": [(0, 0.0), (5, 0.0), (5, 1.0)]}, "sum to 0 in round 0"),
        ({"a": [(5, 1.0), (3, 1.0)]}, r"rounds \[5, 3\].*sort them"),
        ({"a": []}, r"rounds \[\], expected at least one"),
        ({"a": [(-1, 1.0)]}, r"rounds \[-1\].*from round 0"),
    ],
)
def test_bad_weights_raise(weights: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mixture({"a": SOURCES["a"]}, weights)


def test_other_bad_mixtures_raise() -> None:
    with pytest.raises(ValueError, match=r"names no data set.*add a source"):
        Mixture({}, {})
    with pytest.raises(ValueError, match="'a' in the mixture has no examples: load another split"):
        Mixture({"a": []}, {"a": 1.0})
    mixture = Mixture({"a": SOURCES["a"]}, {"a": 1.0})
    with pytest.raises(ValueError, match=r"partition divides one source.*leave partition out"):
        token_rounds(mixture, **SIZES, partition=[np.arange(20), np.arange(20, 40)])


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 9)), min_size=1, max_size=5))
def test_a_weight_between_two_points_is_between_theirs(points: list[tuple[int, float]]) -> None:
    points = sorted(points, key=lambda point: point[0])
    check_weights({"a": points, "b": 1.0})
    numbers, values = zip(*points, strict=True)
    for number in range(60):
        value = weight_at(points, number)
        assert min(values) - 1e-9 <= value <= max(values) + 1e-9
        if len(set(numbers)) == len(numbers):
            np.testing.assert_allclose(value, np.interp(number, numbers, values), atol=1e-12)


def test_weights_are_numbers_of_every_kind_or_are_named():
    sources = {"a": [{"text": "x"}]}
    for weight in (np.int64(2), np.float32(2), np.array(2), [(np.int64(0), np.float32(2))]):
        assert weight_at(Mixture(sources, weights={"a": weight}).weights["a"], 5) == 2.0
    for weight in ("2", None, 1j, [2.0], [(0.5, 1.0)], [(0, "1")]):
        with pytest.raises(TypeError, match=r"weight of 'a' is .*, expected a real number"):
            Mixture(sources, weights={"a": weight})
