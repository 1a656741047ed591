"""What an algorithm is to whoever runs it: a pair of pure functions, as in optax."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

Params: TypeAlias = Any
"""A pytree of arrays: the server's model."""

State: TypeAlias = Any
"""A NamedTuple of arrays with a field ``params``, the server's model."""

Metrics: TypeAlias = dict[str, jax.Array]
"""Scalars of one round; ``"loss"`` is the mean training loss over the round."""


class FederatedAlgorithm(NamedTuple):
    """A federated method: how its state begins and how one round advances it.

    Both functions are pure and can be jitted. The state is an immutable ``NamedTuple`` whose
    field ``params`` is the server's model; what participants keep between rounds are placed
    values inside it (a leading axis of the placement's size). ``round`` returns a state of the
    same structure, shapes, dtypes and shardings, so the loop can donate the old one.

    Attributes:
        init: ``params -> state``.
        round: ``(state, batches, ...) -> (state, metrics)``. Every leaf of ``batches`` is
            ``[participants, local_steps, batch, ...]``; ``metrics`` is a dict of scalars that
            holds at least ``"loss"``, the mean training loss over the round.

    Example:
        Gradient descent on a quadratic is a method with one participant and one local step:

        >>> from typing import NamedTuple
        >>> import jax, jax.numpy as jnp
        >>> class DescentState(NamedTuple):
        ...     params: jax.Array
        >>> def descend(state, batches):
        ...     loss, slope = jax.value_and_grad(lambda w: jnp.mean((w - batches) ** 2))(
        ...         state.params)
        ...     return DescentState(state.params - 0.5 * slope), {"loss": loss}
        >>> descent = FederatedAlgorithm(init=DescentState, round=jax.jit(descend))
        >>> state, metrics = descent.round(descent.init(jnp.float32(0.0)), jnp.full((1, 1, 2), 3.0))
        >>> float(state.params), float(metrics["loss"])
        (3.0, 9.0)
    """

    init: Callable[[Params], State]
    round: Callable[..., tuple[State, Metrics]]
