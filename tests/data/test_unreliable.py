"""Dropouts, deadlines, over-selection and availability."""

import json

import jax
import numpy as np
import optax
import pytest

from fedpax.algorithms import fedavg
from fedpax.data import (
    ClientSampler,
    DailyAvailability,
    FunctionRounds,
    RecordedAvailability,
    cohort_rounds,
    unreliable_rounds,
)
from fedpax.sources.shuffle import hash_key

CLIENTS = 200
RNG = np.random.default_rng(0)
SIZES = RNG.integers(1, 9, CLIENTS)
STARTS = np.cumsum(SIZES) - SIZES
POPULATION = [np.arange(s, s + n) for s, n in zip(STARTS, SIZES, strict=True)]
EXAMPLES = {
    "image": RNG.random((SIZES.sum(), 2, 2, 1), np.float32),
    "label": np.arange(SIZES.sum()) % 3,
}


def rounds(cohort_size=40, available=None, **settings):
    sampler = ClientSampler(CLIENTS, cohort_size, seed=1, available=available)
    stream = cohort_rounds(EXAMPLES, POPULATION, sampler, batch_size=2)
    return unreliable_rounds(stream, **settings) if settings else stream


def test_lost_clients_have_no_steps_and_others_are_as_selected():
    plain, unreliable = rounds(), rounds(dropout_probability=0.3)
    for _ in range(3):
        selected, cohort = next(plain), next(unreliable)
        reported = unreliable.outcome.reported
        assert 0 < reported.sum() < 40
        for field, lost in (("num_examples", 0), ("num_steps", 0), ("client_ids", -1)):
            got, all_of = getattr(cohort, field), getattr(selected, field)
            np.testing.assert_array_equal(got, np.where(reported, all_of, lost))
            assert got.dtype == all_of.dtype
        np.testing.assert_array_equal(cohort.batches["image"], selected.batches["image"])


def test_the_fraction_of_dropouts_is_the_probability():
    stream = rounds(dropout_probability=0.2)
    reported = np.mean([next(stream) and stream.outcome.reported for _ in range(100)])
    assert abs(reported - 0.8) < 4 * np.sqrt(0.2 * 0.8 / 4000)


def test_over_selection_takes_the_first_reports():
    speeds = RNG.uniform(0.5, 2.0, CLIENTS)
    settings = dict(seconds_per_step=speeds, seconds_per_report=0.25)
    plain, stream = rounds(), rounds(num_reports=30, **settings)
    for _ in range(3):
        selected, _ = next(plain), next(stream)
        seconds = selected.num_steps * speeds[selected.client_ids] + 0.25
        order = np.argsort(seconds)
        assert set(np.flatnonzero(stream.outcome.reported)) == set(order[:30])
        np.testing.assert_allclose(stream.outcome.seconds, seconds)
        np.testing.assert_allclose(stream.outcome.round_seconds, seconds[order[29]])


def test_a_deadline_cuts_stragglers_and_the_round_lasts_until_it():
    plain, stream = rounds(), rounds(deadline=2.5)
    selected, _ = next(plain), next(stream)
    np.testing.assert_array_equal(stream.outcome.reported, selected.num_steps <= 2)
    assert stream.outcome.round_seconds == 2.5
    relaxed = rounds(deadline=1000.0)
    next(relaxed)
    assert relaxed.outcome.reported.all()
    assert relaxed.outcome.round_seconds == selected.num_steps.max()


def test_delays_are_lognormal_and_differ_from_round_to_round():
    stream = rounds(delay_spread=0.5)
    logs = []
    for _ in range(50):
        cohort = next(stream)
        logs.append(np.log(stream.outcome.seconds / cohort.num_steps))
    logs = np.concatenate(logs)
    assert abs(logs.mean()) < 4 * 0.5 / np.sqrt(logs.size)
    assert abs(logs.std() - 0.5) < 4 * 0.5 / np.sqrt(2 * logs.size)


def test_a_restored_stream_continues_with_the_same_failures():
    settings = dict(dropout_probability=0.3, delay_spread=1.0, num_reports=20)
    stream = rounds(**settings)
    next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    expected = next(stream)
    other = rounds(**settings)
    other.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, next(other), expected)
    with pytest.raises(ValueError, match="num_reports is '21' and was '20'"):
        rounds(**settings | {"num_reports": 21}).set_state(state)


def test_a_round_averages_the_clients_that_report():
    def loss_fn(w, batch):
        error = (batch["image"].mean((1, 2, 3)) - w) ** 2 * batch["mask"]
        return error.sum() / batch["mask"].sum(), {}

    stream = rounds(cohort_size=8, num_reports=3, delay_spread=1.0)
    cohort = next(stream)
    reported = stream.outcome.reported
    train = jax.jit(fedavg(loss_fn, cohort_size=8, client_optimizer=optax.sgd(0.1)).round)
    algorithm = fedavg(loss_fn, cohort_size=3, client_optimizer=optax.sgd(0.1))
    state = algorithm.init(np.float32(0))
    after, metrics = train(state, cohort)
    alone = jax.tree.map(lambda x: x[reported], cohort)
    expected, expected_metrics = jax.jit(algorithm.round)(state, alone)
    np.testing.assert_allclose(after.params, expected.params, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    nobody = next(rounds(cohort_size=8, deadline=1e-3))
    assert train(state, nobody)[0].params == state.params
    server = optax.sgd(1.0, momentum=0.5)
    algorithm = fedavg(
        loss_fn, cohort_size=8, client_optimizer=optax.sgd(0.1), server_optimizer=server
    )
    state = algorithm.init(np.float32(0))
    train = jax.jit(algorithm.round)
    moved, _ = train(state, cohort)
    last, _ = train(moved, nobody)  # the momentum does not move the model either
    assert last.params == moved.params


def test_clients_are_available_in_their_part_of_the_day():
    available = DailyAvailability(CLIENTS, rounds_per_day=12, fraction=0.25, seed=3)
    table = np.array([available(r) for r in range(24)])
    np.testing.assert_array_equal(table[:12], table[12:])
    assert (table[:12].sum(0) == 3).all()
    # One window for each client: it opens once a day.
    assert ((table[1:13] & ~table[:12]).sum(0) == 1).all()
    stream = rounds(available=available)
    for r in range(3):
        ids = next(stream).client_ids
        assert table[r][ids[ids >= 0]].all()


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.25, 1 / 3, 0.999, 1.0])
def test_a_client_is_available_for_a_fraction_of_the_day_since_its_start(fraction):
    available = DailyAvailability(3_000, rounds_per_day=7, fraction=fraction, seed=5)
    start = (hash_key(5, np.arange(3_000)) >> np.uint64(11)) * 2.0**-53
    for r in (0, 1, 6, 7, 10**6):
        expected = [(r % 7 / 7 - x) % 1.0 < fraction for x in start.tolist()]
        np.testing.assert_array_equal(available(r), expected)


def test_recorded_availability_repeats_and_reads_files(tmp_path):
    table = np.random.default_rng(0).random((5, CLIENTS)) < 0.5
    np.save(tmp_path / "trace.npy", table)
    available = RecordedAvailability(tmp_path / "trace.npy")
    np.testing.assert_array_equal(available(7), table[2])
    state = rounds(available=available).get_state()
    with pytest.raises(ValueError, match="other settings: available"):
        rounds(available=RecordedAvailability(~table)).set_state(state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dropout_probability": 1.0}, "dropout_probability is 1.0, .* If all clients drop out"),
        ({"dropout_probability": -0.1}, "expected at least 0"),
        ({"deadline": 0.0}, "deadline is 0.0, .* None to wait"),
        ({"num_reports": 41}, "num_reports is 41, expected 1 to 40.* Select more clients"),
        ({"num_reports": 0}, "num_reports is 0"),
        ({"seconds_per_step": np.ones(3)}, r"shape \[3\], .* one for each of the 200 clients"),
        ({"seconds_per_report": -1.0}, "seconds_per_report is -1.0"),
        ({"delay_spread": np.inf}, "delay_spread is inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        rounds(**settings)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DailyAvailability(5, rounds_per_day=0), "rounds_per_day 0, expected at least 1"),
        (lambda: DailyAvailability(5, rounds_per_day=4, fraction=0.0), "is 0.0, .* Use 0.5 for"),
        (lambda: RecordedAvailability(np.ones((2, 3))), "float64.* Convert it with .astype"),
        (lambda: RecordedAvailability(np.eye(3, 2) > 0), "row 2 of the table .* Drop the row"),
    ],
)
def test_availability_out_of_range_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: FunctionRounds(lambda r: None), "FunctionRounds"),
        (lambda: rounds(dropout_probability=0.5), "UnreliableRounds"),
    ],
)
def test_streams_of_another_kind_raise(make, kind):
    words = rf"unreliable_rounds\(\): rounds is a {kind}, expected the result of cohort_rounds\(\)"
    with pytest.raises(TypeError, match=words):
        unreliable_rounds(make())


def test_a_round_that_no_client_joins_can_be_unreliable():
    sampler = ClientSampler(CLIENTS, 20, seed=1, sampling_probability=0.005)
    empty = next(r for r in range(100) if not len(sampler.sample(r)))
    plain = cohort_rounds(EXAMPLES, POPULATION, sampler, batch_size=2)
    plain.set_state(plain.get_state() | {"round": empty})
    stream = unreliable_rounds(plain, dropout_probability=0.5)
    assert (next(stream).client_ids == -1).all()
    assert stream.outcome.round_seconds == 0
    assert stream.num_clients == plain.num_clients == CLIENTS


def test_weights_that_are_no_integers_keep_their_values():
    class Halved:
        def __init__(self, stream):
            self.__dict__.update(vars(stream), stream=stream)

        def __next__(self):
            cohort = next(self.stream)
            return cohort._replace(num_examples=cohort.num_examples / 2)

        def get_state(self):
            return self.stream.get_state()

    plain, unreliable = rounds(), rounds(dropout_probability=0.3)
    unreliable._rounds = Halved(unreliable._rounds)
    cohort, reported = next(unreliable), unreliable.outcome.reported
    halves = np.where(reported, next(plain).num_examples / 2, 0)
    assert np.any(halves % 1) and cohort.num_examples.tolist() == halves.tolist()
