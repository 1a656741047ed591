"""Give the sorts of an exported function unique keys, for runtimes whose sort is not stable.

IREE 3.13.0 drops `is_stable`: its bubble sort swaps each pair for which the comparison is false,
and equal keys are such a pair.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import ClosedJaxpr, JaxprEqn, evaluate, read_atom, rebind
from fedpax.primitives.jaxpr_analysis import all_eqns, replace_jaxprs


def with_unique_keys(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Sort equal keys by their places, in each stable sort of a function of arrays."""

    @functools.wraps(fn)
    def function(*args: Any) -> list[Any]:
        return evaluate(_rewrite(jax.make_jaxpr(fn)(*args)), *args)

    return function


def _rewrite(closed: ClosedJaxpr) -> ClosedJaxpr:
    if not any(map(_is_sort, all_eqns(closed.jaxpr))):
        return closed

    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        given = (*closed.consts, *args)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        for eqn in jaxpr.eqns:
            inputs = [read_atom(v, values) for v in eqn.invars]
            outputs = _sort(eqn, inputs) if _is_sort(eqn) else _rebind(eqn, inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read_atom(v, values) for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(*closed.in_avals)


def _is_sort(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a stable sort that moves other values with its keys."""
    is_stable = eqn.primitive is jax.lax.sort_p and eqn.params["is_stable"]
    return is_stable and eqn.params["num_keys"] < len(eqn.invars)


def _sort(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    last = eqn.params["num_keys"]
    places = jax.lax.broadcasted_iota(jnp.int32, inputs[0].shape, eqn.params["dimension"])
    given = [*inputs[:last], places, *inputs[last:]]
    outputs = rebind(eqn, given, eqn.params | {"num_keys": last + 1})
    return [*outputs[:last], *outputs[last + 1 :]]


def _rebind(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    return rebind(eqn, inputs, {k: replace_jaxprs(_rewrite, v) for k, v in eqn.params.items()})
