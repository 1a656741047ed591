"""Expand calls of `custom_vmap` functions, so that they can be differentiated.

JAX differentiates `jax.custom_batching.custom_vmap` functions only after they are batched: then the
batching rule has replaced the function. A mapped function is differentiated before it is batched.
So each such call is batched over an axis of size 1 first, and the derivative is the rule's
derivative, as in `jax.grad(jax.vmap(f))`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    context_of,
    evaluate,
    read_atom,
    rebind,
)
from fedpax.primitives.jaxpr_analysis import inner_jaxprs

CUSTOM_BATCHING = "custom_vmap_call"


def expand_custom_vmap(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replace calls with a batching rule of their own by the rule for a batch of one."""
    # A rule that calls the function again, as `sequential_vmap` does, runs it without its rule.
    return _expand(closed, _run_rule)


def _expand(closed: ClosedJaxpr, run_call: Callable[..., list]) -> ClosedJaxpr:
    if not _has_batch_rule(closed.jaxpr):
        return closed
    return jax.make_jaxpr(functools.partial(_run, closed, run_call))(*closed.in_avals)


def _has_batch_rule(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name == CUSTOM_BATCHING or any(map(_has_batch_rule, _inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    custom_derivative = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
    return [] if custom_derivative else inner_jaxprs(eqn)


def _run_rule(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Run the rule of a call for a batch of one."""
    if not inputs:
        return _run_function(eqn, inputs)
    batch = [jnp.expand_dims(x, 0) for x in inputs]
    rule = jax.make_jaxpr(jax.vmap(lambda *xs: rebind(eqn, xs)))(*map(jax.typeof, batch))
    return [jax.lax.squeeze(x, [0]) for x in evaluate(_expand(rule, _run_function), *batch)]


def _run_function(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Run the function of a call without its rule."""
    return evaluate(_expand(eqn.params["call"], _run_function), *inputs)


def _run(closed: ClosedJaxpr, run_call: Callable[..., list], *args: Any) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [read_atom(v, values) for v in eqn.invars]
        if eqn.primitive.name == CUSTOM_BATCHING:
            with context_of(eqn):
                outputs = run_call(eqn, inputs)
        elif any(map(_has_batch_rule, _inner_jaxprs(eqn))):
            params = {name: _expand_param(p, run_call) for name, p in eqn.params.items()}
            outputs = rebind(eqn, inputs, params)
        else:
            outputs = rebind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read_atom(v, values) for v in jaxpr.outvars]


def _expand_param(param: Any, run_call: Callable[..., list]) -> Any:
    """Expand the calls in the jaxprs among an equation's parameters."""
    if isinstance(param, ClosedJaxpr):
        return _expand(param, run_call)
    if isinstance(param, Jaxpr):
        return _expand(ClosedJaxpr(param, ()), run_call).jaxpr
    if type(param) in (tuple, list):
        return type(param)(_expand_param(p, run_call) for p in param)
    return param
