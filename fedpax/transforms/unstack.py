"""Convert equations on the values of all participants to equations on one participant's slice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import JaxprEqn, aval_of, rebind
from fedpax.primitives.max_min import federated_max_p, federated_min_p
from fedpax.primitives.monoids import ADDITION, Monoid, accumulation_dtype
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.sum import federated_sum_p
from fedpax.transforms.unstack_rules import AxisMap, axis_maps

EqnParams = dict[str, Any]


class Unstacked(NamedTuple):
    """An equation on arrays that hold one participant."""

    eqn: JaxprEqn  # on the values of all participants
    # parameters of the same primitive for arrays with a participants' axis of size 1
    params: EqnParams
    axes: AxisMap


def unstack(
    eqn: JaxprEqn,
    size: int,
    mesh_axis: str | None,
    known: Sequence[int | None],
    result_axis: int | None = None,
) -> Unstacked | None:
    """Return an equation on the slices of one participant, or None if it combines participants."""
    if eqn.effects:
        return None
    for axes in axis_maps(eqn):
        if _matches(eqn, axes, size, known) and all(
            axis is not None
            and result_axis in (None, axis)
            and aval_of(v).shape[axis] == size
            and aval_of(v).sharding.spec[axis] == mesh_axis
            for v, axis in zip(eqn.outvars, axes.results, strict=True)
        ):
            return Unstacked(eqn, _params_of_one(eqn, axes), axes)
    return None


def unstack_reduction(
    eqn: JaxprEqn, size: int, mesh_axis: str | None, known: Sequence[int | None]
) -> Unstacked | None:
    """Return an equation that combines participants, on the slices of one of them, or None."""
    # Its results, combined over the participants, equal the results of `eqn`.
    if eqn.effects:
        return None
    for axes in axis_maps(eqn):
        if (
            _matches(eqn, axes, size, known)
            and axes.results == (None,) * len(eqn.outvars)
            and not _names(eqn.params.get("out_sharding"), mesh_axis)
        ):
            return Unstacked(eqn, eqn.params, axes)
    return None


def _matches(eqn: JaxprEqn, axes: AxisMap, size: int, known: Sequence[int | None]) -> bool:
    return all(
        (axis is None or aval_of(v).shape[axis] == size) and known_axis in (None, axis)
        for v, axis, known_axis in zip(eqn.invars, axes.operands, known, strict=True)
    )


# Parameters that hold the sizes of axes: of the first operand, or of the result.
OPERAND_SIZES = {
    "dynamic_slice": "slice_sizes",
    "gather": "slice_sizes",
    "slice": "limit_indices",
}
RESULT_SIZES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
SHARDINGS = ("sharding", "out_sharding", "dst_sharding")


def _params_of_one(eqn: JaxprEqn, axes: AxisMap) -> EqnParams:
    params, name, result = dict(eqn.params), eqn.primitive.name, axes.results[0]
    if name in OPERAND_SIZES and axes.operands[0] is not None:
        params[OPERAND_SIZES[name]] = _replaced(params[OPERAND_SIZES[name]], axes.operands[0], 1)
    if name in RESULT_SIZES:
        params[RESULT_SIZES[name]] = _replaced(params[RESULT_SIZES[name]], result, 1)
    for key in SHARDINGS:
        sharding = params.get(key)
        if isinstance(sharding, NamedSharding):
            entries = (*sharding.spec, *[None] * (aval_of(eqn.outvars[0]).ndim))
            spec = P(*_replaced(entries, result, None)[: aval_of(eqn.outvars[0]).ndim])
            params[key] = NamedSharding(sharding.mesh, spec)
    return params


def _replaced(values: Sequence[Any], index: int | None, value: Any) -> tuple:
    return tuple(value if i == index else v for i, v in enumerate(values))


def _names(sharding: Any, mesh_axis: str | None) -> bool:
    if mesh_axis is None or not isinstance(sharding, NamedSharding):
        return False
    entries = (e if isinstance(e, tuple) else (e,) for e in sharding.spec)
    return any(mesh_axis in entry for entry in entries)


# ---- the reductions over participants that a loop can accumulate
#
# Also of `jax.numpy`: a weighted average `jnp.einsum("n,nij->ij", weights, delta)`, and the
# derivative of `delta @ w` with respect to a server value `w`.

FEDERATED = {
    "reduce_sum": federated_sum_p,
    "reduce_max": federated_max_p,
    "reduce_min": federated_min_p,
    "reduce_or": federated_max_p,
    "reduce_and": federated_min_p,
}
CONTRACTIONS = ("dot_general", "conv_general_dilated")


class LoopReduction(NamedTuple):
    """A reduction in the parts that a loop over participants needs."""

    eqn: JaxprEqn  # the equation
    axes: tuple[int, ...]  # of each operand
    monoids: list[Monoid]
    # `(*operands) -> one term for each total`, of slices, or with a participants' axis of size 1
    terms: Callable[..., list[jax.Array]]
    finish: Callable[[list[jax.Array]], list[jax.Array]]  # `(totals) -> results`
    takes_slices: bool = False


def loop_reduction(
    eqn: JaxprEqn, placement: Placement, mesh_axis: str | None, known: Sequence[int | None]
) -> LoopReduction | None:
    """Return the parts of an equation that reduces over the participants, or None."""
    # `known` has the participants' axis of each operand, or None; `mesh_axis` is an explicit axis
    # that shards it.
    if eqn.primitive in REDUCTIONS:
        return _federated(eqn, placement) if eqn.params["placement"] == placement else None
    if all(axis is None for axis in known):
        return None
    unstacked = unstack_reduction(eqn, placement.size, mesh_axis, known)
    if unstacked is None or None in unstacked.axes.operands:
        return None
    axes = tuple(axis for axis in unstacked.axes.operands if axis is not None)
    dtype, name = aval_of(eqn.outvars[0]).dtype, eqn.primitive.name
    if name in CONTRACTIONS:
        wide = accumulation_dtype(dtype)
        params = unstacked.params | {"preferred_element_type": wide}
        return LoopReduction(
            eqn,
            axes,
            [ADDITION],
            lambda *operands: rebind(eqn, operands, params),
            lambda totals: [totals[0].astype(dtype)],
        )
    if name in ("reduce_or", "reduce_and") and dtype != jnp.bool_:
        return None
    monoid = REDUCTIONS[FEDERATED[name]]
    return LoopReduction(
        eqn,
        axes,
        [monoid.monoid],
        lambda *operands: monoid.terms(*rebind(eqn, operands)),
        lambda totals: [monoid.finish(totals, placement.size, dtype)[0].astype(dtype)],
    )


@functools.cache
def _as_call(finish: Callable) -> Callable:
    """Trace and lower the end of a reduction once for each shape, and not for each leaf."""
    return jax.jit(finish, static_argnums=(1, 2))


def _federated(eqn: JaxprEqn, placement: Placement) -> LoopReduction:
    monoid, dtype = REDUCTIONS[eqn.primitive], aval_of(eqn.invars[0]).dtype
    finish = _as_call(monoid.finish) if len(eqn.invars) > 1 else monoid.finish
    return LoopReduction(
        eqn,
        (0,) * len(eqn.invars),
        [monoid.monoid] * len(eqn.invars),
        monoid.terms,
        lambda totals: finish(totals, placement.size, dtype),
        takes_slices=True,
    )
