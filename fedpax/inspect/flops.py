"""Floating-point operations of a jaxpr."""

import dataclasses
import math

from fedpax.primitives._jax import Jaxpr, JaxprEqn, Literal, Var, aval_of
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.reduction import REDUCTIONS

# One operation for each element of the result.
ELEMENTWISE = frozenset(
    [
        *("abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh"),
        *("cbrt", "ceil", "clamp", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "floor", "integer_pow", "lgamma", "log", "log1p", "logistic"),
        *("max", "min", "mul", "neg", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin"),
        *("sinh", "sqrt", "square", "sub", "tan", "tanh"),
    ]
)
# One operation for each element of the first operand.
CUMULATIVE = frozenset(
    [
        *("argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
        *("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"),
        *("reduce_window_max", "reduce_window_sum", "scatter-add"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations, and whether all loops were counted.

    Attributes:
        number: number of operations.
        is_exact: False if a loop with floating-point operations has a number of steps that is known
            only at run time; its body counts once.
    """

    number: float = 0
    is_exact: bool = True

    def __add__(self, other: "Flops") -> "Flops":
        """Add two counts."""
        return Flops(self.number + other.number, self.is_exact and other.is_exact)

    def times(self, factor: float) -> "Flops":
        """Multiply a count."""
        return Flops(self.number * factor, self.is_exact)


NO_FLOPS = Flops()


def count_flops(jaxpr: Jaxpr) -> Flops:
    """Count the floating-point operations of a jaxpr: 2 in a matmul for each product, else 1."""
    # The body of a loop counts as often as it runs; a loop of unknown length counts once. A
    # conditional counts its costliest branch. Integers, comparisons and custom kernels count 0.
    return sum((equation_flops(eqn) for eqn in jaxpr.eqns), start=NO_FLOPS)


def equation_flops(eqn: JaxprEqn) -> Flops:
    """Count the floating-point operations of one equation. See `count_flops`."""
    name = eqn.primitive.name
    inner = list(inner_jaxprs(eqn))
    if eqn.primitive is federated_map_p:
        return count_flops(inner[0]).times(eqn.params["placement"].size)
    if name == "scan":
        return count_flops(inner[0]).times(eqn.params["length"])
    if name == "while":
        number = sum(count_flops(body).number for body in inner)
        return Flops(number, is_exact=not number)
    if name == "cond":
        return max((count_flops(branch) for branch in inner), key=lambda flops: flops.number)
    if inner and name not in ("custom_jvp_call", "custom_vjp_call", "pallas_call"):
        return sum(map(count_flops, inner), start=NO_FLOPS)
    if inner and name != "pallas_call":
        return count_flops(inner[0])
    if not any(_is_float(v) for v in eqn.outvars):
        return NO_FLOPS
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = aval_of(eqn.invars[0]).shape
        return Flops(2 * _size(eqn.outvars[0]) * math.prod(shape[i] for i in contracted))
    if name == "ragged_dot_general":
        return Flops(2 * _size(eqn.outvars[0]) * aval_of(eqn.invars[0]).shape[-1])
    if name == "conv_general_dilated":
        kernel, spec = aval_of(eqn.invars[1]).shape, eqn.params["dimension_numbers"].rhs_spec
        # The kernel's axes: output features, input features of a group, and the spatial axes.
        return Flops(2 * _size(eqn.outvars[0]) * math.prod(kernel) // kernel[spec[0]])
    if name in CUMULATIVE or eqn.primitive in REDUCTIONS:
        return Flops(_size(eqn.invars[0]))
    return Flops(_size(eqn.outvars[0])) if name in ELEMENTWISE else NO_FLOPS


def _size(v: Var | Literal) -> int:
    return math.prod(aval_of(v).shape)


def _is_float(v: Var | Literal) -> bool:
    dtype = getattr(aval_of(v), "dtype", None)  # a token has none, and a PRNG key's has no kind
    return getattr(dtype, "kind", None) in ("f", "c", "V")
