"""Padding never trains, whatever marks it: a mask, `num_steps`, or both."""

import functools

import chex
import jax
import jax.numpy as jnp
import method_problem
import numpy as np
import optax
import pytest
from method_problem import (
    BATCH,
    PARTICIPANTS,
    POPULATION,
    STEPS,
    TOLERANCE,
    assert_close,
    loss_fn,
    random_params,
)
from method_table import METHODS, every_method, problem, trainer

from fedpax import Cohort, explain
from fedpax.aggregators import codecs, compressed_mean
from fedpax.algorithms import diloco, fedavg, local_steps
from fedpax.data import ClientSampler, cohort_rounds

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def pad(batches, places, *, marked=True):
    """Insert steps of NaN before the given places, and mark them in a mask."""
    mask = np.ones((PARTICIPANTS, STEPS, BATCH), np.bool_)
    padded = {
        "x": np.insert(batches["x"], places, np.nan, axis=1),
        "label": np.insert(batches["label"], places, 0, axis=1),
    }
    return padded | {"mask": np.insert(mask, places, False, axis=1)} if marked else padded


def cohorts(method, batches, weights, places):
    """Yield the padded cohort, marked in each way that can mark padding at these places."""
    cohort = method.cohort(pad(batches, places), weights)
    yield "mask", cohort
    if places == [STEPS, STEPS]:
        cohort = cohort._replace(num_steps=np.full(PARTICIPANTS, STEPS, np.int32))
        yield "both", cohort
        yield "num_steps", cohort._replace(batches=pad(batches, places, marked=False))


@functools.cache
def masked_round(name):
    """Jit the round of a method once, which the tests of padding pass cohorts of equal shapes."""
    return jax.jit(METHODS[name].algorithm().round)


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([STEPS, STEPS], id="at the end", marks=pytest.mark.slow),
        pytest.param([0, 2], id="in between"),
    ],
)
@every_method
def test_padded_steps_change_nothing(name, places):
    """Parameters, moments, step counts and metrics are as for the cohort without padding."""
    params, rounds, weights = problem(2)
    expected = trainer(name, "none").run(params, rounds, weights)
    method, step = METHODS[name], masked_round(name)
    algorithm = method.algorithm()
    ways = [list(cohorts(method, b, n, places)) for b, n in zip(rounds, weights, strict=True)]
    for way in zip(*ways, strict=True):
        state = algorithm.init(on_device(params))
        for (mark, cohort), wanted in zip(way, expected, strict=True):
            state, metrics = step(state, cohort)
            jax.tree.map(
                lambda g, w, mark=mark: np.testing.assert_allclose(g, w, **TOLERANCE, err_msg=mark),
                (state, metrics),
                wanted,
            )


@every_method
def test_a_round_of_padding_alone_changes_nothing(name):
    params, rounds, weights = problem(2)
    compiled, step = trainer(name, "none"), masked_round(name)
    state, _ = compiled.round(compiled.start(params), compiled.cohort(rounds[0], weights[0]))
    padding = pad(rounds[1], [0, 2])
    padding["mask"][:] = False
    after, metrics = step(state, compiled.cohort(padding, weights[1]))
    assert all(value == 0 for value in metrics.values())
    # Momentum of the server goes on along its moments.
    kept = {"DiLoCo": "inner_optimizer_state", "FedAdam": "aggregator_state"}
    kept |= dict.fromkeys(["Mime", "MimeLite", "MimeAdam", "MimeLiteAdam"], "params")
    kept |= {"FedBuff": "params", "SparseLoCo": "params"}
    kept |= {"Decoupled DiLoCo": "inner_optimizer_state"}
    # Models are pulled together, whether they have trained or not.
    papas = "PAPA", "PAPA-all", "PAPA-2", "PAPA-2, rotation"
    kept |= dict.fromkeys([*papas, "EASGD"], "optimizer_state")
    kept |= dict.fromkeys(
        ["Streaming DiLoCo", "Eager DiLoCo", "MuLoCo", "NoLoCo"], "inner_optimizer_state"
    )
    if name in kept:
        after, state = (getattr(compiled, kept[name]) for compiled in (after, state))
    chex.assert_trees_all_equal(after, state)


@pytest.mark.parametrize(
    ("marked_by", "optimizer"),
    [
        ("mask", optax.adam(0.05)),
        ("num_steps", optax.sgd(0.2, momentum=0.8)),
        pytest.param("mask", optax.sgd(0.2, momentum=0.8), marks=pytest.mark.slow),
        pytest.param("num_steps", optax.adam(0.05), marks=pytest.mark.slow),
    ],
)
def test_clients_of_unequal_size_train_on_their_own_steps(optimizer, marked_by):
    """Against each client alone, on its own batches; a client without any has weight 0."""
    params, (batches,), (weights,) = problem(1)
    num_steps = np.resize(np.arange(STEPS + 1), PARTICIPANTS)
    mask = np.arange(STEPS)[:, None] < num_steps[:, None, None]
    mask = np.broadcast_to(mask, (PARTICIPANTS, STEPS, BATCH))
    algorithm = fedavg(loss_fn, cohort_size=PARTICIPANTS, client_optimizer=optimizer)
    garbage = np.where(mask[..., None], batches["x"], np.nan)
    if marked_by == "mask":
        cohort = Cohort({**batches, "x": garbage, "mask": mask}, weights)
    else:
        cohort = Cohort({**batches, "x": garbage}, weights, num_steps)
    state, metrics = jax.jit(algorithm.round)(algorithm.init(on_device(params)), cohort)

    @jax.jit
    def train(start, batches):
        return local_steps(loss_fn, optimizer, start, optimizer.init(start), batches)

    ends, reports, shares = [], [], []
    for i, n in enumerate(num_steps):
        own = jax.tree.map(lambda b, i=i, n=n: b[i, :n], batches)
        if n:
            end, _, report = train(on_device(params), own)
            ends.append(end)
            reports.append(report)
            shares.append(weights[i])

    def mean(*leaves):
        return np.average(np.stack(leaves), axis=0, weights=shares)

    assert_close(state.params, jax.tree.map(mean, *ends))
    assert_close(metrics, jax.tree.map(mean, *reports))


@pytest.mark.parametrize("name", ["FedAvg", pytest.param("DiLoCo", marks=pytest.mark.slow)])
def test_an_absent_participant_does_not_dilute_the_mean(name):
    """Without `num_examples`, those without a step have weight 0 all the same."""
    method = METHODS[name]
    params, (batches,), _ = problem(1)
    present = [0, 2, 3, 5]
    padded = pad(batches, [])
    absent = [i for i in range(PARTICIPANTS) if i not in present]
    padded["mask"][absent] = False
    padded["x"][absent] = np.nan
    whole, some = method.algorithm(), method.algorithm(len(present))
    state, metrics = whole.round(whole.init(on_device(params)), Cohort(padded))
    own = jax.tree.map(lambda b: b[present], batches)
    wanted, expected = some.round(some.init(on_device(params)), Cohort(own))
    assert_close((state.params, metrics), (wanted.params, expected))


@pytest.mark.parametrize(
    "name",
    [
        name if name == "SCAFFOLD" else pytest.param(name, marks=pytest.mark.slow)
        for name, method in METHODS.items()
        if method.placement == "clients"
    ],
)
def test_an_empty_slot_neither_trains_nor_weighs(name):
    """A negative client id alone marks it: the same as a client without a step."""
    method, slot = METHODS[name], 3
    params, (batches,), (weights,) = problem(1)
    algorithm = method.algorithm()
    step, state = jax.jit(algorithm.round), algorithm.init(on_device(params))
    client_ids = np.arange(2, 2 + PARTICIPANTS)

    def cohort(value, client_ids, num_steps=None):
        x = batches["x"].copy()
        x[slot] = value
        own = method.cohort({**batches, "x": x}, weights)
        return own._replace(client_ids=client_ids, num_steps=num_steps)

    num_steps = np.where(np.arange(PARTICIPANTS) == slot, 0, STEPS)
    expected = step(state, cohort(0.0, client_ids, num_steps))
    # Beyond the population there is no client either.
    empty = (-1, POPULATION) if method.keeps_client_state else (-1,)
    for client in empty:
        ids = np.where(np.arange(PARTICIPANTS) == slot, client, client_ids)
        assert_close(step(state, cohort(np.nan, ids)), expected)


def test_an_islands_weight_is_its_number_of_examples():
    params, (batches,), (weights,) = problem(1)
    algorithm = diloco(
        loss_fn,
        islands=PARTICIPANTS,
        inner_optimizer=optax.sgd(0.1),
        outer_optimizer=optax.sgd(1.0),
    )
    state, metrics = algorithm.round(algorithm.init(on_device(params)), Cohort(batches, weights))
    average = fedavg(loss_fn, cohort_size=PARTICIPANTS, client_optimizer=optax.sgd(0.1))
    wanted, expected = average.round(average.init(on_device(params)), Cohort(batches, weights))
    assert_close((state.params, metrics), (wanted.params, expected))


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.slow), optax.adam(0.01)],
)
def test_a_cohort_of_the_data_trains_alike_with_the_mask_alone(optimizer):
    """The mask alone marks the padding of a population of clients of unequal size."""
    rng = np.random.default_rng(0)
    sizes = [1, 3, 9, 14, 25]
    examples = {
        "x": rng.normal(size=(sum(sizes), method_problem.FEATURES)).astype(np.float32),
        "label": rng.integers(method_problem.CLASSES, size=sum(sizes)).astype(np.int32),
    }
    population = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    sampler = ClientSampler(len(sizes), len(sizes))
    cohort = next(cohort_rounds(examples, population, sampler, batch_size=4, preprocess=dict))
    assert cohort.batches["mask"].shape[1] == 7 and set(cohort.num_steps) == {1, 3, 4, 7}

    def masked_loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"])
        log_odds = jax.nn.log_softmax(params["scale"] * (hidden @ params["out"]))
        chosen = jnp.take_along_axis(log_odds, batch["label"][:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(batch["mask"], chosen, 0)) / jnp.sum(batch["mask"]), {}

    algorithm = fedavg(masked_loss, cohort_size=len(sizes), client_optimizer=optimizer)
    step = jax.jit(algorithm.round)
    state = algorithm.init(on_device(random_params()))
    expected = step(state, cohort)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), expected[0].params, state.params)
    assert all(distance > 1e-3 for distance in jax.tree.leaves(moved))
    assert_close(step(state, cohort._replace(num_steps=None)), expected)
    plain = Cohort(cohort.batches, cohort.num_examples)
    assert_close(step(state, plain), expected)


@pytest.mark.slow
def test_a_round_with_a_mask_has_a_gradient_that_padding_does_not_reach():
    params, (batches,), (weights,) = problem(1)
    algorithm = fedavg(
        loss_fn, cohort_size=PARTICIPANTS, client_optimizer=optax.sgd(0.2, momentum=0.8)
    )

    def loss_after(params, cohort):
        state, _ = algorithm.round(algorithm.init(params), cohort)
        return algorithm.round(state, cohort)[1]["loss"]

    gradient = jax.jit(jax.grad(loss_after))
    wanted = gradient(on_device(params), Cohort(batches, weights))
    chex.assert_tree_all_finite(wanted)
    gradients = gradient(on_device(params), Cohort(pad(batches, [1, STEPS]), weights))
    assert_close(gradients, wanted)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("cohort", "error", "words"),
    [
        ({"x": 1}, TypeError, r"round is a dict, expected a fedpax\.Cohort"),
        (Cohort({}), ValueError, "cohort.batches has no arrays"),
        (Cohort(np.ones(4)), ValueError, r"has shape \[4\], expected \[4, steps"),
        (Cohort(np.ones((4, 1)), np.ones(3)), ValueError, r"num_examples has shape \[3\]"),
        (Cohort(np.ones((4, 1)), None, np.ones(4)), TypeError, "num_steps has dtype float"),
        (Cohort(np.ones((4, 1)), None, 2), ValueError, r"num_steps has shape \[\]"),
        (Cohort(np.ones((4, 1)), client_ids=np.ones(4)), TypeError, "client_ids has dtype"),
        (
            Cohort({"x": np.ones((4, 20, 6)), "label": np.ones((4, 20), int)}),
            ValueError,
            r"batches\['label'\] has shape \[4, 20\].*as a step. Add it: .*x\[:, None\]",
        ),
    ],
)
@every_method
def test_a_malformed_cohort_raises(name, cohort, error, words):
    algorithm = METHODS[name].algorithm(4)
    state = algorithm.init(on_device(random_params()))
    with pytest.raises(error, match=words):
        algorithm.round(state, cohort)


@pytest.mark.parametrize("name", ["FedAvg", "DiLoCo"])
def test_a_loss_that_returns_no_pair_raises_in_words(name):
    def build(loss):
        if METHODS[name].placement == "clients":
            return fedavg(loss, cohort_size=2, client_optimizer=optax.sgd(0.1))
        return diloco(loss, islands=2, inner_optimizer=optax.sgd(0.1))

    cases = [
        (lambda w, x: jnp.mean(w * x), r"an array float32\[\], expected a pair \(loss, metrics\)"),
        (lambda w, x: (w * x, {}), r"a loss of an array float32\[3\], expected a scalar"),
        (lambda w, x: (jnp.mean(w * x), {"all": x}), r"metric 'all' of an array float32\[3\]"),
    ]
    for loss, words in cases:
        algorithm = build(loss)
        with pytest.raises(TypeError, match=words):
            algorithm.round(algorithm.init(jnp.float32(1)), Cohort(jnp.ones((2, 1, 3))))


def test_integer_parameters_are_named():
    algorithm = fedavg(
        lambda w, x: (jnp.mean(w["w"] * x), {}), cohort_size=2, client_optimizer=optax.sgd(0.1)
    )
    state = algorithm.init({"w": jnp.ones(3, jnp.int32)})
    with pytest.raises(TypeError, match=r"params\['w'\] has dtype int32, expected floats"):
        algorithm.round(state, Cohort(jnp.ones((2, 1, 3))))


@pytest.mark.parametrize("num_steps", [None, jnp.array([2, 0, 1])])
def test_clients_train_once_with_weights_and_compression(num_steps):
    """A sum of weights that comes before the encoding would need a second pass over the clients."""
    aggregator = compressed_mean(codecs.uniform(4))
    algorithm = fedavg(
        lambda w, x: (jnp.mean((w - x) ** 2), {}),
        cohort_size=3,
        client_optimizer=optax.sgd(0.1),
        aggregator=aggregator,
        chunk_size=1,
    )
    cohort = Cohort(jnp.ones((3, 2, 4)), jnp.arange(3.0), num_steps)
    text = str(explain(algorithm.round, algorithm.init(jnp.float32(0.0)), cohort))
    assert "phase 0" in text and "phase 1" not in text and "rematerialized" not in text


def test_padding_that_is_not_finite_reaches_no_derivative_of_local_steps():
    descent = optax.sgd(0.1)

    def trained(w, x):
        batches = {"x": x, "mask": jnp.array([[1], [0], [1]])}
        loss = lambda w, batch: (jnp.mean((w * batch["x"] - 1) ** 2), {})
        return local_steps(loss, descent, w, descent.init(w), batches)[0]

    w = jnp.float32(3.0)
    derivative = jax.jit(jax.grad(trained))
    gradient = derivative(w, np.float32([[1], [np.nan], [2]]))
    assert_close(gradient, derivative(w, np.float32([[1], [5], [2]])))
    assert_close(gradient, 0.8 * 0.2)  # (1 - 0.2 x^2) of both batches
