"""FedBuff and FedAsync: against NumPy in float64, and their laws."""

import functools
import re

import jax
import numpy as np
import numpy_methods as reference
import optax
import pytest
from asynchronous_problem import cohorts, float64_params, jax_params, run_in_scan
from jax.sharding import AxisType
from method_problem import STEPS, assert_close, loss_fn, random_rounds

from fedpax import Cohort
from fedpax.algorithms import (
    fedasync,
    fedavg,
    fedbuff,
    hinge_staleness,
    polynomial_staleness,
)
from fedpax.clients import ArrivalOrder, Arrivals
from fedpax.simulation import Trace, buffered_arrivals, constant, draw_trace, lognormal

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("fedbuff")

RATE, BUFFER, LONGEST, ROUNDS = 0.2, 4, 3, 9


@functools.cache
def buffered(buffer_size=BUFFER, server_rate=0.6, max_staleness=LONGEST):
    algorithm = fedbuff(
        loss_fn,
        buffer_size=buffer_size,
        max_staleness=max_staleness,
        client_optimizer=optax.sgd(RATE),
        server_optimizer=optax.sgd(server_rate),
    )
    return algorithm, jax.jit(algorithm.round)


def random_staleness(rounds=ROUNDS, buffer_size=BUFFER, most=LONGEST, seed=0):
    """Draw staleness from 0 to `most`, but never from before the first version."""
    drawn = np.random.default_rng(seed).integers(0, most + 1, (rounds, buffer_size))
    return np.minimum(drawn, np.arange(rounds)[:, None]).astype(np.int32)


def numpy_rounds(batches, staleness, apply):
    """Train stale clients in float64; `apply(x, starts, ends, staleness)` is the server."""
    versions, history = [float64_params()], []
    for own, stale in zip(batches, staleness, strict=True):
        starts = [versions[len(versions) - 1 - s] for s in stale]
        results = [
            reference.train(start, reference.sgd(RATE), None, reference.participant(own, i))
            for i, start in enumerate(starts)
        ]
        versions.append(apply(versions[-1], starts, [end for end, *_ in results], stale))
        metrics = reference.mean(
            [m | {"staleness": s} for (*_, m), s in zip(results, stale, strict=True)]
        )
        history.append((versions[-1], metrics))
    return history


def test_fedbuff_equals_its_reference():
    batches, staleness = random_rounds(ROUNDS, BUFFER), random_staleness()
    assert staleness.max() == LONGEST and len(np.unique(staleness)) == LONGEST + 1

    def apply(x, starts, ends, stale):
        step = {
            name: sum(
                (1 + s) ** -0.5 * (y[name] - z[name])
                for y, z, s in zip(ends, starts, stale, strict=True)
            )
            for name in x
        }
        return {name: x[name] + 0.6 / BUFFER * step[name] for name in x}

    algorithm, step = buffered()
    state = algorithm.init(jax_params())
    expected = numpy_rounds(batches, staleness, apply)
    for cohort, wanted in zip(cohorts(batches, Arrivals(staleness)), expected, strict=True):
        state, metrics = step(state, cohort)
        assert_close((state.params, metrics), wanted)
    assert step._cache_size() == 1  # one program for every schedule


@pytest.mark.parametrize("update", ["model", "difference"])
def test_fedasync_equals_its_reference(update):
    batches, staleness = random_rounds(ROUNDS, 1), random_staleness(buffer_size=1)
    hinge = hinge_staleness(slope=0.4, free=1.0)

    def apply(x, starts, ends, stale):
        a = 0.7 / (0.4 * max(stale[0] - 1, 0) + 1)
        start = x if update == "model" else starts[0]
        return {name: x[name] + a * (ends[0][name] - start[name]) for name in x}

    algorithm = fedasync(
        loss_fn,
        max_staleness=LONGEST,
        client_optimizer=optax.sgd(RATE),
        mixing=0.7,
        staleness_fn=hinge,
        update=update,
    )
    rounds = cohorts(batches, Arrivals(staleness))
    _, metrics = run_in_scan(algorithm, algorithm.init(jax_params()), rounds)
    expected = numpy_rounds(batches, staleness, apply)
    for r, wanted in enumerate(expected):
        assert_close(jax.tree.map(lambda leaf, r=r: leaf[r], metrics), wanted)


def test_equal_speeds_and_a_buffer_as_large_as_the_concurrency_are_fedavg_exactly():
    trace = draw_trace(20, seed=0, seconds_per_step=constant(0.7))
    order = buffered_arrivals(trace, num_rounds=4, concurrency=BUFFER, buffer_size=BUFFER)
    batches = random_rounds(4, BUFFER)
    algorithm, step = buffered()
    synchronous = fedavg(
        loss_fn,
        cohort_size=BUFFER,
        client_optimizer=optax.sgd(RATE),
        server_optimizer=optax.sgd(0.6),
    )
    synchronous_step = jax.jit(synchronous.round)
    state, without, other = (m.init(jax_params()) for m in (algorithm, algorithm, synchronous))
    for cohort in cohorts(batches, order.schedule):
        state, metrics = step(state, cohort)
        without, _ = step(without, cohort._replace(schedule=None))
        other, other_metrics = synchronous_step(other, cohort._replace(schedule=None))
        assert metrics.pop("staleness") == 0
        jax.tree.map(np.testing.assert_array_equal, without.params, other.params)
        assert_close((state.params, metrics), (other.params, other_metrics))


def test_a_buffer_of_one_is_fedasync():
    trace = draw_trace(30, seed=2, seconds_per_step=lognormal(1.0, 0.6))
    order = buffered_arrivals(trace, num_rounds=ROUNDS, concurrency=5, num_steps=STEPS)
    assert order.max_staleness > 1
    rounds = cohorts(random_rounds(ROUNDS, 1), order.schedule)
    single = buffered(1, 0.6, order.max_staleness)[0]
    other = fedasync(
        loss_fn,
        max_staleness=order.max_staleness,
        client_optimizer=optax.sgd(RATE),
        mixing=0.6,
        update="difference",
    )
    (_, metrics), (_, wanted) = (
        run_in_scan(method, method.init(jax_params()), rounds) for method in (single, other)
    )
    assert_close(metrics, wanted)


def test_a_replay_is_bitwise_and_a_scan_equals_single_rounds():
    algorithm, step = buffered()
    rounds = cohorts(random_rounds(ROUNDS, BUFFER), Arrivals(random_staleness()))
    _, in_scan = run_in_scan(algorithm, algorithm.init(jax_params()), rounds)
    first, second = algorithm.init(jax_params()), algorithm.init(jax_params())
    for cohort in rounds:
        first, _ = step(first, cohort)
        second, _ = step(second, cohort)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(first.params, jax.tree.map(lambda leaf: leaf[-1], in_scan[0]))


def test_a_staler_update_than_the_longest_is_left_out():
    algorithm, step = buffered()
    batches = random_rounds(2, BUFFER)
    state, _ = step(algorithm.init(jax_params()), Cohort(batches[0]))
    stale = Arrivals(np.int32([0, LONGEST + 1, 0, 0]))
    result, metrics = step(state, Cohort(batches[1], schedule=stale))
    fresh = Arrivals(np.zeros(BUFFER, np.int32))
    absent = Cohort(batches[1], num_steps=np.int32([STEPS, 0, STEPS, STEPS]), schedule=fresh)
    wanted, _ = step(state, absent)
    assert_close(result.params, wanted.params)
    assert metrics["staleness"] == 0


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_a_mesh_gives_the_same_with_one_all_reduce(kind):
    algorithm, step = buffered()
    rounds = cohorts(random_rounds(3, BUFFER), Arrivals(random_staleness(3)))
    state, expected = algorithm.init(jax_params()), []
    for cohort in rounds:
        state, metrics = step(state, cohort)
        expected.append(jax.device_get((state.params, metrics)))
    devices = jax.devices()[:BUFFER]
    with jax.set_mesh(jax.make_mesh((BUFFER,), ("clients",), axis_types=(kind,), devices=devices)):
        spread = algorithm.init(jax_params())
        compiled = jax.jit(algorithm.round).lower(spread, rounds[0]).compile()
        for cohort, wanted in zip(rounds, expected, strict=True):
            spread, metrics = compiled(spread, cohort)
            assert_close((spread.params, metrics), wanted)
    collectives = re.findall(
        r"= .* (all-[a-z]+|[a-z]+-scatter|[a-z]+-permute)\(", compiled.as_text()
    )
    assert collectives == ["all-reduce"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: buffered(max_staleness=-1),
            ValueError,
            "max_staleness is -1, expected an int of at",
        ),
        (
            lambda: buffered(buffer_size=0),
            ValueError,
            "is 0, expected an int of at least 1. Pass 10",
        ),
        (lambda: polynomial_staleness(-1.0), ValueError, "exponent is -1.0"),
        (
            lambda: fedasync(loss_fn, max_staleness=0, client_optimizer=optax.sgd(1.0), mixing=1.5),
            ValueError,
            "mixing is 1.5, expected a number from 0 to 1",
        ),
        (
            lambda: fedasync(
                loss_fn, max_staleness=0, client_optimizer=optax.sgd(1.0), mixing=1, update="x"
            ),
            ValueError,
            'expected "model" or "difference". Pass "model" for',
        ),
        (
            lambda: run_with(ArrivalOrder(np.zeros(BUFFER, np.int32))),
            TypeError,
            "is a ArrivalOrder, expected a Arrivals of fedpax.clients",
        ),
        (
            lambda: run_with(Arrivals(np.zeros((ROUNDS, BUFFER), np.int32))),
            ValueError,
            "Pass the schedule of one round",
        ),
        (
            lambda: fedavg(loss_fn, cohort_size=BUFFER, client_optimizer=optax.sgd(1.0)).round(
                None, Cohort(random_rounds(1, BUFFER)[0], schedule=Arrivals(np.zeros(BUFFER)))
            ),
            TypeError,
            "fedavg is synchronous. Leave schedule=None, or use an asynchronous method",
        ),
    ],
)
def test_bad_settings_and_schedules_raise(call, error, words):
    with pytest.raises(error, match=words):
        call()


def run_with(schedule):
    algorithm = buffered()[0]
    cohort = Cohort(random_rounds(1, BUFFER)[0], schedule=schedule)
    return algorithm.round(algorithm.init(jax_params()), cohort)


def test_asynchronous_training_beats_waiting_for_the_slowest():
    """After the same virtual time, a buffer has seen more updates, and has a lower loss."""
    trace = Trace(np.array([1.0] * 7 + [10.0]))
    order = buffered_arrivals(
        trace, num_rounds=24, concurrency=8, buffer_size=BUFFER, num_steps=STEPS, seed=1
    )
    assert order.seconds[-1, -1] < 45
    rounds = [random_rounds(1, 8)[0]] * 24
    own = [
        jax.tree.map(lambda leaf, ids=ids: leaf[ids], batches)
        for batches, ids in zip(rounds, order.client_ids, strict=True)
    ]
    algorithm = buffered(BUFFER, 1.0, order.max_staleness)[0]
    state, _ = run_in_scan(algorithm, algorithm.init(jax_params()), cohorts(own, order.schedule))
    slow = fedavg(loss_fn, cohort_size=8, client_optimizer=optax.sgd(RATE))
    waiting, wait = slow.init(jax_params()), jax.jit(slow.round)
    for _ in range(int(order.seconds[-1, -1] // (10 * STEPS))):
        waiting, _ = wait(waiting, Cohort(rounds[0]))
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), rounds[0])
    loss = jax.jit(loss_fn)
    assert loss(state.params, flat)[0] < loss(waiting.params, flat)[0] - 0.1
