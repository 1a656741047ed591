"""Names of the values of a jaxpr, for the reader of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of, result_names
from fedpax.primitives.broadcast import federated_broadcast_p
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.transforms.streaming_plan import Atom
from fedpax.transforms.unstack import CONTRACTIONS, FEDERATED

# Equations whose result is their first operand, or a part of it, in another layout or dtype.
SAME_VALUE = frozenset(
    """
    broadcast_in_dim convert_element_type copy dynamic_slice expand_dims gather name reshape
    reshard sharding_constraint slice squeeze stop_gradient transpose
    """.split()
)
CONSTANT = "constant"

SAME = "fedpax_same"
"""The name of the result of a map that returns its argument."""


class Names:
    """Names of the values of a jaxpr.

    - An argument, a part of it, or a mapped function's result has its path.
    - The result of a reduction is "mean of" its operand.
    - Any other server value is "computed from" the value of the same type that it depends on, or
      else from the first one.
    """

    def __init__(self, jaxpr: Jaxpr, arguments: Mapping[Var, Sequence[tuple[str, str]]]) -> None:
        """Name the values of a jaxpr; `arguments`: names and types that each depends on."""
        self.sources: dict[Var, dict[str, str]] = {v: dict(names) for v, names in arguments.items()}
        self.exact: set[Var] = {v for v, names in self.sources.items() if len(names) == 1}
        for eqn in jaxpr.eqns:
            self._name_results(eqn)

    def _name_results(self, eqn: JaxprEqn) -> None:
        name = eqn.primitive.name
        if eqn.primitive is federated_map_p:
            for i, path in enumerate(result_names(eqn.params["jaxpr"])):
                if path == SAME:
                    self._copy(eqn.outvars[i], eqn.invars[i])
                else:
                    self._set(eqn.outvars[i], path)
        elif eqn.primitive in REDUCTIONS:
            for v, operand in zip(eqn.outvars, eqn.invars, strict=False):
                self._set(v, f"{operation_of(eqn)} of {self.of_placed(operand)}")
        elif name == "optimization_barrier":
            for v, operand in zip(eqn.outvars, eqn.invars, strict=True):
                self._copy(v, operand)
        elif name in SAME_VALUE or eqn.primitive is federated_broadcast_p:
            self._copy(eqn.outvars[0], eqn.invars[0])
        else:
            names: dict[str, str] = {}
            for operand in eqn.invars:
                if isinstance(operand, Var):
                    names |= self.sources.get(operand, {})
            self.sources |= {v: names for v in eqn.outvars}

    def _set(self, v: Var, name: str) -> None:
        self.sources[v] = {name: type_of(v)}
        self.exact.add(v)

    def _copy(self, v: Var, operand: Atom) -> None:
        if isinstance(operand, Var):
            self.sources[v] = self.sources.get(operand, {})
            if self._is_exact(operand):
                self.exact.add(v)

    def of(self, v: Atom) -> str:
        """Return the name of a server value."""
        nearest = self.of_placed(v)
        is_exact = nearest == CONSTANT or self._is_exact(v)
        return nearest if is_exact else f"computed from {nearest}"

    def _is_exact(self, v: Atom) -> bool:
        return isinstance(v, Var) and v in self.exact

    def of_placed(self, v: Atom) -> str:
        """Return the name of the value that a placed value is computed from."""
        names = self.sources.get(v, {}) if isinstance(v, Var) else {}
        same = [name for name, named_type in names.items() if named_type == type_of(v)]
        return next(iter([*same, *names]), CONSTANT)

    def inside(self, jaxpr: Jaxpr, operands: Sequence[Atom]) -> Names:
        """Name the values of a jaxpr inside an equation, given the operands that it takes."""
        arguments = {}
        for v, operand in zip(jaxpr.invars, operands, strict=True):
            names = self.sources.get(operand, {}) if isinstance(operand, Var) else {}
            if self._is_exact(operand):  # whatever its type, which a loop over its rows changes
                names = {self.of_placed(operand): type_of(v)}
            arguments[v] = list(names.items())
        return Names(jaxpr, arguments)


def operation_of(eqn: JaxprEqn) -> str:
    """Return the operation of an equation that reduces over participants, as tables name it."""
    name = eqn.primitive.name
    if name in CONTRACTIONS:
        return "sum"
    reduction = FEDERATED[name].name if name in FEDERATED else name
    return reduction.removeprefix("federated_")


def type_of(v: Var | Literal, axis: int | None = None) -> str:
    """Return dtype and shape of a value; of one participant's slice along `axis`."""
    aval = aval_of(v)
    shape = [str(size) for i, size in enumerate(aval.shape) if i != axis]
    return f"{aval.dtype}[{','.join(shape)}]"
