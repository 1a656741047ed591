"""Traces: their distributions, their files, and what they refuse."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.simulation import (
    Trace,
    constant,
    draw_trace,
    exponential,
    load_trace,
    lognormal,
    save_trace,
    transfer_seconds,
    uniform,
)


def random_trace(seed=0, participants=40, horizon=500.0):
    return draw_trace(
        participants,
        seed=seed,
        seconds_per_step=lognormal(1.5, 0.8),
        seconds_to_receive=uniform(0.1, 0.4),
        seconds_to_send=transfer_seconds(1e6, lognormal(1e6, 0.5), latency=constant(0.05)),
        time_to_failure=exponential(60.0),
        time_to_return=exponential(20.0),
        arrival=uniform(0.0, 50.0),
        horizon=horizon,
    )


def fields(trace):
    return (
        trace.seconds_per_step,
        trace.seconds_to_receive,
        trace.seconds_to_send,
        trace.downtimes,
    )


def test_a_trace_has_the_distributions_it_was_drawn_from():
    trace = random_trace(participants=4000)
    assert np.median(trace.seconds_per_step) == pytest.approx(1.5, rel=0.05)
    assert np.std(np.log(trace.seconds_per_step)) == pytest.approx(0.8, rel=0.05)
    assert trace.seconds_to_receive.mean() == pytest.approx(0.25, rel=0.02)
    assert np.median(trace.seconds_to_send) == pytest.approx(1.05, rel=0.05)
    assert trace.is_up(20.0).mean() < 0.41 and trace.is_up(0.0).mean() == 0  # they arrive
    up = np.mean([trace.is_up(second).mean() for second in np.linspace(100, 490, 40)])
    assert up == pytest.approx(60 / (60 + 20), abs=0.01)
    failures, returns = trace.downtimes[:, 1:, 0], trace.downtimes[:, 1:, 1]
    happened = np.isfinite(failures)
    assert np.mean(returns[happened] - failures[happened]) == pytest.approx(20.0, rel=0.05)


def test_a_change_of_one_distribution_leaves_the_others():
    trace = draw_trace(9, seed=3, seconds_per_step=uniform(1, 2), seconds_to_send=uniform(0, 1))
    other = draw_trace(9, seed=3, seconds_per_step=constant(1), seconds_to_send=uniform(0, 1))
    np.testing.assert_array_equal(trace.seconds_to_send, other.seconds_to_send)
    again = draw_trace(9, seed=3, seconds_per_step=uniform(1, 2), seconds_to_send=uniform(0, 1))
    np.testing.assert_array_equal(trace.seconds_per_step, again.seconds_per_step)


def test_who_fails_without_a_return_stays_down():
    trace = draw_trace(
        50, seed=0, seconds_per_step=constant(1), time_to_failure=exponential(5), horizon=100.0
    )
    up = [trace.is_up(second).sum() for second in range(0, 110, 10)]
    assert up == sorted(up, reverse=True) and up[0] == 50 and up[-1] == 0


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([".npz", ".jsonl"]))
def test_a_file_restores_the_trace(tmp_path_factory, seed, ending):
    trace = random_trace(seed, participants=7, horizon=100.0)
    path = tmp_path_factory.mktemp("trace") / f"trace{ending}"
    save_trace(trace, path)
    loaded = load_trace(path)
    for got, want in zip(fields(loaded)[:3], fields(trace)[:3], strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(loaded.downtimes, trace.downtimes, strict=True):
        np.testing.assert_array_equal(got[np.isfinite(got[:, 0])], want[np.isfinite(want[:, 0])])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seconds_per_step": [1.0, 0.0]}, "seconds_per_step .* finite number above 0"),
        ({"seconds_per_step": []}, "one finite number above 0 per participant"),
        ({"seconds_to_send": [1.0]}, "seconds_to_send has shape .1., expected 2"),
        ({"seconds_to_receive": [1.0, np.nan]}, "seconds_to_receive"),
        ({"downtimes": np.zeros((2, 3))}, r"downtimes has shape .2, 3., expected .2, number, 2"),
        ({"downtimes": [[[2.0, 1.0]]] * 2}, "out of order. Sort the intervals"),
        ({"downtimes": [[[1.0, 3.0], [2.0, 4.0]]] * 2}, "merge those that overlap"),
    ],
)
def test_a_trace_refuses_what_makes_no_sense(arguments, words):
    with pytest.raises(ValueError, match=words):
        Trace(**{"seconds_per_step": np.array([1.0, 2.0]), **arguments})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lognormal(0.0, 1.0), "median is 0.0, expected a finite number above 0"),
        (lambda: uniform(2.0, 1.0), "high is 1.0, expected at least low"),
        (lambda: constant(-1.0), "of at least 0"),
        (lambda: draw_trace(0, seed=0, seconds_per_step=constant(1)), "at least 1"),
        (
            lambda: draw_trace(
                3, seed=0, seconds_per_step=constant(1), time_to_failure=exponential(9)
            ),
            "Pass the length of the simulation",
        ),
        (
            lambda: draw_trace(
                3, seed=0, seconds_per_step=constant(1), time_to_return=exponential(9)
            ),
            "time_to_return needs time_to_failure",
        ),
    ],
)
def test_distributions_and_draws_refuse_what_makes_no_sense(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ('{"speed": 3}', "line 2: expected an object with seconds_per_step"),
        ('{"seconds_per_step": "fast"}', "line 2: expected seconds as numbers"),
        ('{"seconds_per_step": 1, "downtimes": [[1]]}', "pairs"),
        ('{"seconds_per_step": 1, "downtimes": 3}', "line 2: .* downtimes as pairs"),
        ('{"seconds_per_step": 1, "downtimes": [[5, "x"]]}', "the return null for never"),
        ('{"seconds_per_step": true}', "line 2: expected seconds as numbers"),
        ('{"seconds_per_step": -1}', "trace.jsonl: seconds_per_step"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, line, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"seconds_per_step": 1.0}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=words):
        load_trace(path)
    with pytest.raises(ValueError, match=r"expected '.npz' or '.jsonl'"):
        load_trace(tmp_path / "trace.csv")


def test_a_damaged_archive_is_named(tmp_path):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"trace.npz is no NumPy archive.*Write it with save_"):
        load_trace(path)
    arrays = {"seconds_per_step": [1.0, 2.0], "seconds_to_receive": [0.0, 0.0]}
    np.savez(path, **arrays, seconds_to_send=[0.0], downtimes=np.zeros((2, 0, 2)))
    with pytest.raises(ValueError, match=r"trace.npz: seconds_to_send has shape \[1\]"):
        load_trace(path)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"trace.npz has no downtimes"):
        load_trace(path)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"trace.jsonl is no text, expected lines of JSON"):
        load_trace(path)


def test_a_byte_order_mark_is_read_and_a_git_lfs_pointer_is_called_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"seconds_per_step": 1.5, "downtimes": []}\n')
    assert load_trace(path).seconds_per_step.tolist() == [1.5]
    for path in (tmp_path / "a.jsonl", tmp_path / "a.npz"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        with pytest.raises(ValueError, match=r"is a Git LFS pointer.*git lfs pull"):
            load_trace(path)
