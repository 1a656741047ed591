"""Results of a jaxpr that are 0 whatever its arguments are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedpax.primitives._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from fedpax.primitives.jaxpr_analysis import inner_jaxprs

# Results that are 0 where the first operand is, or where all operands are.
OF_FIRST = frozenset(
    "abs broadcast_in_dim convert_element_type copy div expand_dims integer_pow mul neg reduce_sum "
    "reshape sharding_constraint sign slice sqrt squeeze square stop_gradient transpose".split()
)
OF_ALL = frozenset("add add_any concatenate max min sub".split())


def zero_results(closed: ClosedJaxpr, zeros: Sequence[bool]) -> list[bool]:
    """Tell which results of a jaxpr are 0, given the arguments that are.

    A result is 0 if it is computed from zeros alone, by equations that keep them: no number is
    computed. False where this is not known.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x, y: (2 * x + 0, x * y, y))(1.0, 1.0)
        >>> zero_results(jaxpr, [True, False])
        [True, True, False]
    """
    jaxpr = closed.jaxpr
    known = {v for v, is_zero in zip(jaxpr.invars, zeros, strict=True) if is_zero}

    def is_zero(v: Var | Literal) -> bool:
        return bool(np.all(np.asarray(v.val) == 0)) if isinstance(v, Literal) else v in known

    for eqn in jaxpr.eqns:
        zero_outputs = _zero_outputs(eqn, [is_zero(v) for v in eqn.invars])
        known.update(v for v, is_known in zip(eqn.outvars, zero_outputs, strict=True) if is_known)
    return [is_zero(v) for v in jaxpr.outvars]


def _zero_outputs(eqn: JaxprEqn, zeros: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name in OF_FIRST and zeros[0]:
        return [True]
    if name == "mul":
        return [any(zeros)]
    if name in OF_ALL:
        return [all(zeros)]
    if name == "select_n":
        return [all(zeros[1:])]
    if name == "cond":
        branches = [zero_results(branch, zeros[1:]) for branch in eqn.params["branches"]]
        return [all(in_branches) for in_branches in zip(*branches, strict=True)]
    bodies = inner_jaxprs(eqn)
    if name in ("jit", "pjit", "closed_call") and len(bodies[0].invars) == len(zeros):
        return zero_results(ClosedJaxpr(bodies[0], ()), zeros)
    return [False] * len(eqn.outvars)
