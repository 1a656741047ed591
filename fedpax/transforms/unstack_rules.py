"""Equations that do to each participant's slice what they do to the placed value.

Between a map and a reduction stands elementwise work: a delta is scaled, weights get axes to
broadcast along, a server's value is spread over them by NumPy's rules. Each rule here turns the
parameters of such an equation into those of the same equation on one participant's slices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import JaxprEqn, aval_of
from fedpax.primitives.broadcast import federated_broadcast_p

Params = dict[str, Any]

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    federated_mask floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min
    mul name ne neg nextafter not
    or population_count pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor
    """.split()
)


def unstack(
    eqn: JaxprEqn, participants: int, axis: str | None, placed: Sequence[bool]
) -> Params | None:
    """The parameters of an equation on slices, or None where it mixes participants.

    Args:
        eqn: an equation.
        participants: how many there are.
        axis: the mesh axis that types name for the first axis of placed values.
        placed: which of its operands are placed, with the participants along the first axis; the
            others are the server's, and fit if they are scalars or their first axis is of size 1.

    Returns:
        Parameters for the same primitive.
    """
    if eqn.effects or any(
        not p and aval_of(v).shape[:1] not in ((), (1,))
        for p, v in zip(placed, eqn.invars, strict=True)
    ):
        return None
    for v in eqn.outvars:
        if aval_of(v).shape[:1] != (participants,) or aval_of(v).sharding.spec[0] != axis:
            return None
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return eqn.params
    rule = RULES.get(name)
    return rule(eqn, participants) if rule is not None and aval_of(eqn.invars[0]).ndim else None


def adds_participant_axis(eqn: JaxprEqn) -> bool:
    """Whether an equation puts a new axis in front of a value, as giving it to everyone does."""
    if eqn.primitive.name == "broadcast_in_dim":
        return 0 not in eqn.params["broadcast_dimensions"]
    return eqn.primitive is federated_broadcast_p


def unstack_broadcast(eqn: JaxprEqn, participants: int, axis: str | None) -> Params | None:
    """The parameters of a `broadcast_in_dim` to all participants, for one of them, or None."""
    out = aval_of(eqn.outvars[0])
    fits = out.shape[:1] == (participants,) and eqn.primitive.name == "broadcast_in_dim"
    taken = axis is not None and axis in jax.tree.leaves(tuple(out.sharding.spec[1:]))
    return _one_slice(eqn) if fits and not taken else None


def _without_first(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


def _broadcast_in_dim(eqn: JaxprEqn, participants: int) -> Params | None:
    return None if adds_participant_axis(eqn) else _one_slice(eqn)


def _one_slice(eqn: JaxprEqn) -> Params:
    return eqn.params | {
        "shape": eqn.params["shape"][1:],
        "broadcast_dimensions": tuple(d - 1 for d in eqn.params["broadcast_dimensions"] if d),
        "sharding": _without_first(eqn.params["sharding"]),
    }


def _reshape(eqn: JaxprEqn, participants: int) -> Params | None:
    sizes, shape = eqn.params["new_sizes"], aval_of(eqn.invars[0]).shape
    if eqn.params["dimensions"] is not None or shape[0] != sizes[0]:
        return None
    return eqn.params | {
        "new_sizes": sizes[1:],
        "sharding": _without_first(eqn.params["sharding"]),
    }


def _transpose(eqn: JaxprEqn, participants: int) -> Params | None:
    first, *rest = eqn.params["permutation"]
    return None if first else eqn.params | {"permutation": tuple(d - 1 for d in rest)}


def _axes(name: str) -> Callable[[JaxprEqn, int], Params | None]:
    """A rule for equations that name the axes that they reduce or drop."""

    def rule(eqn: JaxprEqn, participants: int) -> Params | None:
        axes = eqn.params[name]
        if 0 in axes:
            return None
        changed = {name: tuple(a - 1 for a in axes)}
        if eqn.params.get("out_sharding") is not None:
            changed["out_sharding"] = _without_first(eqn.params["out_sharding"])
        return eqn.params | changed

    return rule


def _reshard(eqn: JaxprEqn, participants: int) -> Params | None:
    sharding = eqn.params["dst_sharding"]
    return eqn.params | {"dst_sharding": _without_first(sharding)}


RULES: dict[str, Callable[[JaxprEqn, int], Params | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "reshard": _reshard,
    "squeeze": _axes("dimensions"),
    "transpose": _transpose,
    **dict.fromkeys(
        ["reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"],
        _axes("axes"),
    ),
    **dict.fromkeys(["argmax", "argmin"], _axes("axes")),
}
