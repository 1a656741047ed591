"""Terms that methods add to the gradients of local steps, as optax transformations; SGD's rate.

Chain one in front of the client optimizer: `optax.chain(proximal_term(mu, x), client_optimizer)`.
"""

from typing import Any

import jax
import optax

from fedpax.algorithm import Params
from fedpax.algorithms.parts.tree_arithmetic import scale, subtract


def added_term(term: Params) -> optax.GradientTransformation:
    """Add a constant to each gradient: `g + term`."""
    return optax.stateless(lambda gradient, params: optax.tree.add(gradient, term))


def proximal_term(mu: Any, x: Params) -> optax.GradientTransformation:
    """Add the gradient of `mu / 2 |y - x|^2` to the gradient g of the loss: `g + mu (y - x)`."""

    def add(gradient: Params, y: Params | None) -> Params:
        return jax.tree.map(
            lambda g, pull: g + pull.astype(g.dtype), gradient, scale(mu, subtract(y, x))
        )

    return optax.stateless(add)


def constant_learning_rate(optimizer: optax.GradientTransformation, params: Params) -> float | None:
    """Return eta if each update of an optimizer is `-eta` times the gradient, as of `optax.sgd`."""
    # Then the sum of K gradients is the distance that K steps cover, divided by eta. In a dtype
    # narrower than float32, rounding would spoil this quotient.
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    has_state = bool(jax.tree.leaves(jax.eval_shape(optimizer.init, params)))
    if has_state or not dtypes <= {"float32", "float64"}:
        return None
    update = jax.make_jaxpr(lambda g, w: optimizer.update(g, optimizer.init(w), w)[0])
    jaxpr = update(params, params).jaxpr
    made_by = {id(equation.outvars[0]): equation for equation in jaxpr.eqns}
    rates = set()
    for gradient, result in zip(jaxpr.invars, jaxpr.outvars, strict=False):  # then params
        equation = made_by.get(id(result))
        if equation is None or equation.primitive.name != "mul":
            return None
        factor, factored = equation.invars
        if factored is not gradient or not hasattr(factor, "val"):
            return None
        rates.add(-float(factor.val))
    return rates.pop() if len(rates) == 1 else None
