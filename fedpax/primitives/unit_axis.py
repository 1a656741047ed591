"""Compute the end of one participant's step on arrays `[1, ...]`.

The new state takes the donated old one's buffers. If the axis is removed and added again, XLA on
CPU fuses both reshapes into the optimizer, computes it twice, and copies the state.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, aval_of
from fedpax.primitives.layout import has_own_shardings

ARITHMETIC = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg
    nextafter not or polygamma population_count pow real reciprocal reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """.split()
)
"""Elementwise primitives without a shape among their parameters."""

SAME_SHAPES = frozenset({"clamp", "select_n"})
"""Elementwise primitives that take no scalar literal beside an array `[1]`."""


class _Held(NamedTuple):
    """A value of the participant, or the array `[1, ...]` that holds it."""

    array: Any
    has_axis: bool

    def own(self) -> Any:
        return jax.lax.squeeze(self.array, [0]) if self.has_axis else self.array

    def row(self) -> Any:
        return self.array if self.has_axis else jnp.expand_dims(self.array, 0)


def keep_unit_axis(jaxpr: ClosedJaxpr, placed: Sequence[bool], stacked: int) -> ClosedJaxpr:
    """Return a participant's function as a function of arrays with a leading axis of size 1."""
    wanted = [i < stacked for i in range(len(jaxpr.out_avals))]

    def run(*args: Any) -> list[Any]:
        outputs = _run(jaxpr, list(map(_Held, args, placed)), wanted)
        return [x.row() if w else x.own() for x, w in zip(outputs, wanted, strict=True)]

    types = [
        _with_axis(aval) if p else aval for aval, p in zip(jaxpr.in_avals, placed, strict=True)
    ]
    return jax.make_jaxpr(run)(*types)


def _with_axis(aval: Any) -> Any:
    sharding = aval.sharding.update(spec=P(None, *aval.sharding.spec))
    return aval.update(shape=(1, *aval.shape), sharding=sharding)


def _run(closed: ClosedJaxpr, args: Sequence[_Held], wanted: Sequence[bool]) -> list[_Held]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.invars, args, strict=True))
    values |= {v: _Held(c, False) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    leads_to_wanted = _elementwise_sources(jaxpr, wanted)

    def read(v: Var | Literal) -> _Held:
        return _Held(v.val, False) if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        leads = [v in leads_to_wanted for v in eqn.outvars]
        keeps = any(leads) and any(value.has_axis for value in inputs)
        body = _jitted(eqn)
        if keeps and body is not None:
            with jax.named_scope(
                f"{eqn.source_info.name_stack}/jit({eqn.params['name']})".lstrip("/")
            ):
                outputs = _run(body, inputs, leads)
        else:
            keeps = keeps and _is_elementwise(eqn)
            operands = [
                value.row() if keeps and _has_result_shape(v, eqn) else value.own()
                for v, value in zip(eqn.invars, inputs, strict=True)
            ]
            outputs = [_Held(x, keeps) for x in _evaluate(jaxpr, eqn, operands)]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _evaluate(jaxpr: Jaxpr, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, under the names and lines that profiles show."""
    given = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(given),
        outvars=eqn.outvars,
        eqns=[eqn],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jax.core.eval_jaxpr(alone, (), *given.values())


def _elementwise_sources(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Var]:
    """Return the values from which wanted results follow by elementwise equations alone."""
    reached = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        leads = [v in reached for v in eqn.outvars]
        if not any(leads):
            continue
        body = _jitted(eqn)
        if body is not None:
            inner = _elementwise_sources(body.jaxpr, leads)
            sources = [v in inner for v in body.jaxpr.invars]
        else:
            elementwise = _is_elementwise(eqn)
            sources = [elementwise and _has_result_shape(v, eqn) for v in eqn.invars]
        reached.update(
            v for v, s in zip(eqn.invars, sources, strict=True) if s and isinstance(v, Var)
        )
    return reached


def _jitted(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the function of a `jax.jit` without shardings of its own."""
    return (
        eqn.params["jaxpr"] if eqn.primitive.name == "jit" and not has_own_shardings(eqn) else None
    )


def _is_elementwise(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ARITHMETIC or eqn.params.get("sharding") is not None:
        return False
    if eqn.primitive.name in SAME_SHAPES and any(isinstance(v, Literal) for v in eqn.invars):
        return False
    return all(_has_result_shape(v, eqn) or aval_of(v).shape == () for v in eqn.invars)


def _has_result_shape(v: Var | Literal, eqn: JaxprEqn) -> bool:
    """Return whether an operand has the shape of the result; scalar literals fit any shape."""
    return not isinstance(v, Literal) and aval_of(v).shape == aval_of(eqn.outvars[0]).shape
