"""Primitives that hold a function as a jaxpr: derivatives, batching and pruning of such a call.

`federated_map` and `federated_program` differ in one thing: the first runs its function once for
each participant, on slices. So each rule makes a new jaxpr out of the one at hand, and binds the
same primitive with it: the derivative of a map is two maps, that of a program two programs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    CHECKPOINT_PRIMITIVES,
    ClosedJaxpr,
    Jaxpr,
    Primitive,
    Zero,
    define,
    depends_on,
    evaluate,
    inner_jaxprs,
    is_linear,
    is_rematerialized,
    is_zero,
    prune,
    reads_axis_index,
    rebind,
    register_pruning,
    residual_sources,
    strip_final,
    zero_tangent,
)
from fedpax.primitives.broadcast import federated_broadcast_p
from fedpax.primitives.reduction import REDUCTIONS


def define_call(
    primitive: Primitive,
    *,
    inner: Callable[..., Any],
    outer: Callable[..., Any],
    batch_dim: int,
    implementation: Callable[..., list],
) -> None:
    """Registers the rules of a primitive whose parameter `jaxpr` is the function that it calls.

    Args:
        primitive: gives several results; its parameters are `jaxpr` and others, passed on.
        inner: `(aval of an argument, **others) -> aval` that the function sees.
        outer: `(aval that the function returns, **others) -> aval` of the result.
        batch_dim: where the batch axis stands in arguments and results.
        implementation: `(*args, jaxpr, **others) -> results`.
    """

    def abstract(*avals, jaxpr, **others):
        return [outer(a, **others) for a in jaxpr.out_avals], jaxpr.effects

    define(
        primitive,
        abstract=abstract,
        implementation=implementation,
        jvp=functools.partial(_jvp, primitive),
        transpose=functools.partial(_transpose, primitive, inner),
        batch=functools.partial(_batch, primitive, inner, batch_dim),
    )
    register_pruning(primitive)


def _select(items: Sequence, mask: Sequence[bool]) -> list:
    return [item for item, keep in zip(items, mask, strict=True) if keep]


def _merge(mask: Sequence[bool], where_true: Sequence, where_false: Sequence) -> list:
    yes, no = iter(where_true), iter(where_false)
    return [next(yes) if m else next(no) for m in mask]


def _retrace(fn: Callable, avals: Sequence[Any]) -> ClosedJaxpr:
    # A custom derivative may bring arrays of its own: they stay constants of the new jaxpr.
    return jax.make_jaxpr(fn)(*avals)


# ---- forward mode: one call returns outputs and residuals, a second is linear in the tangents


class _Linearized(NamedTuple):
    primal: ClosedJaxpr  # arguments -> outputs, and the residuals that are neither of both
    linear: ClosedJaxpr  # residuals and tangents -> tangents of the outputs that have any
    used: list[bool]  # which arguments `primal` takes
    sources: list[tuple[str, int]]  # where each residual comes from: an argument or an output
    active: list[bool]  # which outputs have a tangent


def _linearize(jaxpr: ClosedJaxpr, nonzero: Sequence[bool]) -> _Linearized:
    active = [
        moves and jnp.issubdtype(aval.dtype, jnp.inexact)
        for moves, aval in zip(depends_on(jaxpr, nonzero), jaxpr.out_avals, strict=True)
    ]
    trees: list[Any] = []
    run: Callable[..., list] = functools.partial(evaluate, jaxpr)
    if _repeats_maps(jaxpr):
        run = jax.checkpoint(run, prevent_cse=False, policy=_is_kept)

    def primal(*args):
        fixed = _select(args, [not n for n in nonzero])

        def moving(*moved):
            outputs = run(*_merge(nonzero, moved, fixed))
            return _select(outputs, active), _select(outputs, [not a for a in active])

        outputs, pushforward, others = jax.linearize(moving, *_select(args, nonzero), has_aux=True)
        residuals, tree = jax.tree.flatten(pushforward)
        trees.append(tree)
        return [*_merge(active, outputs, others), *residuals]

    def linear(*residuals_and_tangents):
        tree = trees[-1]
        pushforward = tree.unflatten(residuals_and_tangents[: tree.num_leaves])
        return pushforward(*residuals_and_tangents[tree.num_leaves :])

    full = _retrace(primal, jaxpr.in_avals)
    tangents = [a.to_tangent_aval() for a in _select(jaxpr.in_avals, nonzero)]
    # A broadcast is done again, from the server's value: kept, it would be a copy for everyone.
    full, repeats = strip_final(full, len(active), federated_broadcast_p)

    def from_server(*residuals_and_tangents):
        kept = zip(repeats, residuals_and_tangents, strict=False)
        residuals = [r if eqn is None else rebind(eqn, [r])[0] for eqn, r in kept]
        return linear(*residuals, *residuals_and_tangents[len(repeats) :])

    avals = [*full.out_avals[len(active) :], *tangents]
    sources, extra = residual_sources(full, len(active))
    pruned, used = prune(full, [*[True] * len(active), *extra])
    if is_rematerialized(jaxpr):  # and stays so, whatever is done to it
        pruned = _retrace(jax.checkpoint(functools.partial(evaluate, pruned)), pruned.in_avals)
    return _Linearized(pruned, _retrace(from_server, avals), used, sources, active)


def _repeats_maps(closed: ClosedJaxpr) -> bool:
    """Whether a function has maps under `jax.checkpoint`: what they return is computed again.

    Not so where it has effects, which would be repeated too, and where other maps stand under a
    `jax.checkpoint` of the program's own: what these keep is the user's choice.
    """
    maps = list(_maps(closed.jaxpr))
    return any(own for own, _ in maps) and not (closed.effects or any(around for _, around in maps))


def _maps(jaxpr: Jaxpr, around: bool = False) -> Iterator[tuple[bool, bool]]:
    """For each map whether it is under `jax.checkpoint`, and whether there is one around it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "federated_map" and is_rematerialized(eqn.params["jaxpr"]):
            yield True, around
            continue
        if eqn.primitive.name == "federated_map":
            yield False, around
        own = eqn.primitive.name in CHECKPOINT_PRIMITIVES and eqn.params["policy"] is not _is_kept
        for inner in inner_jaxprs(eqn):
            yield from _maps(inner, around or own)


def _is_kept(primitive: Primitive, *_: Any, **params: Any) -> bool:
    """What the derivative of such a function keeps: its totals, and what other maps return."""
    if primitive.name == "federated_map":
        return not is_rematerialized(params["jaxpr"])
    if primitive.name == "federated_program":
        placed = {(placement.size,) for placement in params["placements"]}
        returned = {aval.shape[:1] for aval in params["jaxpr"].out_avals}
        return not (_repeats_maps(params["jaxpr"]) and placed & returned)
    return primitive in REDUCTIONS


def _jvp(primitive, primals, tangents, *, jaxpr, **others):
    nonzero = [not is_zero(t) for t in tangents]
    if not any(nonzero):
        outputs = primitive.bind(*primals, jaxpr=jaxpr, **others)
        return outputs, [zero_tangent(o) for o in outputs]
    primal, linear, used, sources, active = _linearize(jaxpr, nonzero)
    results = primitive.bind(*_select(primals, used), jaxpr=primal, **others)
    origin = {"argument": primals, "output": results}
    residuals = [origin[kind][i] for kind, i in sources]
    moved = primitive.bind(*residuals, *_select(tangents, nonzero), jaxpr=linear, **others)
    outputs = results[: len(active)]
    still = [zero_tangent(o) for o in _select(outputs, [not a for a in active])]
    return outputs, _merge(active, moved, still)


# ---- reverse mode


def _transpose(primitive, inner, cotangents, *args, jaxpr, **others):
    linear = [is_linear(a) for a in args]
    present = [not is_zero(c) for c in cotangents]
    targets = [inner(a.aval, **others) for a in _select(args, linear)]
    known = _select(args, [not m for m in linear])
    given = _select(cotangents, present)

    def transposed(*flat):
        fixed, arriving = flat[: len(known)], flat[len(known) :]

        def forward(*moved):
            return _select(evaluate(jaxpr, *_merge(linear, moved, fixed)), present)

        return list(jax.linear_transpose(forward, *targets)(list(arriving)))

    if not given:
        results: list = [Zero(a.aval) for a in _select(args, linear)]
    else:
        avals = [inner(jax.typeof(a), **others) for a in (*known, *given)]
        results = primitive.bind(*known, *given, jaxpr=_retrace(transposed, avals), **others)
    return _merge(linear, results, [None] * len(known))


# ---- vmap


def _batch(primitive, inner, batch_dim, axis, args, dims, *, jaxpr, **others):
    batched = [d is not None for d in dims]
    moved = [
        a if d is None else jnp.moveaxis(a, d, batch_dim) for a, d in zip(args, dims, strict=True)
    ]
    indexed = reads_axis_index(jaxpr, axis.name)
    batched_out = [indexed or moves for moves in depends_on(jaxpr, batched)]
    mapped = jax.vmap(
        functools.partial(evaluate, jaxpr),
        in_axes=tuple(0 if b else None for b in batched),
        out_axes=[0 if b else None for b in batched_out],
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    avals = [inner(jax.typeof(a), **others) for a in moved]
    outputs = primitive.bind(*moved, jaxpr=_retrace(mapped, avals), **others)
    return outputs, [batch_dim if b else None for b in batched_out]
