"""Parameters that the client optimizer freezes stay as they are beside every aggregator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.aggregators import (
    add_local_noise,
    add_noise,
    chain,
    codecs,
    compressed_mean,
    mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
)
from fedpax.algorithms import diloco, eager_diloco, fedavg, streaming_diloco
from fedpax.algorithms.parts.decoupled_parts import decoupled_diloco_parts
from fedpax.algorithms.parts.frozen_leaves import frozen_leaves
from fedpax.algorithms.parts.local_steps import optimizer_step
from fedpax.islands.syncer.outer_model import Contribution, OuterModel

N = 4
PARAMS = {"body": jnp.array([0.5, -1.0, 2.0]), "head": jnp.zeros(3)}
LABELS = {"body": "freeze", "head": "train"}
MASK = {"body": True, "head": False}


def freeze(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.multi_transform({"freeze": optax.set_to_zero(), "train": optimizer}, LABELS)


def loss_fn(params, x):
    return jnp.mean((x @ (params["body"] + params["head"]) - 1) ** 2), {}


@pytest.mark.parametrize(
    "optimizer",
    [
        freeze(optax.sgd(0.1, momentum=0.9)),
        freeze(optax.adamw(0.1, weight_decay=0.1)),
        optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.sgd(0.1, momentum=0.9)),
        optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.adam(0.1)),
        optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), MASK)),
        optax.apply_if_finite(freeze(optax.adam(0.1)), 3),
        optax.inject_hyperparams(lambda rate: freeze(optax.adam(rate)))(rate=0.1),
    ],
)
def test_a_parameter_whose_updates_are_zero_is_frozen(optimizer):
    assert frozen_leaves(optimizer, PARAMS) == [True, False]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1),
        optax.masked(optax.sgd(0.1), MASK),  # passes the gradient of all others on
        optax.chain(
            optax.masked(optax.set_to_zero(), MASK), optax.add_decayed_weights(0.1), optax.sgd(0.1)
        ),
        optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.add_noise(0.1, 0.5, key=0)),
    ],
)
def test_a_parameter_that_an_optimizer_moves_is_not(optimizer):
    assert frozen_leaves(optimizer, PARAMS) == [False, False]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.polyak_sgd(),  # whose update needs the value of the loss
        optax.masked(optax.set_to_zero(), {"body": True}),
        optax.masked(optax.set_to_zero(), lambda params: {"body": params["other"]}),
    ],
)
def test_an_optimizer_that_does_not_fit_the_parameters_freezes_none(optimizer):
    assert frozen_leaves(optimizer, PARAMS) == [False, False]


def test_a_defect_of_an_optimizer_is_not_hidden():
    def update(*_):
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        frozen_leaves(optax.GradientTransformation(lambda _: (), update), PARAMS)


@pytest.mark.parametrize(
    "aggregator",
    [
        private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
        *[
            pytest.param(aggregator, marks=pytest.mark.slow)
            for aggregator in (
                private_secure_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
                secure_mean(max_value=1.0),
                quantized_mean(4),
            )
        ],
        compressed_mean(codecs.sign(), error_feedback=True),
        chain(add_local_noise(0.1, seed=0), add_noise(0.1, seed=1), mean()),
    ],
    ids=["private", "private secure", "secure", "quantized", "sign", "noise"],
)
def test_no_aggregator_moves_a_frozen_parameter(aggregator):
    method = fedavg(
        loss_fn,
        cohort_size=N,
        client_optimizer=freeze(optax.sgd(0.1)),
        server_optimizer=optax.sgd(1.0, momentum=0.9),
        aggregator=aggregator,
    )
    cohort = Cohort(np.random.default_rng(0).normal(size=(N, 2, 4, 3)).astype(np.float32))
    state, step = method.init(PARAMS), jax.jit(method.round)
    for _ in range(2):
        state, _ = step(state, cohort)
    np.testing.assert_array_equal(state.params["body"], PARAMS["body"])
    assert np.abs(state.params["head"]).min() > 0


def test_a_learning_rate_of_0_gets_no_noise_and_epsilon_counts_it() -> None:
    private = private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0)
    method = fedavg(loss_fn, cohort_size=N, client_optimizer=optax.sgd(0.0), aggregator=private)
    cohort = Cohort(np.random.default_rng(0).normal(size=(N, 2, 4, 3)).astype(np.float32))
    state, metrics = jax.jit(method.round)(method.init(PARAMS), cohort)
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)
    assert private.accountant is not None
    assert metrics["epsilon"] == pytest.approx(private.accountant.epsilon(1), rel=1e-6)


def test_diloco_sends_no_frozen_parameter():
    method = diloco(
        loss_fn,
        islands=2,
        inner_optimizer=freeze(optax.adamw(0.1)),
        aggregator=private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
    )
    cohort = Cohort(np.ones((2, 1, 4, 3), np.float32))
    state, _ = jax.jit(method.round)(method.init(PARAMS), cohort)
    np.testing.assert_array_equal(state.params["body"], PARAMS["body"])
    text = str(jax.make_jaxpr(method.round)(state, cohort))
    assert text.count("federated_sum[") == 5  # of the head, of norms, and of three metrics


DECAY = optax.adamw(0.1, weight_decay=0.1)
FREEZE = freeze(optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fedavg(loss_fn, cohort_size=N, client_optimizer=FREEZE, server_optimizer=DECAY),
        lambda: diloco(loss_fn, islands=N, inner_optimizer=FREEZE, outer_optimizer=DECAY),
        pytest.param(
            lambda: eager_diloco(loss_fn, islands=N, inner_optimizer=FREEZE, outer_optimizer=DECAY),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fedavg", "diloco", "eager_diloco"],
)
def test_the_weight_decay_of_a_server_moves_no_frozen_parameter(make):
    method = make()
    cohort = Cohort(np.random.default_rng(0).normal(size=(N, 2, 4, 3)).astype(np.float32))
    state, step = method.init(PARAMS), jax.jit(method.round)
    for _ in range(2):
        state, _ = step(state, cohort)
    np.testing.assert_array_equal(state.params["body"], PARAMS["body"])
    assert np.abs(state.params["head"]).min() > 0


@pytest.mark.parametrize("body", [0, 1], ids=["with the head", "a fragment of its own"])
def test_no_fragment_moves_a_frozen_parameter(body):
    method = streaming_diloco(
        loss_fn,
        islands=N,
        inner_optimizer=FREEZE,
        outer_optimizer=DECAY,
        fragments=lambda path, leaf: body if path == "body" else 0,
        delay=0,
        aggregator=private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
    )
    cohort = Cohort(np.random.default_rng(0).normal(size=(N, 2, 4, 3)).astype(np.float32))
    state, step = method.init(PARAMS), jax.jit(method.round)
    for _ in range(2):
        state, metrics = step(state, cohort)
    np.testing.assert_array_equal(state.params["body"], PARAMS["body"])
    np.testing.assert_array_equal(state.local_params["body"], np.tile(PARAMS["body"], (N, 1)))
    assert np.abs(state.params["head"]).min() > 0 and np.isfinite(metrics["loss"])


def test_a_syncer_moves_no_frozen_parameter():
    parts = decoupled_diloco_parts(
        loss_fn,
        islands=2,
        inner_optimizer=FREEZE,
        steps_per_sync=2,
        outer_optimizer=DECAY,
        fragments=lambda path, leaf: 0,
        aggregator=chain(add_noise(0.5, seed=0), mean()),
    )
    model = OuterModel(parts, PARAMS)
    gradient = jax.tree.map(np.ones_like, PARAMS)
    new, _ = model.merge(0, [Contribution(0, gradient, 1.0), Contribution(1, gradient, 1.0)])
    np.testing.assert_array_equal(new.params["body"], PARAMS["body"])
    assert np.abs(new.params["head"]).min() > 0


def test_a_float32_setting_keeps_the_dtype_of_a_state() -> None:
    descent = optax.sgd(jnp.float32(0.5), momentum=jnp.float32(0.75))
    x = jnp.bfloat16(3.0)
    x, state = optimizer_step(descent, jnp.bfloat16(2.0), descent.init(x), x)
    assert (x.item(), jax.tree.leaves(state)[0].dtype) == (2.0, jnp.bfloat16)
