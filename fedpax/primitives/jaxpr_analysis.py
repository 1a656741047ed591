"""Analyses of jaxprs: dependencies, residuals, rematerialization."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedpax.primitives._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, aval_of

CHECKPOINT_PRIMITIVES = ("checkpoint", "remat2")

# Equations that change the shape or layout of a value and compute nothing.
SHAPE_PRIMITIVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])


def depends_on(jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return for each output whether it may depend on an input that `inputs` marks."""
    marked = {v for v, mark in zip(jaxpr.jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.jaxpr.eqns:
        if any(v in marked for v in eqn.invars if not isinstance(v, Literal)):
            marked.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.jaxpr.outvars]


def residual_sources(jaxpr: ClosedJaxpr, outputs: int) -> tuple[list[tuple[str, int]], list[bool]]:
    """Map each residual to an input or output that already holds it."""
    source_of: dict[Any, tuple[str, int]] = {}
    for i, v in enumerate(jaxpr.jaxpr.outvars[:outputs]):
        if not isinstance(v, Literal):
            source_of.setdefault(v, ("output", i))
    for i, v in enumerate(jaxpr.jaxpr.invars):
        source_of[v] = ("argument", i)
    sources, extra = [], []
    for v in jaxpr.jaxpr.outvars[outputs:]:
        known = None if isinstance(v, Literal) else source_of.get(v)
        extra.append(known is None)
        sources.append(known or ("output", outputs + sum(extra[:-1])))
        if not isinstance(v, Literal):
            source_of.setdefault(v, sources[-1])
    return sources, extra


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among an equation's parameters."""
    jaxprs = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                jaxprs.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                jaxprs.append(item)
    return jaxprs


def all_eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr, each before the equations of its own jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_eqns(inner)


def replace_jaxprs(change: Callable[[ClosedJaxpr], ClosedJaxpr], param: Any) -> Any:
    """Apply a function to the jaxprs in a parameter of a loop or a conditional."""
    if isinstance(param, ClosedJaxpr):
        return change(param)
    if isinstance(param, Jaxpr):
        return change(ClosedJaxpr(param, ())).jaxpr
    if type(param) in (tuple, list):
        return type(param)(replace_jaxprs(change, p) for p in param)
    return param


def is_rematerialized(jaxpr: ClosedJaxpr) -> bool:
    """Return whether a whole function is under `jax.checkpoint` without a policy."""
    eqns = jaxpr.jaxpr.eqns
    under = [_is_checkpoint(eqn) for eqn in eqns]
    # Under `jax.vmap`, values that are not batched are reshaped outside the checkpoint.
    rest = (eqn.primitive.name for eqn, is_under in zip(eqns, under, strict=True) if not is_under)
    return any(under) and SHAPE_PRIMITIVES.issuperset(rest) and not jaxpr.effects


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls a function under `jax.checkpoint` without a policy."""
    if eqn.primitive.name == "jit":
        return is_rematerialized(eqn.params["jaxpr"])
    return eqn.primitive.name in CHECKPOINT_PRIMITIVES and eqn.params["policy"] is None


def strip_final(
    jaxpr: ClosedJaxpr, outputs: int, primitive: Primitive
) -> tuple[ClosedJaxpr, list[JaxprEqn | None]]:
    """Remove a primitive where it computes an output after the first `outputs` directly."""
    # Returns the jaxpr, with the primitive's argument as the output, and for each output after the
    # first `outputs` the removed equation or None.
    makers = {e.outvars[0]: e for e in jaxpr.jaxpr.eqns if e.primitive is primitive}
    changed, removed = list(jaxpr.jaxpr.outvars), []
    for i, v in enumerate(jaxpr.jaxpr.outvars[outputs:], outputs):
        eqn = None if isinstance(v, Literal) else makers.get(v)
        removed.append(eqn)
        changed[i] = v if eqn is None else eqn.invars[0]
    return ClosedJaxpr(jaxpr.jaxpr.replace(outvars=changed), jaxpr.consts), removed


# ---- results of a jaxpr that are 0 whatever its arguments are

# Results that are 0 where the first operand is, or where all operands are.
OF_FIRST = frozenset(
    "abs broadcast_in_dim convert_element_type copy div expand_dims integer_pow mul neg reduce_sum "
    "reshape sharding_constraint sign slice sqrt squeeze square stop_gradient transpose".split()
)
OF_ALL = frozenset("add add_any concatenate max min sub".split())


def zero_results(closed: ClosedJaxpr, zeros: Sequence[bool]) -> list[bool]:
    """Tell which results of a jaxpr are 0, given the arguments that are; False if not known."""
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


def peak_live_bytes(jaxpr: Jaxpr) -> int:
    """Compute the peak of live bytes, equation by equation: an upper estimate, without fusion."""
    last_use: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last_use.update({v: i for v in eqn.invars if isinstance(v, Var)})
    last_use.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)})
    alive = {v: num_bytes(v) for v in (*jaxpr.constvars, *jaxpr.invars) if v in last_use}
    current = peak = sum(alive.values())
    for i, eqn in enumerate(jaxpr.eqns):
        results = {v: num_bytes(v) for v in eqn.outvars}
        current += sum(results.values())
        peak = max(peak, current + _inner_peak(eqn))
        alive |= results
        for v in {v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var)}:
            if last_use.get(v, i) == i:
                current -= alive.pop(v, 0)
    return peak


def num_bytes(v: Var | Literal) -> int:
    """Compute the size of a value in bytes."""
    aval = aval_of(v)
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _inner_peak(eqn: JaxprEqn) -> int:
    """Compute the bytes that an equation's inner jaxprs need beyond its arguments and results."""
    outside = sum(map(num_bytes, (*eqn.invars, *eqn.outvars)))
    return max((max(0, peak_live_bytes(inner) - outside) for inner in inner_jaxprs(eqn)), default=0)
