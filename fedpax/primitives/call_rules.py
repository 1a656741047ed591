"""Rules of primitives that call a function given as a jaxpr: derivatives, batching and pruning."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.errors import ArgumentError
from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Primitive,
    Zero,
    context_of,
    define,
    evaluate,
    is_linear,
    is_zero,
    prune,
    read_atom,
    reads_axis_index,
    rebind,
    register_pruning,
    zero_tangent,
)
from fedpax.primitives.broadcast import federated_broadcast_p
from fedpax.primitives.jaxpr_analysis import (
    CHECKPOINT_PRIMITIVES,
    depends_on,
    inner_jaxprs,
    is_rematerialized,
    replace_jaxprs,
    residual_sources,
    strip_final,
)
from fedpax.primitives.layout import find_mesh, move_to_mesh
from fedpax.primitives.reduction import REDUCTIONS


def define_call(
    primitive: Primitive,
    *,
    inner_aval: Callable[..., Any],
    outer_aval: Callable[..., Any],
    batch_dim: int,
    implementation: Callable[..., list],
) -> None:
    """Register the rules of a primitive whose parameter `jaxpr` is the function that it calls."""

    def abstract(*avals, jaxpr, **others):
        return [outer_aval(a, **others) for a in jaxpr.out_avals], jaxpr.effects

    define(
        primitive,
        abstract=abstract,
        implementation=implementation,
        jvp=functools.partial(_jvp, primitive),
        transpose=functools.partial(_transpose, primitive, inner_aval),
        batch=functools.partial(_batch, primitive, inner_aval, batch_dim),
    )
    register_pruning(primitive)


def _select(items: Sequence, mask: Sequence[bool]) -> list:
    return [item for item, keep in zip(items, mask, strict=True) if keep]


def _merge(mask: Sequence[bool], where_true: Sequence, where_false: Sequence) -> list:
    yes, no = iter(where_true), iter(where_false)
    return [next(yes) if m else next(no) for m in mask]


def _trace(fn: Callable, avals: Sequence[Any]) -> ClosedJaxpr:
    # A custom derivative can close over arrays. They stay constants of the new jaxpr.
    return jax.make_jaxpr(fn)(*avals)


# ---- forward mode: one call returns outputs and residuals, a second call is linear in tangents


class _Linearized(NamedTuple):
    """The derivative of a function, in two parts."""

    # arguments -> outputs, then the residuals that are neither argument nor output
    primal: ClosedJaxpr
    linear: ClosedJaxpr  # residuals, then tangents -> tangents of the active outputs
    used: list[bool]
    sources: list[tuple[str, int]]  # for each residual the argument or output that holds it
    active: list[bool]


def _linearize(jaxpr: ClosedJaxpr, nonzero: Sequence[bool]) -> _Linearized:
    jaxpr = expand_custom_vmap(jaxpr)
    active = [
        varies and jnp.issubdtype(aval.dtype, jnp.inexact)
        for varies, aval in zip(depends_on(jaxpr, nonzero), jaxpr.out_avals, strict=True)
    ]
    trees: list[Any] = []
    residual_types: list[list[Any]] = []
    mesh = find_mesh(jaxpr.in_avals)
    run: Callable[..., list] = functools.partial(evaluate, jaxpr)
    if _rematerializes_maps(jaxpr):
        run = jax.checkpoint(run, prevent_cse=False, policy=_is_saveable)

    def primal(*args):
        fixed = _select(args, [not n for n in nonzero])

        def of_active(*active_args):
            outputs = run(*_merge(nonzero, active_args, fixed))
            return _select(outputs, active), _select(outputs, [not a for a in active])

        outputs, pushforward, others = jax.linearize(
            of_active, *_select(args, nonzero), has_aux=True
        )
        residuals, tree = jax.tree.flatten(pushforward)
        trees.append(tree)
        residual_types.append(list(map(jax.typeof, residuals)))
        # Inside `jax.sharding.auto_axes`, as in `jax.random.gamma`, residuals have another mesh.
        residuals = [move_to_mesh(r, mesh) for r in residuals]
        return [*_merge(active, outputs, others), *residuals]

    def linear(*residuals_and_tangents):
        tree = trees[-1]
        residuals = [
            move_to_mesh(r, aval.sharding.mesh)
            for r, aval in zip(residuals_and_tangents, residual_types[-1], strict=False)
        ]
        pushforward = tree.unflatten(residuals)
        return pushforward(*residuals_and_tangents[tree.num_leaves :])

    full = _trace(primal, jaxpr.in_avals)
    tangents = [a.to_tangent_aval() for a in _select(jaxpr.in_avals, nonzero)]
    # Saved, a residual that is a broadcast would take one copy per participant: recompute it.
    full, broadcasts = strip_final(full, len(active), federated_broadcast_p)

    def linear_from_server(*residuals_and_tangents):
        saved = zip(broadcasts, residuals_and_tangents, strict=False)
        residuals = [r if eqn is None else rebind(eqn, [r])[0] for eqn, r in saved]
        return linear(*residuals, *residuals_and_tangents[len(broadcasts) :])

    avals = [*full.out_avals[len(active) :], *tangents]
    sources, extra = residual_sources(full, len(active))
    pruned, used = prune(full, [*[True] * len(active), *extra])
    if is_rematerialized(jaxpr):  # its derivative is rematerialized too
        pruned = _trace(jax.checkpoint(functools.partial(evaluate, pruned)), pruned.in_avals)
    return _Linearized(pruned, _trace(linear_from_server, avals), used, sources, active)


def _rematerializes_maps(closed: ClosedJaxpr) -> bool:
    """Return whether the backward pass recomputes maps that the user put under `jax.checkpoint`."""
    # Not if effects would run twice, or if another map is inside of a `jax.checkpoint`.
    maps = list(_maps(closed.jaxpr))
    return any(is_map for is_map, _ in maps) and not (
        closed.effects or any(under_checkpoint for _, under_checkpoint in maps)
    )


def _maps(jaxpr: Jaxpr, under_checkpoint: bool = False) -> Iterator[tuple[bool, bool]]:
    """Yield for each map whether its function is a `jax.checkpoint`, and whether it is in one."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "federated_map" and is_rematerialized(eqn.params["jaxpr"]):
            yield True, under_checkpoint
            continue
        if eqn.primitive.name == "federated_map":
            yield False, under_checkpoint
        is_checkpoint = eqn.primitive.name in CHECKPOINT_PRIMITIVES and (
            eqn.params["policy"] is not _is_saveable
        )
        for inner in inner_jaxprs(eqn):
            yield from _maps(inner, under_checkpoint or is_checkpoint)


def _is_saveable(primitive: Primitive, *_: Any, **params: Any) -> bool:
    """Return whether the backward pass reads an equation's results, for `jax.checkpoint`."""
    # Saved are results of reductions, of maps that are not under `jax.checkpoint`, and of programs
    # without rematerialized maps that return placed values.
    if primitive.name == "federated_map":
        return not is_rematerialized(params["jaxpr"])
    if primitive.name == "federated_program":
        placed = {(placement.size,) for placement in params["placements"]}
        returned = {aval.shape[:1] for aval in params["jaxpr"].out_avals}
        return not (_rematerializes_maps(params["jaxpr"]) and placed & returned)
    return primitive in REDUCTIONS


def _jvp(primitive, primals, tangents, *, jaxpr, **others):
    nonzero = [not is_zero(t) for t in tangents]
    if not any(nonzero):
        outputs = primitive.bind(*primals, jaxpr=jaxpr, **others)
        return outputs, [zero_tangent(o) for o in outputs]
    primal, linear, used, sources, active = _linearize(jaxpr, nonzero)
    results = primitive.bind(*_select(primals, used), jaxpr=primal, **others)
    origin = {"argument": primals, "output": results}
    residuals = [origin[source][i] for source, i in sources]
    nonzero_out = primitive.bind(*residuals, *_select(tangents, nonzero), jaxpr=linear, **others)
    outputs = results[: len(active)]
    zero_out = [zero_tangent(o) for o in _select(outputs, [not a for a in active])]
    return outputs, _merge(active, nonzero_out, zero_out)


# ---- reverse mode


def _transpose(primitive, inner_aval, cotangents, *args, jaxpr, **others):
    linear = [is_linear(a) for a in args]
    present = [not is_zero(c) for c in cotangents]
    targets = [inner_aval(a.aval, **others) for a in _select(args, linear)]
    known = _select(args, [not m for m in linear])
    given = _select(cotangents, present)

    def transposed(*flat):
        fixed, arriving = flat[: len(known)], flat[len(known) :]

        def forward(*linear_args):
            return _select(evaluate(jaxpr, *_merge(linear, linear_args, fixed)), present)

        return list(jax.linear_transpose(forward, *targets)(list(arriving)))

    if not given:
        results: list = [Zero(a.aval) for a in _select(args, linear)]
    else:
        avals = [inner_aval(jax.typeof(a), **others) for a in (*known, *given)]
        try:
            transposed_jaxpr = _trace(transposed, avals)
        except ValueError as error:
            if not str(error).startswith("Reverse-mode differentiation does not work"):
                raise
            raise ArgumentError(
                f"Reverse-mode differentiation through a {primitive} whose function has a loop of "
                "variable length: JAX cannot transpose lax.while_loop. Local steps run in such a "
                "loop if the cohort has num_steps. Mark padding by a mask in place of num_steps, "
                "use lax.scan in a loop of your own, or differentiate in forward mode (jax.jvp)."
            ) from error
        results = primitive.bind(*known, *given, jaxpr=transposed_jaxpr, **others)
    return _merge(linear, results, [None] * len(known))


# ---- vmap


def _batch(primitive, inner_aval, batch_dim, axis, args, dims, *, jaxpr, **others):
    batched = [d is not None for d in dims]
    batch_at_dim = [
        a if d is None else jnp.moveaxis(a, d, batch_dim) for a, d in zip(args, dims, strict=True)
    ]
    indexed = reads_axis_index(jaxpr, axis.name)
    batched_out = [indexed or varies for varies in depends_on(jaxpr, batched)]
    mapped = jax.vmap(
        functools.partial(evaluate, jaxpr),
        in_axes=tuple(0 if b else None for b in batched),
        out_axes=[0 if b else None for b in batched_out],
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    avals = [inner_aval(jax.typeof(a), **others) for a in batch_at_dim]
    outputs = primitive.bind(*batch_at_dim, jaxpr=_trace(mapped, avals), **others)
    return outputs, [batch_dim if b else None for b in batched_out]


# JAX differentiates `custom_vmap` functions only by their batching rule, but a mapped function is
# differentiated before it is batched: each such call is batched over an axis of size 1 first.
CUSTOM_BATCHING = "custom_vmap_call"


def expand_custom_vmap(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replace calls with their own batching rule by the rule for a batch of one."""
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
            expand = functools.partial(_expand, run_call=run_call)
            params = {name: replace_jaxprs(expand, p) for name, p in eqn.params.items()}
            outputs = rebind(eqn, inputs, params)
        else:
            outputs = rebind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read_atom(v, values) for v in jaxpr.outvars]
