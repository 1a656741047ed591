"""The equations of a jaxpr that compute some of its values from others."""

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    read_atom,
    rebind,
)
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
from fedpax.primitives.map import federated_map_p
from fedpax.transforms.inlining import called_jaxpr
from fedpax.transforms.streaming_plan import Atom


def needed(
    closed: ClosedJaxpr,
    outputs: Iterable[Atom],
    known: Container[Var],
    *,
    with_effects: bool = False,
) -> tuple[list[JaxprEqn], set[Var]]:
    """Return the equations that compute values from known ones, and the arguments they need."""
    wanted = {v for v in outputs if isinstance(v, Var) and v not in known}
    eqns = []
    for eqn in reversed(closed.jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars) and not (with_effects and eqn.effects):
            continue
        eqns.append(eqn)
        wanted.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
    return eqns[::-1], wanted.intersection(closed.jaxpr.invars)


def evaluate_from(
    closed: ClosedJaxpr, known: Mapping[Var, Any], outputs: Iterable[Atom]
) -> list[Any]:
    """Compute values of a jaxpr from known ones."""
    outputs = list(outputs)
    eqns, _ = needed(closed, outputs, known)
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | dict(known)
    for eqn in eqns:
        results = rebind(eqn, [read_atom(v, values) for v in eqn.invars])
        values |= {v: x for v, x in zip(eqn.outvars, results, strict=True) if v not in values}
    return [read_atom(v, values) for v in outputs]


# ---- values of a jaxpr that are equal because the same equations compute them
#
# The compiler merges them: two reductions of equal values are one collective.


class EqualValues:
    """Numbers the values of a jaxpr: equal numbers for values that are certainly equal."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[Var, int] = {}
        self._visit(jaxpr, self._values)

    def number(self, v: Atom) -> int:
        """Return the number of a value of the jaxpr."""
        return self._read(v, self._values)

    def _intern(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _read(self, v: Atom, values: dict[Var, int]) -> int:
        if isinstance(v, Literal):
            return self._intern(("literal", str(v.val), str(aval_of(v))))
        return values.setdefault(v, self._intern(("value", v)))

    def _visit(self, jaxpr: Jaxpr, values: dict[Var, int]) -> None:
        for eqn in jaxpr.eqns:
            operands = [self._read(v, values) for v in eqn.invars]
            values.update(zip(eqn.outvars, self._results(eqn, operands), strict=True))

    def _results(self, eqn: JaxprEqn, operands: Sequence[int]) -> list[int]:
        if eqn.primitive is federated_map_p:
            # The results of a function, for equal slices of its arguments.
            inner = eqn.params["jaxpr"].jaxpr
            values = {
                v: self._intern(("slice", number))
                for v, number in zip(inner.invars, operands, strict=True)
            }
            self._visit(inner, values)
            slices = {values[v]: whole for v, whole in zip(inner.invars, operands, strict=True)}
            results = [self._read(v, values) for v in inner.outvars]
            placement = eqn.params["placement"]
            return [slices.get(n, self._intern(("placed", placement, n))) for n in results]
        call = called_jaxpr(eqn)
        if call is not None:
            values = dict(zip(call.jaxpr.invars, operands, strict=True))
            self._visit(call.jaxpr, values)
            return [self._read(v, values) for v in call.jaxpr.outvars]
        if eqn.primitive.name == "and":
            rest = [n for v, n in zip(eqn.invars, operands, strict=True) if not _is_true(v)]
            if len(rest) == 1:
                return rest
        if eqn.effects:
            return [self._intern(("result", len(self._numbers))) for _ in eqn.outvars]
        if inner_jaxprs(eqn):
            # Two equations can share a jaxpr, so its results depend on the operands too.
            return [self._intern(("result", v, *operands)) for v in eqn.outvars]
        params = tuple(sorted((name, str(value)) for name, value in eqn.params.items()))
        key = (eqn.primitive.name, params, tuple(operands))
        return [self._intern((*key, i)) for i in range(len(eqn.outvars))]


def _is_true(v: Atom) -> bool:
    return (
        isinstance(v, Literal)
        and aval_of(v).shape == ()
        and aval_of(v).dtype == bool
        and bool(v.val)
    )
