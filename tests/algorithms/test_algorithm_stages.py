"""Every method and aggregator in stages equals its round, also without some participants."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asynchronous_method_table import ASYNCHRONOUS_METHODS
from method_table import METHODS as METHOD_TABLE
from method_table import problem
from test_any_aggregator import AGGREGATORS, METHODS, STEPS, N

import fedpax
from fedpax import Cohort
from fedpax.deploy import run_local
from fedpax.transforms.stages import Stages

TOLERANCE = 1e-6
ROUNDS = 3
PRESENT = {"all": [*range(N)], "all but one": [0, 1, 2, 4, 5, 6, 7], "half": [1, 2, 5, 6]}
REFUSED = {"geometric_median": "inside 'scan'"}
FEW = [p if p == "all but one" else pytest.param(p, marks=pytest.mark.slow) for p in PRESENT]
# Its noise differs between a simulation and stages: compared without noise.
PRIVATE = "private_secure_mean"
# The methods that the table of `test_any_aggregator` does not have.
OTHERS = (
    *("Branch-Train-Merge", "SparseLoCo", "PAPA", "PAPA-all", "PAPA-2, rotation", "MimeAdam"),
    *("MimeLiteAdam", "Per-FedAvg (FO)", *ASYNCHRONOUS_METHODS),
)
OTHERS_REFUSED = {
    "data parallelism": "inside 'scan'",  # it communicates at every step
    "PAPA-2": "inside 'scan'",
    "NoLoCo": r"the server reads state.local_params\['bias'\]",  # partners exchange them
}
# An absent island's gradient of the round before counts in the round; in stages it is not sent.
DELAYED = ("eager_diloco",)
# The compiled round averages the models of absent islands too: compared with a population of those
# that answer.
POPULATIONS = ("PAPA", "PAPA-all")
EXCHANGED = ("PAPA-2, rotation",)
FAST = ("fedavg", "scaffold II", "diloco", "sign", "krum", "FedBuff")


def params():
    kernel = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)
    return {"kernel": jnp.asarray(kernel), "bias": jnp.ones(2)}


def cohort(round_, present=range(N)):
    """Make the cohort of a round, in which only some participants are present."""
    rng = np.random.default_rng(round_)
    here = np.isin(np.arange(N), list(present))
    batches = {
        "x": rng.normal(size=(N, STEPS, 4, 5)).astype(np.float32),
        "y": rng.normal(size=(N, STEPS, 4, 2)).astype(np.float32),
    }
    num_examples = np.where(here, np.arange(1, N + 1), 0)
    return Cohort(batches, num_examples, client_ids=np.where(here, np.arange(N) + 2, -1))


def start(name, method):
    initial = params()
    if name == "hypcluster":
        initial = jax.tree.map(lambda p: jnp.stack([p, -p]), initial)
    return method.init(initial)


def assert_agree(actual, expected, present=range(N)):
    """Compare leaves; leaves of participants where they answered."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.shape[:1] == (N,):
            a, b = a[list(present)], b[list(present)]
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def no_noise(stages, stage):
    return {v.name: np.zeros(v.shape, np.int32) for v in stages[stage].noise}


def build(name):
    if name in AGGREGATORS:
        return METHODS["fedavg"](aggregator=AGGREGATORS[name])
    return METHODS[name]()


@functools.cache
def divided(name):
    """Return the initial state, the compiled round and its stages, once for all who are present."""
    method = build(name)
    state = start(name, method)
    return state, jax.jit(method.round), fedpax.stages(method.round, state, cohort(0))


@pytest.mark.each_value
@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize(
    "name",
    [
        n if n in FAST else pytest.param(n, marks=pytest.mark.slow)
        for n in (*METHODS, *AGGREGATORS)
        if n not in REFUSED
    ],
)
def test_stages_equal_the_round(name, present, monkeypatch):
    if name == PRIVATE:
        simulation = sys.modules["fedpax.aggregators.private_secure_mean"]
        monkeypatch.setattr(
            simulation, "draw_discrete_gaussian", lambda key, like, stddev: like * 0
        )
        monkeypatch.setattr(Stages, "draw_noise", no_noise)
    if present != "all" and name in DELAYED:
        pytest.skip("an absent island's gradient of the round before counts in the round")
    answer = PRESENT[present]
    state, step, stages = divided(name)
    staged = state
    for r in range(ROUNDS):
        state, metrics = step(state, cohort(r, answer))
        before = staged
        staged, reported = run_local(stages, staged, cohort(r), participants=answer)
        assert_agree((staged, reported), (state, metrics), answer)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(staged), strict=True):
            if jnp.shape(old)[:1] == (N,):  # the others keep what they had
                absent = [i for i in range(N) if i not in answer]
                np.testing.assert_array_equal(np.asarray(old)[absent], np.asarray(new)[absent])


@pytest.mark.parametrize("name", REFUSED)
def test_aggregators_that_need_another_engine_are_refused(name):
    method = build(name)
    with pytest.raises(ValueError, match=REFUSED[name]):
        fedpax.stages(method.round, start(name, method), cohort(0))


def other_method(name):
    method = METHOD_TABLE[name]
    algorithm = method.algorithm()
    initial, rounds, weights = problem(ROUNDS)
    state = algorithm.init(jax.tree.map(jnp.asarray, initial))
    return algorithm, state, [method.cohort(*each) for each in zip(rounds, weights, strict=True)]


@pytest.mark.parametrize("name", OTHERS_REFUSED)
def test_methods_that_communicate_otherwise_are_refused(name):
    algorithm, state, (cohort, *_) = other_method(name)
    with pytest.raises(ValueError, match=OTHERS_REFUSED[name]):
        fedpax.stages(algorithm.round, state, cohort)


def with_weights(cohort, present):
    """A cohort whose absent participants have weight 0 and no step."""
    here = np.isin(np.arange(N), present)
    n = cohort.num_examples
    n = np.ones(N, np.int32) if n is None else np.asarray(n)
    steps = len(jax.tree.leaves(cohort.batches)[0][0])
    cohort = cohort._replace(
        num_examples=np.where(here, n, 0).astype(n.dtype),
        num_steps=np.where(here, steps, 0).astype(np.int32),
    )
    if cohort.client_ids is not None:
        cohort = cohort._replace(client_ids=np.where(here, cohort.client_ids, -1))
    return cohort


def rows_of(tree, present):
    """The rows of some participants, where there are rows."""
    return jax.tree.map(lambda x: x[np.array(present)] if jnp.shape(x)[:1] == (N,) else x, tree)


@functools.cache
def divided_other(name):
    """Return the initial state, cohorts, the compiled round and its stages, as `divided` does."""
    algorithm, state, cohorts = other_method(name)
    cohorts = [with_weights(each, range(N)) for each in cohorts]
    stages = fedpax.stages(algorithm.round, state, cohorts[0])
    return state, cohorts, jax.jit(algorithm.round), stages


@pytest.mark.parametrize("present", FEW)
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in OTHERS]
)
def test_stages_of_other_methods_equal_the_round(name, present):
    answer = PRESENT[present]
    if present != "all" and name in EXCHANGED:
        pytest.skip("in the compiled round, all islands have partners: tested in test_papa")
    state, cohorts, step, stages = divided_other(name)
    is_smaller = present != "all" and name in POPULATIONS
    if is_smaller:
        step = jax.jit(METHOD_TABLE[name].algorithm(len(answer)).round)
    staged = state
    for each in cohorts:
        before = staged
        staged, reported = run_local(stages, staged, each, participants=answer)
        if is_smaller:
            expected = step(rows_of(before, answer), rows_of(each, answer))
            assert_agree((rows_of(staged, answer), reported), expected)
        else:
            state, metrics = step(state, with_weights(each, answer))
            assert_agree((staged, reported), (state, metrics), answer)
        absent = [i for i in range(N) if i not in answer]
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(staged), strict=True):
            if jnp.shape(old)[:1] == (N,):
                np.testing.assert_array_equal(np.asarray(old)[absent], np.asarray(new)[absent])


@functools.cache
def divided_gradient(name):
    """Return the initial state, the compiled gradient of a round and its stages."""
    method = METHODS[name]()
    state = start(name, method)

    def loss(params, state, cohort):
        after, metrics = method.round(state._replace(params=params), cohort)
        return sum(jnp.sum(p**2) for p in jax.tree.leaves(after.params)) + metrics["loss"]

    gradient = jax.grad(loss)
    stages = fedpax.stages(gradient, state.params, state, cohort(0))
    return state, jax.jit(gradient), stages


@pytest.mark.parametrize("present", FEW)
@pytest.mark.parametrize("name", ["fedavg", pytest.param("scaffold II", marks=pytest.mark.slow)])
def test_the_gradient_of_a_round_equals_that_of_the_stages(name, present):
    answer = PRESENT[present]
    state, gradient, stages = divided_gradient(name)
    result = run_local(stages, state.params, state, cohort(0), participants=answer)
    assert_agree(result, gradient(state.params, state, cohort(0, answer)), answer)
