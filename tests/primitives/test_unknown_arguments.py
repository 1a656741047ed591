"""Messages about arguments that methods, aggregators and codecs do not take, and donated states."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax import aggregators, algorithms
from fedpax.aggregators import codecs
from fedpax.algorithms import fedavg
from fedpax.clients import client_store, gather_clients, scatter_clients
from fedpax.primitives.user_functions import nearest_argument
from fedpax.training import evaluate_by_client, evaluator


def loss_fn(w, x):
    return jnp.mean((w - x) ** 2), {}


FUNCTIONS = [
    getattr(module, name)
    for module in (aggregators, codecs, algorithms)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_names_its_arguments(function):
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return
    with pytest.raises(TypeError) as error:
        function(unheard_of=1)
    assert f"{function.__name__}() takes no argument unheard_of, expected" in str(error.value)
    assert all(p.name in str(error.value) for p in parameters)


@pytest.mark.parametrize(
    ("function", "arguments", "near"),
    [
        (algorithms.fedavg, {"learning_rate": 0.1}, "client_optimizer"),
        (algorithms.fedavg, {"client_lr": 0.1}, "client_optimizer"),
        (algorithms.fedavg, {"server_lr": 1.0}, "server_optimizer"),
        (algorithms.fedavg, {"num_clients": 5}, "cohort_size"),
        (algorithms.scaffold, {"client_learning_rate": 0.1}, "client_optimizer"),
        (algorithms.diloco, {"outer_lr": 0.7}, "outer_optimizer"),
        (algorithms.diloco, {"num_workers": 4}, "islands"),
        (algorithms.fedprox, {"agregator": None}, "aggregator"),
        (aggregators.private_mean, {"clip_norm": 1.0}, "max_norm"),
        (aggregators.private_mean, {"sigma": 1.0}, "noise_multiplier"),
        (aggregators.trimmed_mean, {"fraction": 0.1}, "trim_fraction"),
    ],
)
def test_the_nearest_argument_is_named(function, arguments, near):
    with pytest.raises(TypeError, match=rf"Did you mean {near}\?"):
        function(loss_fn, **arguments) if "loss_fn" in str(
            inspect.signature(function)
        ) else function(**arguments)


def test_too_many_arguments_by_position_are_named():
    with pytest.raises(TypeError, match=re.escape("Name all others: cohort_size=, client_opt")):
        fedavg(loss_fn, 5)


def test_a_donated_state_says_what_to_do():
    method = fedavg(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.1))
    state, cohort = method.init(jnp.zeros(3)), fedpax.Cohort(jnp.ones((2, 1, 1, 3)))
    stages = fedpax.stages(method.round, state, cohort)
    jax.jit(method.round, donate_argnums=0)(state, cohort)  # interrupted: nothing is assigned
    words = r"state\.params has been deleted.*restore the state"
    out_of_core = fedpax.out_of_core(method.round, chunk_size=1)
    for call in (method.round, out_of_core, lambda *args: next(stages.run(*args))):
        with pytest.raises(RuntimeError, match=words):
            call(state, cohort)


def test_a_donated_model_or_store_says_what_to_do():
    params, store = jnp.zeros(3), client_store({"w": jnp.zeros(3)}, 4)
    jax.jit(lambda *args: args, donate_argnums=(0, 1))(params, store)  # nothing is assigned
    loss = lambda w, batch: loss_fn(w, batch["x"])
    batches = [{"x": np.ones((2, 3), np.float32)}]
    evaluate = evaluator(loss, batches, placement="clients", num_participants=1)
    by_client = evaluate_by_client(loss, batches)
    for call in (evaluate, by_client):
        with pytest.raises(RuntimeError, match=r"^params has been deleted.*restore the state"):
            call(params)
    with pytest.raises(RuntimeError, match=r"store\.rows\['w'\] has been deleted.*make it anew"):
        gather_clients(store, np.array([0]))
    with pytest.raises(RuntimeError, match=r"store\.rows\['w'\] has been deleted"):
        scatter_clients(store, np.array([0]), {"w": np.ones((1, 3), np.float32)})


def test_the_nearest_of_several_names():
    known = ["cohort_size", "client_optimizer", "server_optimizer"]
    assert nearest_argument("server_lr", known) == "server_optimizer"
    assert nearest_argument("max_nrom", ["max_norm", "seed"]) == "max_norm"
