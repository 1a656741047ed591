"""Checks that methods share: of settings, of parameters, and of client ids."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpax.clients.cohort import Cohort


def check_setting(
    method: str,
    name: str,
    value: Any,
    *,
    least: float = 0,
    most: float = math.inf,
    above: float | None = None,
    below: float | None = None,
    remedy: str = "",
) -> None:
    """Check that a setting is in range. Traced values are not checked.

    Args:
        method: the method's name, for the message.
        name: the argument's name.
        value: a number, or a traced scalar (of a derivative, for example).
        least: the smallest value. Default 0.
        most: the largest value. Default infinity: no limit.
        above: a lower limit that the value must not equal, in place of `least`. Default None.
        below: an upper limit that the value must not equal, in place of `most`. Default None.
        remedy: a sentence that ends the message. Default: none.

    Raises:
        ValueError: the value is out of range or NaN.

    Example:
        >>> check_setting("fedprox", "mu", -1.0)
        Traceback (most recent call last):
            ...
        ValueError: fedprox: mu is -1.0, expected a number of at least 0.
        >>> check_setting("server_adam", "b1", 1.0, below=1)
        Traceback (most recent call last):
            ...
        ValueError: server_adam: b1 is 1.0, expected at least 0 and below 1.
    """
    if isinstance(value, jax.core.Tracer):
        return
    is_enough = value >= least if above is None else value > above
    if is_enough and (value <= most if below is None else value < below):
        return
    wanted = _describe_range(least, most, above, below)
    message = f"{method}: {name} is {value}, expected {wanted}."
    raise ValueError(f"{message} {remedy}" if remedy else message)


def _describe_range(least: float, most: float, above: float | None, below: float | None) -> str:
    if above is None and below is None:
        if most == math.inf:
            return f"a number of at least {least:g}"
        return f"a number from {least:g} to {most:g}"
    if above == 0 and below is None and most == math.inf:
        return "a positive number"
    lower = f"at least {least:g}" if above is None else f"above {above:g}"
    upper = f"at most {most:g}" if below is None else f"below {below:g}"
    return f"{lower} and {upper}"


def check_float_params(params: chex.ArrayTree) -> None:
    """Check that parameters can be differentiated.

    Args:
        params: a pytree of arrays.

    Raises:
        TypeError: a leaf has an integer or boolean dtype; the message names it.

    Example:
        >>> check_float_params({"w": jnp.zeros(3, int)})
        Traceback (most recent call last):
            ...
        TypeError: params['w'] has dtype int32, expected floats. Cast it with .astype(jnp.float32).
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, expected "
                "floats. Cast it with .astype(jnp.float32)."
            )


def required_client_ids(method: str, cohort: Cohort) -> Int[Array, " participants"]:
    """Return the cohort's client ids, which a method with client state needs.

    Raises:
        ValueError: `cohort.client_ids` is None.
    """
    if cohort.client_ids is None:
        raise ValueError(
            f"{method}: cohort.client_ids is None, but {method} keeps state for each client. Set "
            "client_ids to each participant's index in the population, an integer array "
            "[participants], -1 where absent; fedpax.data.cohort_rounds sets it."
        )
    return jnp.asarray(cohort.client_ids)
