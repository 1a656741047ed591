"""HALoS: against NumPy in float64, and its laws."""

import functools

import jax
import numpy as np
import numpy_methods as reference
import optax
import pytest
from asynchronous_problem import cohorts, float64_params, jax_params, run_in_scan, stack
from jax.sharding import AxisType
from method_problem import STEPS, assert_close, loss_fn, random_rounds

from fedpax import Cohort
from fedpax.aggregators import chain, clip_by_norm, krum, mean
from fedpax.algorithms import DelayedNesterov, async_diloco, diloco, halos
from fedpax.simulation import (
    Trace,
    draw_trace,
    dynamic_local_steps,
    exponential,
    island_arrivals,
    lognormal,
    regional_arrivals,
)

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("halos")

REGIONS, ROUNDS, RATE = (0, 0, 1, 0), 8, 0.05
ISLANDS = len(REGIONS)
LOCAL = DelayedNesterov(learning_rate=1.4, momentum=0.8, period=3)
GLOBAL = DelayedNesterov(learning_rate=0.9, momentum=0.5, period=2)
ALPHA = 0.3
MAX_NORM = 0.5
CLIPPED = chain(clip_by_norm(MAX_NORM), mean())


def adam():
    return optax.adam(RATE, b1=0.9, b2=0.99, eps=1e-6)


@functools.cache
def method(
    regions=REGIONS, local_server=LOCAL, global_server=GLOBAL, merge_weight=ALPHA, aggregator=None
):
    algorithm = halos(
        loss_fn,
        regions=regions,
        inner_optimizer=adam(),
        local_server=local_server,
        global_server=global_server,
        merge_weight=merge_weight,
        aggregator=aggregator,
    )
    return algorithm, jax.jit(algorithm.round)


def unreliable_trace(seed=29):
    """Islands of different speeds, some of which fail and return."""
    return draw_trace(
        ISLANDS,
        seed=seed,
        seconds_per_step=lognormal(1.0, 0.5),
        time_to_failure=exponential(8.0),
        time_to_return=exponential(5.0),
        horizon=500.0,
    )


def unreliable_order(rounds=ROUNDS):
    trace = unreliable_trace()
    return regional_arrivals(
        trace,
        regions=REGIONS,
        num_rounds=rounds,
        num_steps=dynamic_local_steps(trace, STEPS),
        updates_per_exchange=2,
        seconds_to_global=[0.4, 1.3],
        seconds_from_global=0.5,
    )


class NumpyServer:
    """A model with delayed Nesterov momentum."""

    def __init__(self, x, settings):
        self.x, self.settings = x, settings
        self.m, self.since = {name: 0.0 * leaf for name, leaf in x.items()}, []

    def step(self, gradients):
        """Apply gradients that arrive together, then the momentum if it is due."""
        eta, beta, period, _ = self.settings
        for g in gradients:
            self.x = {name: x - eta * g[name] / period for name, x in self.x.items()}
            self.since.append(g)
        if len(self.since) >= period:
            left = len(self.since) % period
            for name in self.m:
                total = sum(g[name] for g in self.since)
                self.m[name] = beta * self.m[name] + total / period
            self.x = {name: x - eta * beta * self.m[name] for name, x in self.x.items()}
            self.since = [dict.fromkeys(self.x, 0.0)] * left


def numpy_run(batches, order, max_norm=np.inf):
    """Process one event after another; updates of islands are clipped to a norm."""
    inner = reference.adam(RATE, 0.9, 0.99, 1e-6)
    start = float64_params()
    difference = functools.partial(reference.each, np.subtract)
    server = NumpyServer(start, GLOBAL)
    regions = [NumpyServer(start, LOCAL) for _ in range(max(REGIONS) + 1)]
    anchors, on_its_way, sent_back = [start] * 2, [None] * 2, [None] * 2
    held, states = [start] * ISLANDS, [inner.init(start) for _ in range(ISLANDS)]
    history = []
    for r, own in enumerate(batches):
        tables = order.position[r], order.sends[r], order.applies[r], order.merges[r]
        for k in range(max(table.max() for table in tables) + 1):
            here, sends, applies, merges = (np.flatnonzero(table == k) for table in tables)
            arriving = [[] for _ in regions]
            for i in here[order.num_steps[r, here] > 0]:
                mine = reference.participant(own, i)[: order.num_steps[r, i]]
                y, states[i], _ = reference.train(held[i], inner, states[i], mine)
                update = difference(held[i], y)
                norm = np.sqrt(sum(np.sum(leaf**2) for leaf in update.values()))
                factor = min(1, max_norm / norm)
                clipped = {name: factor * leaf for name, leaf in update.items()}
                arriving[REGIONS[i]].append(clipped)
            for region, gradients in zip(regions, arriving, strict=True):
                region.step(gradients)
            for n in sends:
                on_its_way[n] = difference(anchors[n], regions[n].x)
            server.step([on_its_way[n] for n in applies])
            for n in applies:
                sent_back[n] = server.x
            for n in merges:
                regions[n].x = anchors[n] = reference.each(
                    lambda x, g: (1 - ALPHA) * x + ALPHA * g, regions[n].x, sent_back[n]
                )
            for i in here:
                held[i] = regions[REGIONS[i]].x
        history.append((server.x, [region.x for region in regions], list(held)))
    return history


@pytest.mark.parametrize("max_norm", [pytest.param(np.inf, marks=pytest.mark.slow), MAX_NORM])
def test_an_unreliable_run_equals_its_reference(max_norm):
    order, batches = unreliable_order(), random_rounds(ROUNDS, ISLANDS)
    returned = (order.position >= 0) & (order.num_steps == 0)
    assert returned.any() and (order.position < 0).any()
    assert np.all(np.any(order.merges >= 0, axis=0))  # both regions merge
    assert np.any(order.applies.max(axis=1) != order.merges.max(axis=1))
    clipped = max_norm < np.inf
    algorithm, step = method(aggregator=CLIPPED if clipped else None)
    state = algorithm.init(jax_params())
    rounds = cohorts(batches, order.schedule, order.num_steps)
    expected = numpy_run(batches, order, max_norm)
    fractions = []
    for r, (cohort, wanted) in enumerate(zip(rounds, expected, strict=True)):
        state, metrics = step(state, cohort)
        fractions.append(metrics.get("clipped_fraction", 0.0))
        x, regions, held = wanted
        assert_close((state.params, [region.params for region in state.regions]), (x, regions))
        for i in range(ISLANDS):
            assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], state.local_params), held[i])
        assert metrics["arrivals"] == np.sum(order.num_steps[r] > 0)
        assert metrics["exchanges"] == np.sum(order.applies[r] >= 0)
    assert step._cache_size() == 1  # one program for any set of live islands
    assert (0 < np.mean(fractions) < 1) == clipped


@pytest.mark.slow
def test_a_scan_is_one_program_and_a_replay_is_bitwise():
    order, batches = unreliable_order(), random_rounds(ROUNDS, ISLANDS)
    algorithm, step = method()
    rounds = cohorts(batches, order.schedule, order.num_steps)
    in_scan, _ = run_in_scan(algorithm, algorithm.init(jax_params()), rounds)
    first, second = algorithm.init(jax_params()), algorithm.init(jax_params())
    for cohort in rounds:
        first, _ = step(first, cohort)
        second, _ = step(second, cohort)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(in_scan, first)


@pytest.mark.parametrize("scheduled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_equal_speeds_and_no_transfers_are_diloco(scheduled):
    regions, eta, beta = (0, 1, 1, 0), 0.6, 0.8
    order = regional_arrivals(
        Trace(np.full(ISLANDS, 0.3)),
        regions=regions,
        num_rounds=3,
        num_steps=STEPS,
        updates_per_exchange=2,
    )
    plain = DelayedNesterov(learning_rate=1.0, momentum=0.0, period=2)
    algorithm, step = method(regions, plain, DelayedNesterov(eta, beta, 2), 1.0)
    other, other_step = _diloco(eta, beta)
    state, synchronous = algorithm.init(jax_params()), other.init(jax_params())
    for cohort in cohorts(random_rounds(3, ISLANDS), order.schedule, order.num_steps):
        plain_cohort = Cohort(cohort.batches)
        state, metrics = step(state, cohort if scheduled else plain_cohort)
        synchronous, wanted = other_step(synchronous, plain_cohort)
        if scheduled:
            assert metrics.pop("arrivals") == ISLANDS and metrics.pop("exchanges") == 2
        assert_close((state.params, metrics), (synchronous.params, wanted))
        for i in range(ISLANDS):
            own = jax.tree.map(lambda leaf, i=i: leaf[i], state.local_params)
            assert_close(own, synchronous.params)


@functools.cache
def _diloco(eta, beta):
    outer = optax.sgd(eta, momentum=beta, nesterov=True)
    algorithm = diloco(loss_fn, islands=ISLANDS, inner_optimizer=adam(), outer_optimizer=outer)
    return algorithm, jax.jit(algorithm.round)


@pytest.mark.slow
def test_one_region_is_async_diloco():
    """Its server is the server of `async_diloco` until it exchanges; if it exchanges each update at
    once, and keeps the global model, then the global server is."""
    trace = unreliable_trace()
    steps = dynamic_local_steps(trace, STEPS)
    plain = island_arrivals(trace, num_rounds=5, num_steps=steps)
    other = async_diloco(
        loss_fn, islands=ISLANDS, inner_optimizer=adam(), learning_rate=0.9, momentum=0.5, period=2
    )
    data = stack(random_rounds(9, ISLANDS))  # an island's n-th arrival trains on its n-th batches

    def run(algorithm, order, stop=None):
        """Run the rounds, or those until `stop` arrivals."""
        state, step = algorithm.init(jax_params()), jax.jit(algorithm.round)
        number, total = np.zeros(ISLANDS, int), 0
        for r, position in enumerate(order.position):
            arrives = (position >= 0) & (order.num_steps[r] > 0)
            total += np.sum(arrives)
            batches = {name: leaf[number, np.arange(ISLANDS)] for name, leaf in data.items()}
            number = number + arrives
            schedule = jax.tree.map(lambda leaf, r=r: leaf[r], order.schedule)
            state, _ = step(state, Cohort(batches, num_steps=order.num_steps[r], schedule=schedule))
            if total == stop:
                return state
        assert stop is None
        return state

    wanted = run(other, plain)
    settings = {"regions": (0,) * ISLANDS, "num_steps": steps}
    apart = regional_arrivals(trace, num_rounds=5, updates_per_exchange=10**6, **settings)
    alone = halos(loss_fn, regions=(0,) * ISLANDS, inner_optimizer=adam(), local_server=GLOBAL)
    result = run(alone, apart)
    assert_close(result.regions[0].params, wanted.params)
    jax.tree.map(np.testing.assert_array_equal, result.params, jax_params())

    at_once = regional_arrivals(trace, num_rounds=40, updates_per_exchange=1, **settings)
    through = halos(
        loss_fn,
        regions=(0,) * ISLANDS,
        inner_optimizer=adam(),
        local_server=DelayedNesterov(learning_rate=1.0, momentum=0.0, period=1),
        global_server=GLOBAL,
        merge_weight=1.0,
    )
    arrivals = int(np.sum(plain.num_steps > 0))
    assert arrivals > 8
    assert_close(run(through, at_once, stop=arrivals).params, wanted.params)


def test_who_does_not_arrive_keeps_its_state():
    algorithm, step = method()
    old = algorithm.init(jax_params())
    order = unreliable_order(1).schedule
    none = np.full(ISLANDS, -1)
    order = order._replace(position=np.array([-1, 0, -1, 1]), sends=none, applies=none, merges=none)
    order = jax.tree.map(np.int32, order)
    steps = np.full(ISLANDS, STEPS, np.int32)  # -1 leaves them out, whatever is here
    new, metrics = step(old, Cohort(random_rounds(1, ISLANDS)[0], num_steps=steps, schedule=order))
    assert metrics["arrivals"] == 2 and metrics["exchanges"] == 0
    for name in ("local_params", "inner_optimizer_state"):
        before, after = getattr(old, name), getattr(new, name)
        for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            changed = np.any(np.reshape(was != now, (ISLANDS, -1)), axis=1)
            assert changed.tolist() == [False, True, False, True]
    jax.tree.map(np.testing.assert_array_equal, old.params, new.params)
    jax.tree.map(np.testing.assert_array_equal, old.regions[1], new.regions[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_gives_the_same(kind):
    order, batches = unreliable_order(), random_rounds(ROUNDS, ISLANDS)
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


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ({"regions": ()}, ValueError, r"regions is \(\), expected the region of each island"),
        ({"regions": (0, 2)}, ValueError, r"\(0, 2\).*Number the regions anew"),
        ({"regions": (0.5, 1)}, ValueError, "numbers from 0 without gaps"),
        ({"merge_weight": 1.5}, ValueError, "merge_weight is 1.5, expected a number from 0 to 1"),
        (
            {"local_server": optax.sgd(1.0)},
            TypeError,
            "local_server is a GradientTransformation.*, expected a DelayedNesterov. Pass for",
        ),
        (
            {"global_server": DelayedNesterov(0.7, 1.5, 2)},
            ValueError,
            "global_server.momentum is 1.5, expected a number from 0 to 1",
        ),
        (
            {"global_server": DelayedNesterov(0.7, 0.5, 0)},
            ValueError,
            "global_server.period is 0, expected an int of at least 1",
        ),
        (
            {"aggregator": krum(1)},
            ValueError,
            r"halos\(\): the aggregator needs .* Use an aggregator",
        ),
    ],
)
def test_bad_settings_raise(setting, error, words):
    with pytest.raises(error, match=words):
        halos(loss_fn, **{"regions": REGIONS, "inner_optimizer": optax.sgd(1.0)} | setting)
