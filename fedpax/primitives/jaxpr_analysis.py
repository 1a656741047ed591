"""Analyses of jaxprs: dependencies, residuals, rematerialization."""

from collections.abc import Sequence
from typing import Any

from fedpax.primitives._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

# The names of the primitive of `jax.checkpoint`.
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
    """Map each residual to an input or output that already holds it.

    Args:
        jaxpr: its outputs are first `outputs` results, then the residuals.
        outputs: number of results.

    Returns:
        For each residual, `("argument", i)` or `("output", i)`, where outputs are counted after
        the redundant residuals are removed; and for each residual whether it must be returned as an
        extra output, because no input and no other output holds it.
    """
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


def is_rematerialized(jaxpr: ClosedJaxpr) -> bool:
    """Return whether a whole function is under `jax.checkpoint` without a policy."""
    eqns = jaxpr.jaxpr.eqns
    under = [_is_checkpoint(eqn) for eqn in eqns]
    # Under `jax.vmap`, values that are not batched are reshaped outside the checkpoint.
    rest = (eqn.primitive.name for eqn, own in zip(eqns, under, strict=True) if not own)
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
