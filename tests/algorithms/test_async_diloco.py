"""Asynchronous DiLoCo: against NumPy in float64, and its laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from asynchronous_problem import cohorts, float64_params, jax_params
from jax.sharding import AxisType
from method_problem import STEPS, assert_close, loss_fn, random_rounds

import fedpax
from fedpax import Cohort
from fedpax.aggregators import (
    bulyan,
    chain,
    clip_by_norm,
    codecs,
    compressed_mean,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    quantized_mean,
    trimmed_mean,
)
from fedpax.algorithms import async_diloco, diloco
from fedpax.clients import ArrivalOrder
from fedpax.simulation import (
    Trace,
    draw_trace,
    dynamic_local_steps,
    exponential,
    island_arrivals,
    lognormal,
)

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("async_diloco")

ISLANDS, ROUNDS, RATE, ETA, BETA = 4, 6, 0.05, 0.6, 0.8


@functools.cache
def method(period=None, activation=0.0, aggregator=None):
    algorithm = async_diloco(
        loss_fn,
        islands=ISLANDS,
        inner_optimizer=optax.adam(RATE, b1=0.9, b2=0.99, eps=1e-6),
        learning_rate=ETA,
        momentum=BETA,
        period=period,
        activation=activation,
        aggregator=aggregator,
    )
    return algorithm, jax.jit(algorithm.round)


def unreliable_order(rounds=ROUNDS, seed=29):
    """Order islands of different speeds, some of which fail and return."""
    trace = draw_trace(
        ISLANDS,
        seed=seed,
        seconds_per_step=lognormal(1.0, 0.5),
        time_to_failure=exponential(8.0),
        time_to_return=exponential(5.0),
        horizon=500.0,
    )
    steps = dynamic_local_steps(trace, STEPS)
    return island_arrivals(trace, num_rounds=rounds, num_steps=steps)


def numpy_run(batches, order, period, c):
    """Process arrivals one group at a time; c is the activation of the momentum."""
    inner = reference.adam(RATE, 0.9, 0.99, 1e-6)
    x = float64_params()
    zeros = reference.each(np.zeros_like, x)
    held, states = [x] * ISLANDS, [inner.init(x) for _ in range(ISLANDS)]
    m, accumulated, since, history = zeros, [], 0, []
    for own, position, num_steps in zip(batches, order.position, order.num_steps, strict=True):
        for k in range(position.max() + 1):
            here = np.flatnonzero(position == k)
            gradients = []
            for i in here[num_steps[here] > 0]:
                mine = reference.participant(own, i)[: num_steps[i]]
                y, states[i], _ = reference.train(held[i], inner, states[i], mine)
                gradients.append(reference.each(np.subtract, held[i], y))
            for number, g in enumerate(gradients):
                accumulated.append(g)
                since += 1
                share = c
                if number == len(gradients) - 1 and since >= period:
                    total = reference.each(lambda *leaves: sum(leaves), *accumulated)
                    m = reference.each(lambda m, d: BETA * m + d / period, m, total)
                    share, accumulated, since = 1 - c * period + c, [], since % period
                x = reference.each(
                    lambda x, g, m, s=share: x - ETA * (g / period + s * BETA * m), x, g, m
                )
            for i in here:
                held[i] = x
        history.append((x, list(held), len([i for i in range(ISLANDS) if num_steps[i]])))
    return history


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"period": 3, "activation": 0.2}, marks=pytest.mark.slow)]
)
def test_an_unreliable_run_equals_its_reference(settings):
    order, batches = unreliable_order(), random_rounds(ROUNDS, ISLANDS)
    returned = (order.position >= 0) & (order.num_steps == 0)
    assert returned.any() and (order.position < 0).any() and order.position.max() > 0
    algorithm, step = method(**settings)
    state = algorithm.init(jax_params())
    period, activation = settings.get("period", ISLANDS), settings.get("activation", 0.0)
    expected = numpy_run(batches, order, period, activation)
    rounds = cohorts(batches, order.schedule, order.num_steps)
    for cohort, (x, held, arrivals) in zip(rounds, expected, strict=True):
        state, metrics = step(state, cohort)
        assert_close(state.params, x)
        for i in range(ISLANDS):
            local_params = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], state.local_params)
            assert_close(local_params, held[i])
        assert metrics["arrivals"] == arrivals
    assert step._cache_size() == 1  # one program for any set of live islands


def test_equal_speeds_are_diloco():
    order = island_arrivals(Trace(np.full(ISLANDS, 0.3)), num_rounds=3, num_steps=STEPS)
    batches = random_rounds(3, ISLANDS)
    algorithm, step = method()
    other = diloco(
        loss_fn,
        islands=ISLANDS,
        inner_optimizer=optax.adam(RATE, b1=0.9, b2=0.99, eps=1e-6),
        outer_optimizer=optax.sgd(ETA, momentum=BETA, nesterov=True),
    )
    synchronous_step = jax.jit(other.round)
    state, without, synchronous = (a.init(jax_params()) for a in (algorithm, algorithm, other))
    for cohort in cohorts(batches, order.schedule, order.num_steps):
        state, metrics = step(state, cohort)
        plain = Cohort(cohort.batches)
        without, plain_metrics = step(without, plain)
        synchronous, wanted = synchronous_step(synchronous, plain)
        assert metrics.pop("arrivals") == ISLANDS
        assert_close((state.params, metrics), (synchronous.params, wanted))
        assert_close((without.params, plain_metrics), (synchronous.params, wanted))
        assert_close(state.inner_optimizer_state, synchronous.inner_optimizer_state)


def test_who_does_not_arrive_keeps_its_state():
    algorithm, step = method()
    batches = random_rounds(1, ISLANDS)
    old = algorithm.init(jax_params())
    order = ArrivalOrder(np.int32([-1, 0, -1, 1]))
    steps = np.full(ISLANDS, STEPS, np.int32)  # -1 leaves them out, whatever is here
    new, metrics = step(old, Cohort(batches[0], num_steps=steps, schedule=order))
    assert metrics["arrivals"] == 2
    for name in ("local_params", "inner_optimizer_state"):
        before, after = jax.device_get((getattr(old, name), getattr(new, name)))
        for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(was[np.array([0, 2])], now[np.array([0, 2])])
            changed = np.any(np.reshape(was != now, (ISLANDS, -1)), axis=1)
            assert changed.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_a_mesh_gives_the_same(kind):
    order, batches = unreliable_order(3), random_rounds(3, ISLANDS)
    algorithm, step = method()
    state, expected = algorithm.init(jax_params()), []
    rounds = cohorts(batches, order.schedule, order.num_steps)
    for cohort in rounds:
        state, metrics = step(state, cohort)
        expected.append(jax.device_get((state.params, metrics)))
    devices = jax.devices()[:ISLANDS]
    with jax.set_mesh(jax.make_mesh((ISLANDS,), ("islands",), axis_types=(kind,), devices=devices)):
        spread = algorithm.init(jax_params())
        compiled = jax.jit(algorithm.round)
        for cohort, wanted in zip(rounds, expected, strict=True):
            spread, metrics = compiled(spread, cohort)
            assert_close((spread.params, metrics), wanted)


def run(algorithm_and_step, order, batches):
    algorithm, step = algorithm_and_step
    state = algorithm.init(jax_params())
    for cohort in cohorts(batches, order.schedule, order.num_steps):
        state, metrics = step(state, cohort)
    return state, metrics


def test_the_plain_mean_is_the_sum():
    order, batches = unreliable_order(), random_rounds(ROUNDS, ISLANDS)
    plain, averaged = (run(m, order, batches) for m in (method(), method(aggregator=MEAN)))
    assert_close((plain[0].params, plain[1]), (averaged[0].params, averaged[1]))


MEAN = mean()
TOP = compressed_mean(codecs.top_k(0.25), error_feedback=True)


def test_error_feedback_telescopes_over_arrivals():
    """The sent and the unsent parts of all islands add up to the sum of their gradients.

    With momentum 0 and gradients that do not depend on the model, it moves the model.
    """

    def linear_loss(params, batch):
        return jnp.mean(batch @ params), {}

    def make(aggregator):
        algorithm = async_diloco(
            linear_loss,
            islands=ISLANDS,
            inner_optimizer=optax.sgd(RATE),
            learning_rate=ETA,
            momentum=0.0,
            aggregator=aggregator,
        )
        return algorithm, jax.jit(algorithm.round)

    order, batches = unreliable_order(), [b["x"] for b in random_rounds(ROUNDS, ISLANDS)]
    states = []
    for algorithm, step in (make(None), make(TOP)):
        state = algorithm.init(jnp.zeros(batches[0].shape[-1]))
        for cohort in cohorts(batches, order.schedule, order.num_steps):
            state, _ = step(state, cohort)
        states.append(state)
    plain, compressed = states
    # An update is n times its gradient on its way, so that the mean over n islands is the sum.
    unsent = compressed.aggregator_state.residual.sum(axis=0) / ISLANDS
    assert np.abs(unsent).max() > 0.01
    np.testing.assert_allclose(
        compressed.params - ETA / ISLANDS * unsent, plain.params, rtol=1e-5, atol=1e-6
    )


def test_an_absent_island_keeps_what_it_has_not_sent():
    order, batches = unreliable_order(1), random_rounds(2, ISLANDS)
    algorithm, step = method(aggregator=TOP)
    together = order.schedule._replace(position=np.zeros(ISLANDS, np.int32))
    state, _ = step(algorithm.init(jax_params()), Cohort(batches[0], schedule=together))
    assert np.all(np.any(state.aggregator_state.residual["kernel"], axis=(1, 2)))
    some = together._replace(position=np.int32([1, -1, 0, -1]))
    after, _ = step(state, Cohort(batches[1], schedule=some))
    was, now = (s.aggregator_state.residual["kernel"] for s in (state, after))
    assert np.any(was != now, axis=(1, 2)).tolist() == [True, False, True, False]


@pytest.mark.slow
def test_metrics_of_an_aggregator_are_averaged_over_arrivals():
    clipped = chain(clip_by_norm(1e-3), MEAN)
    order, batches = unreliable_order(1), random_rounds(1, ISLANDS)
    _, metrics = run(method(aggregator=clipped), order, batches)
    assert metrics["clipped_fraction"] == 1.0
    assert metrics["arrivals"] > 1


def test_compressed_updates_are_small_on_the_wire():
    batches = random_rounds(1, ISLANDS)[0]
    sent = []
    for aggregator in (MEAN, compressed_mean(codecs.sign(), error_feedback=True)):
        algorithm, _ = method(aggregator=aggregator)
        state = jax.eval_shape(algorithm.init, jax_params())
        cost = fedpax.cost(algorithm.round, state, Cohort(batches))
        sent.append(cost.placements["islands"].sent_bytes)
    assert sent[1] < sent[0] / 4


@pytest.mark.parametrize(
    "aggregator",
    [
        coordinate_median(),
        trimmed_mean(0.25),
        krum(1),
        bulyan(0),
        geometric_median(),
        quantized_mean(4),
        chain(clip_by_norm(1.0), krum(1)),
        clip_by_norm(1.0)(coordinate_median()),
    ],
)
def test_aggregators_of_all_updates_at_once_raise(aggregator):
    with pytest.raises(ValueError, match=r"arrive at different times\. Use an aggregator that"):
        method.__wrapped__(aggregator=aggregator)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"period": 0}, "period is 0, expected an int of at least 1"),
        ({"momentum": 1.5}, "momentum is 1.5, expected a number from 0 to 1"),
        ({"activation": 0.5}, "activation is 0.5, expected a number from 0 to 0.25"),
    ],
)
def test_bad_settings_raise(setting, words):
    with pytest.raises(ValueError, match=words):
        async_diloco(loss_fn, islands=ISLANDS, inner_optimizer=optax.sgd(1.0), **setting)
