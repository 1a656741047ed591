"""Convert equations on the values of all participants to equations on one participant's slice.

Between a map and a reduction, programs have array code on placed values `[n, ...]`. The streaming
pass runs it in the loop over participants, on one participant's slice `[1, ...]`: the participants'
axis stays, with size 1. This is possible if the equation can be split along that axis
(`fedpax.transforms.unstack_rules`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import JaxprEqn, aval_of
from fedpax.transforms.unstack_rules import AxisMap, axis_maps

EqnParams = dict[str, Any]


class Unstacked(NamedTuple):
    """An equation on arrays that hold one participant."""

    eqn: JaxprEqn  # the equation on the values of all participants
    # parameters of the same primitive for arrays with a participants' axis of size 1
    params: EqnParams
    axes: AxisMap  # where the participants' axis lies in each operand and each result


def unstack(
    eqn: JaxprEqn,
    size: int,
    mesh_axis: str | None,
    known: Sequence[int | None],
    result_axis: int | None = None,
) -> Unstacked | None:
    """Return an equation on the slices of one participant, or None if it combines participants.

    Args:
        eqn: an equation.
        size: number of participants.
        mesh_axis: name of the explicit mesh axis that shards the participants' axis, or None.
        known: for each operand the participants' axis, or None if it is not known to have one.
        result_axis: the participants' axis of the results. Default None: follow from `known`.
    """
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
        (axis is None or aval_of(v).shape[axis] == size) and own in (None, axis)
        for v, axis, own in zip(eqn.invars, axes.operands, known, strict=True)
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
    """Return whether a sharding uses a mesh axis."""
    if mesh_axis is None or not isinstance(sharding, NamedSharding):
        return False
    entries = (e if isinstance(e, tuple) else (e,) for e in sharding.spec)
    return any(mesh_axis in entry for entry in entries)
