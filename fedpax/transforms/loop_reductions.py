"""The reductions over participants that a loop can accumulate.

These are the federated reductions, and the equations of `jax.numpy` code that combine the slices of
participants: sums, maxima and minima over the participants' axis, and matmuls and convolutions that
contract it. A weighted average written as `jnp.einsum("n,nij->ij", weights, delta)` is of this
kind, and so is the derivative of `delta @ w` with respect to a server value `w`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import JaxprEqn, aval_of, rebind
from fedpax.primitives.max_min import federated_max_p, federated_min_p
from fedpax.primitives.monoids import ADDITION, Monoid, accumulation_dtype
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS, Reduction
from fedpax.primitives.sum import federated_sum_p
from fedpax.transforms.unstack import unstack_reduction

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
    axes: tuple[int, ...]  # the participants' axis of each operand
    monoids: list[Monoid]  # how each total is combined
    # `(*operands) -> one term for each total`. The operands are slices, or have a participants'
    # axis of size 1.
    terms: Callable[..., list[jax.Array]]
    finish: Callable[[list[jax.Array]], list[jax.Array]]  # `(totals) -> results`
    # whether the operands of `terms` are slices, without the participants' axis
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
    own = REDUCTIONS[FEDERATED[name]]
    return LoopReduction(
        eqn,
        axes,
        [own.monoid],
        lambda *operands: own.terms(*rebind(eqn, operands)),
        lambda totals: [own.finish(totals, placement.size, dtype)[0].astype(dtype)],
    )


@functools.cache
def _as_calls(reduction: Reduction) -> Reduction:
    """Trace and lower the parts of a reduction once for each shape, and not for each leaf."""
    finish = jax.jit(reduction.finish, static_argnums=(1, 2))
    return reduction._replace(terms=jax.jit(reduction.terms), finish=finish)


def _federated(eqn: JaxprEqn, placement: Placement) -> LoopReduction:
    own, dtype = REDUCTIONS[eqn.primitive], aval_of(eqn.invars[0]).dtype
    if len(eqn.invars) > 1:
        own = _as_calls(own)
    return LoopReduction(
        eqn,
        (0,) * len(eqn.invars),
        [own.monoid] * len(eqn.invars),
        own.terms,
        lambda totals: own.finish(totals, placement.size, dtype),
        takes_slices=True,
    )
