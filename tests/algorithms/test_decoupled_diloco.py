"""Decoupled DiLoCo: against NumPy in float64, and its laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_methods as reference
import optax
import pytest
from asynchronous_problem import cohorts, float64_params, jax_params, run_in_scan
from jax.sharding import AxisType
from method_problem import assert_close, loss_fn, random_rounds

import fedpax
from fedpax import Cohort
from fedpax.aggregators import mean
from fedpax.algorithms import (
    decoupled_diloco,
    decoupled_diloco_parts,
    diloco,
    directional_mean,
    streaming_diloco,
)
from fedpax.clients import Arrivals
from fedpax.simulation import Trace, draw_trace, exponential, fragment_syncs, lognormal, uniform

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("decoupled_diloco")

ISLANDS, ROUNDS, STEPS, RATE, ETA, BETA = 4, 4, 3, 0.1, 0.5, 0.8
FRAGMENT = {"kernel": 0, "bias": 0, "out": 1, "scale": 1}
SETTINGS = {
    "islands": ISLANDS,
    "inner_optimizer": optax.sgd(RATE, momentum=0.5),
    "outer_optimizer": optax.sgd(ETA, momentum=BETA, nesterov=True),
}


@functools.cache
def method(delay, plain):
    algorithm = decoupled_diloco(
        loss_fn,
        fragments=lambda path, leaf: FRAGMENT[path],
        delay=delay,
        aggregator=mean() if plain else directional_mean(plain=lambda path: path == "bias"),
        **SETTINGS,
    )
    return algorithm, jax.jit(algorithm.round)


@functools.cache
def unreliable_syncs(rounds=ROUNDS, seed=28):
    trace = draw_trace(
        ISLANDS,
        seed=seed,
        seconds_per_step=lognormal(1.0, 0.6),
        seconds_to_send=uniform(0.0, 0.3),
        time_to_failure=exponential(9.0),
        time_to_return=exponential(3.0),
        horizon=500.0,
    )
    return fragment_syncs(
        trace,
        num_rounds=rounds,
        num_fragments=2,
        steps_per_sync=2,
        quorum=1,
        grace_seconds=0.5,
        max_steps_per_sync=STEPS,
    )


def merge(deltas, weights, plain):
    """Average directions and norms separately, in float64; plain: average the updates."""
    total = sum(weights)
    if not total:
        return np.zeros_like(deltas[0])
    average = lambda values: sum(w * v for w, v in zip(weights, values, strict=True)) / total
    if plain:
        return average(deltas)
    norms = [np.sqrt(np.sum(d**2)) for d in deltas]
    direction = average([d / n if n else d for d, n in zip(deltas, norms, strict=True)])
    length = np.sqrt(np.sum(direction**2))
    return average(norms) * direction / length if length else direction


def numpy_run(batches, syncs, delay, plain):
    inner = reference.momentum(RATE, 0.5)
    x = float64_params()
    y, states = [x] * ISLANDS, [inner.init(x) for _ in range(ISLANDS)]
    v = reference.each(np.zeros_like, x)
    history = []
    for own, *schedule in zip(batches, *syncs[:4], strict=True):
        reports = []
        for p in range(2):
            num_steps, weights, receives, rejoins = (array[:, p] for array in schedule)
            y = [x if back else mine for mine, back in zip(y, rejoins, strict=True)]

            def steps(start, stop, y=y, p=p, own=own, num_steps=num_steps, reports=reports):
                for i in range(ISLANDS):
                    block = reference.participant(own, i)[p * STEPS : (p + 1) * STEPS]
                    for batch in block[start : min(stop, num_steps[i])]:
                        y[i], states[i], metrics = reference.train(y[i], inner, states[i], [batch])
                        reports.append(metrics)

            steps(0, STEPS - delay)
            names = [name for name in x if FRAGMENT[name] == p]
            deltas = {
                name: merge([x[name] - mine[name] for mine in y], weights, plain or name == "bias")
                for name in names
            }
            steps(STEPS - delay, STEPS)
            if weights.any():
                for name in names:
                    v[name] = BETA * v[name] + deltas[name]
                x = dict(x) | {n: x[n] - ETA * (deltas[n] + BETA * v[n]) for n in names}
            y = [
                dict(mine) | {n: x[n] for n in names} if up else mine
                for mine, up in zip(y, receives, strict=True)
            ]
        history.append((x, y, reference.mean(reports)))
    return history


@pytest.mark.parametrize(
    ("delay", "plain"), [(1, False), pytest.param(0, True, marks=pytest.mark.slow)]
)
def test_an_unreliable_run_equals_its_reference(delay, plain):
    syncs, batches = unreliable_syncs(), random_rounds(ROUNDS, ISLANDS, 2 * STEPS)
    assert syncs.rejoins.any() and not syncs.receives.all() and len(np.unique(syncs.num_steps)) == 4
    algorithm, step = method(delay, plain)
    state = algorithm.init(jax_params())
    for r, (cohort, (x, y, metrics)) in enumerate(
        zip(
            cohorts(batches, syncs.schedule),
            numpy_run(batches, syncs, delay, plain),
            strict=True,
        )
    ):
        state, result = step(state, cohort)
        assert_close(state.params, x)
        for i in range(ISLANDS):
            local_params = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], state.local_params)
            assert_close(local_params, y[i])
        assert result.pop("participants") == (syncs.weights[r] > 0).sum() / 2
        assert_close(result, metrics)
    assert step._cache_size() == 1  # one program for any set of live islands


@pytest.mark.slow
def test_a_quorum_of_all_without_failures_is_streaming_diloco():
    trace = draw_trace(ISLANDS, seed=0, seconds_per_step=lognormal(1.0, 0.7))
    syncs = fragment_syncs(
        trace, num_rounds=2, num_fragments=2, steps_per_sync=STEPS, quorum=ISLANDS
    )
    batches = random_rounds(2, ISLANDS, 2 * STEPS)
    algorithm, step = method(1, True)
    streaming = streaming_diloco(
        loss_fn, fragments=lambda path, leaf: FRAGMENT[path], delay=1, **SETTINGS
    )
    streaming_step = jax.jit(streaming.round)
    state, other = algorithm.init(jax_params()), streaming.init(jax_params())
    for cohort in cohorts(batches, syncs.schedule):
        state, metrics = step(state, cohort)
        assert metrics.pop("participants") == ISLANDS
        other, wanted = streaming_step(other, Cohort(cohort.batches))
        assert_close((state, metrics), (other, wanted))
    # Without a schedule they are the same program.
    one, two = (
        str(jax.make_jaxpr(a.round)(other, Cohort(batches[0]))) for a in (algorithm, streaming)
    )
    assert one == two


def test_one_fragment_and_a_quorum_of_all_is_diloco():
    syncs = fragment_syncs(
        Trace(np.array([1.0, 2.0, 3.0, 4.0])), num_rounds=2, steps_per_sync=STEPS, quorum=ISLANDS
    )
    batches = random_rounds(2, ISLANDS, STEPS)
    single = decoupled_diloco(loss_fn, aggregator=mean(), **SETTINGS)
    _, metrics = run_in_scan(single, single.init(jax_params()), cohorts(batches, syncs.schedule))
    other = diloco(loss_fn, **SETTINGS)
    _, wanted = run_in_scan(other, other.init(jax_params()), [Cohort(own) for own in batches])
    assert np.all(metrics[1].pop("participants") == ISLANDS)
    assert_close(metrics, wanted)


def test_without_a_participant_nothing_moves():
    algorithm, step = method(1, False)
    syncs = jax.tree.map(np.copy, unreliable_syncs().schedule)
    rounds = cohorts(random_rounds(2, ISLANDS, 2 * STEPS), jax.tree.map(lambda a: a[:2], syncs))
    old, _ = step(algorithm.init(jax_params()), rounds[0])
    nobody = jax.tree.map(lambda a: 0 * a, rounds[1].schedule)
    nobody = nobody._replace(receives=nobody.receives > 0, rejoins=nobody.rejoins > 0)
    new, metrics = step(old, rounds[1]._replace(schedule=nobody))
    jax.tree.map(np.testing.assert_array_equal, new, old)  # though there is momentum
    assert metrics["loss"] == 0 and metrics["participants"] == 0


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_a_mesh_gives_the_same(kind):
    syncs, batches = unreliable_syncs(), random_rounds(ROUNDS, ISLANDS, 2 * STEPS)
    algorithm, step = method(1, False)
    state, expected = algorithm.init(jax_params()), []
    rounds = cohorts(batches, syncs.schedule)
    for cohort in rounds:
        state, metrics = step(state, cohort)
        expected.append(jax.device_get((state.params, metrics)))
    devices = jax.devices()[:ISLANDS]
    with jax.set_mesh(jax.make_mesh((ISLANDS,), ("islands",), axis_types=(kind,), devices=devices)):
        spread, compiled = algorithm.init(jax_params()), jax.jit(algorithm.round)
        for cohort, wanted in zip(rounds, expected, strict=True):
            spread, metrics = compiled(spread, cohort)
            assert_close((spread.params, metrics), wanted)


def test_the_directional_mean_keeps_the_length_of_orthogonal_updates():
    rng = np.random.default_rng(0)
    updates = {
        "embed": rng.normal(size=(8, 30, 20)),
        "layers": {"w": rng.normal(size=(8, 3, 40, 20)) * np.array([1.0, 5.0, 0.0])[:, None, None]},
        "head": rng.normal(size=(8, 50, 20)),
    }
    weights = rng.uniform(1, 4, 8) * np.array([1, 1, 1, 0, 1, 1, 1, 1])
    updates["head"][2] = 0.0  # an island without an update of this tensor
    aggregator = directional_mean()

    @fedpax.program(islands=8)
    def average(updates, weights):
        return aggregator.aggregate(aggregator.init(None), updates, weights)[0]

    result = jax.jit(average)(jax.tree.map(jnp.float32, updates), jnp.float32(weights))
    assert_close(result["embed"], merge(list(updates["embed"]), weights, True))
    assert_close(result["head"], merge(list(updates["head"]), weights, False))
    for layer in range(3):
        layers = list(updates["layers"]["w"][:, layer])
        assert_close(result["layers"]["w"][layer], merge(layers, weights, False))
    # Orthogonal updates of norm 5 sqrt(800) average to this norm, where a plain mean is shorter.
    assert np.linalg.norm(result["layers"]["w"][1]) == pytest.approx(5 * 800**0.5, rel=0.03)


def test_directions_that_cancel_but_for_rounding_errors_give_0():
    """An entry of such a vector, or a scalar, would have the length of an update and any sign."""
    updates = np.float32(np.random.default_rng(0).normal(size=(100, 7)))
    updates = np.concatenate([updates, -3 * updates])  # u / |u| is rounded differently
    aggregator = directional_mean()

    @fedpax.program(islands=200)
    def average(updates):
        return aggregator.aggregate(aggregator.init(None), updates, None)[0]

    mean_of_directions = (updates / np.linalg.norm(updates, axis=1, keepdims=True)).mean(0)
    assert 0 < np.linalg.norm(mean_of_directions) < 1e-6
    np.testing.assert_array_equal(jax.jit(average)(updates), 0)
    almost = updates * np.where(np.arange(200) == 0, 2e-4, 1)[:, None]  # directions are the same
    almost[0, 0] += 1e-4
    assert np.linalg.norm(jax.jit(average)(almost)) > 1


def test_bad_schedules_raise():
    algorithm, _ = method(1, False)
    state, batches = algorithm.init(jax_params()), random_rounds(1, ISLANDS, 2 * STEPS)[0]
    syncs = fragment_syncs(Trace(np.ones(ISLANDS)), num_rounds=1, steps_per_sync=1, quorum=1)
    syncs = jax.tree.map(lambda a: a[0], syncs.schedule)
    with pytest.raises(ValueError, match=r"Pass num_fragments=2 to fedpax.simulation"):
        algorithm.round(state, Cohort(batches, schedule=syncs))
    with pytest.raises(TypeError, match=r"is a Arrivals, expected a Syncs of fedpax.clients"):
        algorithm.round(state, Cohort(batches, schedule=Arrivals(np.zeros(ISLANDS, int))))
    two = jax.tree.map(lambda a: a[0], unreliable_syncs().schedule)
    short = jax.tree.map(lambda batch: batch[:, :2], batches)
    with pytest.raises(ValueError, match=r"num_fragments \* max_steps_per_sync steps"):
        algorithm.round(state, Cohort(short, schedule=two))


def test_a_negative_bound_of_updates_raises():
    with pytest.raises(ValueError, match=r"max_norm is -1\.0, expected a number of at least 0"):
        decoupled_diloco_parts(
            lambda w, x: (jnp.mean((w - x) ** 2), {}),
            islands=2,
            inner_optimizer=optax.sgd(0.1),
            steps_per_sync=2,
            fragments=2,
            max_norm=-1.0,
        )
