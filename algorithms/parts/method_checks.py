"""Checks that methods share: of settings, of parameters, and of client ids."""

import contextlib
import functools
import numbers
import re
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpax.checks import COUNT, Range, check_argument
from fedpax.clients.cohort import Cohort, check_distinct_clients
from fedpax.errors import ArgumentError, ArgumentTypeError


def check_setting(method: str, name: str, value: Any, expected: Range, *, remedy: str) -> None:
    """Check a setting as `check_argument`; a traced one, as of a derivative, is not checked."""
    if not isinstance(value, jax.core.Tracer):
        check_argument(method, name, value, expected, remedy=remedy)


def check_optimizer(method: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Check that an argument is an optax optimizer."""
    if optional and value is None:
        return
    if all(callable(getattr(value, part, None)) for part in ("init", "update")):
        if getattr(value.init, "__qualname__", "").startswith("lookahead."):
            raise ArgumentError(
                f"{method}(): {name} is optax.lookahead, which needs a pair of parameters, fast "
                "and slow, expected an optimizer of one. Pass its fast_optimizer; a "
                "server_optimizer or outer_optimizer optax.sgd(slow_step_size) takes slow steps."
            )
        return
    remedy = "Call it, for" if callable(value) else "Pass for"
    raise ArgumentTypeError(
        f"{method}(): {name} is {_describe(value)}, expected an optax.GradientTransformation. "
        f"{remedy} example optax.sgd(0.1)."
    )


@contextlib.contextmanager
def explain_needs() -> Iterator[None]:
    """Name the remedy for an optimizer of optax that needs the loss."""
    try:
        yield
    except TypeError as error:
        if not re.search(r"missing .* required keyword-only argument", str(error)):
            raise
        raise ArgumentTypeError(
            f"An optimizer needs the loss: {error}. Only local steps along the gradient of loss_fn "
            "alone, as of fedavg, diloco and local_sgd, pass value, grad and value_fn. Pass "
            "another optimizer, such as optax.adam(1e-3), or use fedavg."
        ) from error


def check_population(method: str, cohort_size: Any, num_clients: Any) -> None:
    """Check that a cohort is not larger than the population that it is drawn from."""
    remedy = "Pass the size of the population."
    check_argument(method, "num_clients", num_clients, COUNT, remedy=remedy)
    if isinstance(cohort_size, numbers.Integral) and cohort_size > num_clients:
        raise ArgumentError(
            f"{method}(): cohort_size is {cohort_size}, expected at most num_clients, which is "
            f"{num_clients}. Reduce cohort_size, or pass the size of the population as num_clients."
        )


_SPLIT = (
    "Keep keys, counters and other state of a flax model apart from its parameters: graphdef, "
    "params, rest = nnx.split(model, nnx.Param, ...), and in loss_fn "
    "nnx.merge(graphdef, params, rest, copy=True). Each step then starts from a copy of rest: pass "
    "rngs to dropout layers, as docs/clients.md does with dropout_seed."
)


def check_no_keys(params: chex.ArrayTree) -> None:
    """Check that no leaf of the parameters is a random key, as of `nnx.Dropout`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise ArgumentTypeError(
                f"params{jax.tree_util.keystr(path)} is a random key ({jnp.result_type(leaf)}), "
                f"expected floats. {_SPLIT}"
            )


def check_float_params(params: chex.ArrayTree) -> None:
    """Check that parameters can be differentiated."""
    check_no_keys(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ArgumentTypeError(
                f"params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, expected "
                f"floats. Cast it with .astype(jnp.float32) if it is a parameter. {_SPLIT}"
            )


def cohort_of_population(
    method: str, cohort: Cohort, num_clients: int
) -> tuple[Cohort, Int[Array, " participants"]]:
    """Return the cohort of a method with client state, and its ids; -1 where a client is absent."""
    # The ids are -1 where the store has no state (not below `num_clients`), and for clients of
    # weight 0, which keep their state and count in no sum over clients' states.
    if cohort.client_ids is None:
        raise ArgumentError(
            f"{method}(): cohort.client_ids is None, but {method} keeps state for each client. Set "
            "client_ids to each participant's index in the population, an integer array "
            "[participants], -1 where absent; fedpax.data.cohort_rounds sets it."
        )
    client_ids = jnp.asarray(cohort.client_ids)
    is_absent = client_ids >= num_clients
    if cohort.num_examples is not None:
        is_absent |= jnp.asarray(cohort.num_examples) <= 0
    client_ids = jnp.where(is_absent, -1, client_ids)
    return cohort._replace(client_ids=client_ids), client_ids


def with_distinct_clients(method: str, round: Callable[..., Any]) -> Callable[..., Any]:
    """Return the round of a method with client state, which raises for a client that is twice."""

    @functools.wraps(round)
    def checked(state: Any, cohort: Cohort) -> Any:
        if isinstance(cohort, Cohort) and cohort.client_ids is not None:
            check_distinct_clients(f"{method}(): cohort.client_ids", cohort.client_ids)
        return round(state, cohort)

    return checked


def _describe(value: Any) -> str:
    """Name a value of a wrong type: its type, unless it is None, a number or short text."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"a {type(value).__name__}"
