"""Self-tuning: hyperparameters follow the gradient of the loss after each round."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tuning_problem import FEATURES, fedavg_of, loss_fn, random_cohort

import fedpax
from fedpax.aggregators import coordinate_median
from fedpax.algorithms import (
    data_parallel,
    diloco,
    eager_diloco,
    easgd,
    fedavg,
    fedprox,
    noloco,
    papa,
    self_tuning,
    server_adagrad,
    server_adam,
    server_yogi,
    streaming_diloco,
)


def loss_after(log_h, state, cohort):
    """The loss on the first batches after a round, without fedpax's primitives around it."""
    after, _ = fedavg_of({k: jnp.exp(v) for k, v in log_h.items()}).round(state, cohort)
    first = {k: v[:, 0] for k, v in cohort.batches.items()}
    losses = jax.vmap(lambda batch: loss_fn(after.params, batch)[0])(first)
    return jnp.average(losses, weights=cohort.num_examples)


@pytest.mark.parametrize(
    ("names", "ragged"),
    [
        (("rate", "damping", "client_rate"), True),
        *[
            pytest.param(names, ragged, marks=pytest.mark.slow)
            for names, ragged in [
                (("rate", "damping", "client_rate"), False),
                (("rate", "damping"), True),
                (("rate", "damping"), False),
            ]
        ],
    ],
)
def test_the_hypergradient_is_the_derivative_of_the_loss_after_the_round(names, ragged: bool):
    start = {name: value for name, value in (("rate", 0.7), ("damping", 0.4), ("client_rate", 0.03))
             if name in names}  # fmt: skip
    algorithm = self_tuning(fedavg_of, start, loss_fn, hyper_optimizer=optax.sgd(1.0), chunk_size=1)
    cohort = random_cohort(ragged=ragged)
    train = jax.jit(algorithm.round)

    @jax.jit
    def wanted(before):
        """Return the loss after the round, its derivatives and the parameters."""
        given = before.log_hyperparameters, before.algorithm_state, cohort
        plain, _ = fedavg_of(before.hyperparameters).round(before.algorithm_state, cohort)
        return loss_after(*given), jax.jacfwd(loss_after)(*given), plain.params

    state = algorithm.init(jnp.zeros(FEATURES))
    for _ in range(2):
        before, (state, metrics) = state, train(state, cohort)
        loss, slopes, params = wanted(before)
        log, after = jax.device_get((before.log_hyperparameters, state.log_hyperparameters))
        moved = {k: log[k] - after[k] for k in log}
        chex.assert_trees_all_close(moved, slopes, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(metrics["loss_after"], loss, rtol=1e-5)
        chex.assert_trees_all_close(state.params, params, rtol=1e-5, atol=1e-6)
        # A descent step of size 1 in log h shall not leave the range in which rounds are stable.
        state = state._replace(log_hyperparameters=log)


def test_fedavg_corrects_a_server_rate_that_is_too_small_and_one_that_is_too_large():
    cohort = random_cohort()

    def train(rate, hyper_optimizer):
        algorithm = self_tuning(
            lambda h: fedavg_of({**h, "damping": 1.0}),
            {"rate": rate},
            loss_fn,
            hyper_optimizer=hyper_optimizer,
        )
        step, state = jax.jit(algorithm.round), algorithm.init(jnp.zeros(FEATURES))
        for _ in range(25):
            state, metrics = step(state, cohort)
        return state.hyperparameters["rate"].item(), metrics["loss_after"].item()

    for rate in (0.1, 30.0):
        constant, untuned_loss = train(rate, optax.set_to_zero())
        tuned, loss = train(rate, optax.adam(0.2))
        assert abs(constant - rate) < 1e-3 * rate
        assert (tuned > rate) == (rate < 1)
        assert loss < 0.5 * untuned_loss, (loss, untuned_loss)


def test_diloco_learns_its_outer_learning_rate_and_momentum():
    def diloco_of(h):
        outer = optax.sgd(h["rate"], momentum=1 - h["damping"], nesterov=True)
        return diloco(loss_fn, islands=4, inner_optimizer=optax.adam(0.02), outer_optimizer=outer)

    def train(hyper_optimizer):
        algorithm = self_tuning(
            diloco_of,
            {"rate": 0.2, "damping": 0.9},
            loss_fn,
            placement="islands",
            hyper_optimizer=hyper_optimizer,
        )
        step, state = jax.jit(algorithm.round), algorithm.init(jnp.zeros(FEATURES))
        for _ in range(25):
            state, metrics = step(state, random_cohort())
        return state.hyperparameters, metrics

    untuned, tuned = train(optax.set_to_zero()), train(None)
    assert tuned[0]["rate"] > untuned[0]["rate"] and tuned[0]["damping"] < untuned[0]["damping"]
    assert tuned[1]["loss_after"] < 0.7 * untuned[1]["loss_after"]
    assert tuned[1]["hyperparameter/rate"] < tuned[0]["rate"]  # the round's own, before the update


def relu_loss(w, x):
    return jnp.mean((jnp.sum(jax.nn.relu(x @ w), -1) - 3.0) ** 2), {}


@pytest.mark.parametrize(("broken", "finite"), [(1, True), (4, False)])
def test_the_loss_after_a_robust_round_leaves_out_participants_without_one(broken, finite):
    cohort = random_cohort()
    cohort.batches["y"][:broken] = np.nan
    algorithm = self_tuning(
        lambda h: fedavg(
            loss_fn,
            cohort_size=4,
            client_optimizer=optax.sgd(0.02),
            server_optimizer=optax.sgd(h["rate"]),
            aggregator=coordinate_median(),
        ),
        {"rate": 1.0},
        loss_fn=loss_fn,
        placement="clients",
    )
    state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.zeros(FEATURES)), cohort)
    assert bool(np.isfinite(metrics["loss_after"])) == finite
    if finite:
        first = {name: leaf[broken:, 0] for name, leaf in cohort.batches.items()}
        params = state.algorithm_state.params
        losses = jax.vmap(lambda batch: loss_fn(params, batch)[0])(first)
        expected = np.average(losses, weights=cohort.num_examples[broken:])
        np.testing.assert_allclose(metrics["loss_after"], expected, rtol=1e-5)
        assert metrics["non_finite_hypergradients"] == 0


@pytest.mark.parametrize(
    ("eps_root", "skipped"), [(0.0, 2), pytest.param(1e-12, 0, marks=pytest.mark.slow)]
)
def test_a_hyperparameter_whose_derivative_is_nan_keeps_its_value(eps_root: float, skipped: int):
    """Adam's square root has a NaN derivative where a gradient is 0: here of a dead unit."""
    algorithm = self_tuning(
        lambda h: fedavg(
            relu_loss,
            cohort_size=2,
            client_optimizer=optax.adamw(h["client"], eps_root=eps_root),
            server_optimizer=optax.sgd(h["server"]),
        ),
        {"client": 0.01, "server": 0.5},
        relu_loss,
    )
    x = np.random.default_rng(0).uniform(0.5, 1.0, size=(2, 2, 4, 3)).astype(np.float32)
    state, train = algorithm.init(jnp.array([[0.5, -1.0]] * 3)), jax.jit(algorithm.round)
    before, losses = state.hyperparameters, []
    for _ in range(3):
        state, metrics = train(state, fedpax.Cohort(x))
        losses.append(metrics["loss_after"].item())
        assert metrics["non_finite_hypergradients"] == skipped
    assert losses[-1] < losses[0] and jnp.isfinite(state.params).all()
    for name, start in before.items():
        assert jnp.isfinite(state.hyperparameters[name])
        assert (state.hyperparameters[name] == start) == bool(skipped)
    # With both signs no unit is dead: the skipped derivatives have not reached Adam's moments.
    state, metrics = train(state, fedpax.Cohort(x * np.float32([[1], [-1], [1], [-1]])))
    assert metrics["non_finite_hypergradients"] == 0
    for name, start in before.items():
        assert jnp.isfinite(state.hyperparameters[name]) and state.hyperparameters[name] != start


def test_the_state_keeps_its_structure_and_can_be_donated():
    algorithm = self_tuning(
        lambda h: fedprox(loss_fn, cohort_size=4, client_optimizer=optax.sgd(0.02), mu=h["mu"]),
        {"mu": 0.1},
        loss_fn,
    )
    state = algorithm.init(jnp.zeros(FEATURES))
    after, metrics = jax.jit(algorithm.round, donate_argnums=0)(state, random_cohort())
    chex.assert_trees_all_equal_shapes_and_dtypes(after, algorithm.init(jnp.zeros(FEATURES)))
    assert metrics["hyperparameter/mu"] > after.hyperparameters["mu"]  # mu slows this down
    assert after.params is after.algorithm_state.params


def fedavg_with(server):
    client = optax.sgd(0.02)
    return fedavg(loss_fn, cohort_size=4, client_optimizer=client, server_optimizer=server)


TRACED = {
    "FedAdagrad": ("clients", lambda h: fedavg_with(server_adagrad(h, tau=h))),
    "FedAdam": ("clients", lambda h: fedavg_with(server_adam(0.1, b1=1 - h, b2=h))),
    "FedYogi": ("clients", lambda h: fedavg_with(server_yogi(h, b1=h, b2=h))),
    "EASGD": ("islands", lambda h: easgd(loss_fn, islands=4, optimizer=optax.sgd(0.02), beta=h)),
}


@pytest.mark.parametrize("name", TRACED)
def test_settings_that_are_checked_can_be_tuned(name: str):
    placement, make = TRACED[name]
    algorithm = self_tuning(
        lambda h: make(h["h"]),
        {"h": 0.3},
        loss_fn,
        placement=placement,
        hyper_optimizer=optax.sgd(1e-3),
    )
    state, train = algorithm.init(jnp.zeros(FEATURES)), jax.jit(algorithm.round)
    state, _ = train(state, random_cohort())
    assert 1e-7 < abs(state.hyperparameters["h"] - 0.3) < 0.2


def momentum_of(h, rate=0.02):
    return optax.sgd(rate, momentum=1 - h["h"])


IN_BFLOAT16 = {
    name: (kind, lambda h, make=make: make(h["h"])) for name, (kind, make) in TRACED.items()
}
IN_BFLOAT16 |= {
    "server momentum": ("clients", lambda h: fedavg_with(momentum_of(h))),
    "client momentum": (
        "clients",
        lambda h: fedavg(loss_fn, cohort_size=4, client_optimizer=momentum_of(h)),
    ),
    "DiLoCo": (
        "islands",
        lambda h: diloco(
            loss_fn, islands=4, inner_optimizer=momentum_of(h), outer_optimizer=momentum_of(h)
        ),
    ),
    "eager DiLoCo": (
        "islands",
        lambda h: eager_diloco(
            loss_fn, islands=4, inner_optimizer=momentum_of(h), outer_optimizer=momentum_of(h)
        ),
    ),
    "Streaming DiLoCo": (
        "islands",
        lambda h: streaming_diloco(
            loss_fn,
            islands=4,
            inner_optimizer=momentum_of(h),
            outer_optimizer=momentum_of(h),
            fragments=lambda path, leaf: 0,
        ),
    ),
    "data parallelism": (
        "islands",
        lambda h: data_parallel(loss_fn, islands=4, optimizer=momentum_of(h)),
    ),
    "PAPA": (
        "islands",
        lambda h: papa(loss_fn, islands=4, optimizer=optax.sgd(0.02), alpha=h["h"]),
    ),
    "NoLoCo": (
        "islands",
        lambda h: noloco(loss_fn, islands=4, inner_optimizer=momentum_of(h), momentum=h["h"]),
    ),
}


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_traced_settings_keep_a_bfloat16_state(name: str):
    """Abstractly: a hyperparameter is float32, and must not widen what a loop or state carries."""
    placement, make = IN_BFLOAT16[name]
    algorithm = self_tuning(make, {"h": 0.3}, loss_fn, placement=placement)
    state = jax.eval_shape(algorithm.init, jnp.zeros(FEATURES, jnp.bfloat16))
    cohort = random_cohort()
    batches = jax.tree.map(lambda b: jnp.asarray(b, jnp.bfloat16), cohort.batches)
    after, _ = jax.eval_shape(algorithm.round, state, cohort._replace(batches=batches))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hyperparameters": {}}, "is empty, .* Pass for example"),
        ({"hyperparameters": {"rate": -1.0}}, r"\['rate'\] is -1.0, .* express it by a positive"),
        ({"hyperparameters": {"rate": 0.0}}, "expected a positive finite number"),
        ({"hyperparameters": {"rate": float("inf")}}, r"\['rate'\] is inf, expected a positive"),
        ({"tuning_steps": 0}, "tuning_steps is 0, expected an int of at least 1"),
    ],
)
def test_settings_that_cannot_be_tuned_are_refused(settings, words):
    settings = {"hyperparameters": {"rate": 1.0}} | settings
    with pytest.raises(ValueError, match=words):
        self_tuning(fedavg_of, loss_fn=loss_fn, **settings)
