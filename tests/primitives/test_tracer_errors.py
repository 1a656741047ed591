"""JAX's messages about tracers name the user's function and argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import normal

import fedpax
from fedpax import federated_map

N = 4


def local_train(model, batch, *, rate=0.1):
    """Use a traced value as a Python value, in the way that the argument `batch["how"]` names."""
    ((how, x),) = batch.items()
    if how == "bool" and x > 0:
        return x
    return {
        "float": float,
        "int": lambda x: list(range(3))[x.astype(int)],
        "array": np.asarray,
        "bool": lambda x: x,
        "shape": lambda x: jnp.ones(x.astype(int)),
    }[how](x)


class Trainer:
    def __call__(self, model, batch):
        return local_train(model, batch)

    def method(self, model, batch):
        return local_train(model, batch)


def wrapped_in(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return wrapper


@pytest.mark.parametrize("how", ["bool", "float", "int", "array", "shape"])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_in_a_participants_function(how, run):
    @run
    @fedpax.program(clients=N)
    def train_round(w, x):
        return federated_map(local_train, jnp.ones(N), {how: x})

    with pytest.raises(TypeError) as error:
        train_round(1.0, normal(N))
    message = str(error.value)
    assert "function local_train at " in message
    assert f"the argument batch['{how}']" in message
    assert "fedpax/primitives" not in message


@pytest.mark.parametrize(
    ("fn", "name", "argument"),
    [
        (functools.partial(local_train, rate=0.2), "local_train", "batch['float']"),
        (functools.partial(local_train, 1.0), "local_train", "batch['float']"),
        (Trainer(), "__call__", "batch['float']"),
        (Trainer().method, "method", "batch['float']"),
        (wrapped_in(local_train), "local_train", "batch['float']"),
        (lambda *parts: local_train(*parts), "<lambda>", "parts[1]['float']"),
        (jax.checkpoint(local_train), "local_train", "batch['float']"),
    ],
    ids=["partial", "partial by position", "object", "method", "wrapped", "lambda", "checkpoint"],
)
def test_every_kind_of_function_is_named(fn, name, argument):
    bound = isinstance(fn, functools.partial) and fn.args

    @fedpax.program(clients=N)
    def train_round(x):
        batch = {"float": x}
        return federated_map(fn, batch) if bound else federated_map(fn, jnp.ones(N), batch)

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        train_round(normal(N))
    assert f"function {name} at " in str(error.value)
    assert f"the argument {argument}" in str(error.value)
    assert "fedpax/primitives" not in str(error.value)


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"]
)
def test_in_a_programs_function(transform):
    @fedpax.program(clients=N, static_argnames="mode")
    def train_round(mode, params, data, *, rate=1.0):
        return jnp.sum(params) * (1.0 if data["x"][0] > 0 else 2.0)

    run = transform(lambda params: train_round("fast", params, {"x": normal(N)}))
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        run(1.0)
    assert "function train_round at " in str(error.value)
    assert "the argument data['x']" in str(error.value)
    by_keyword = fedpax.program(clients=N)(lambda w, *, rate: w if rate > 0 else -w)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"the argument rate"):
        by_keyword(1.0, rate=0.5)
