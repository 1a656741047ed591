"""Chains of transformations that end in an aggregator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fedpax.aggregators.aggregator import Aggregator
from fedpax.errors import ArgumentTypeError

AggregatorTransformation: TypeAlias = Callable[[Aggregator], Aggregator]
"""A function from an aggregator to another one, such as `clip_by_norm(1.0)`.

What it does to the updates before it calls the inner aggregator happens on the participants. What
it does to the aggregate happens on the server.
"""


def chain(*stages: AggregatorTransformation | Aggregator) -> Aggregator:
    """Chain transformations and the aggregator that they end in, as `optax.chain` does.

    The stages stand in the order in which an update passes them on its way to the server:
    `chain(first, second, aggregator)` is `first(second(aggregator))`.

    Args:
        *stages: any number of transformations, then one aggregator.

    Returns:
        The aggregator. The states are nested: each stage's state contains the next stage's state.

    Raises:
        TypeError: the last stage is not an `Aggregator`, or an earlier stage is one.

    Example:
        >>> import fedpax
        >>> import jax.numpy as jnp
        >>> from fedpax.aggregators import Aggregator, mean
        >>> def halve(inner):
        ...     def aggregate(state, updates, weights):
        ...         updates = fedpax.federated_map(lambda update: update / 2, updates)
        ...         return inner.aggregate(state, updates, weights)
        ...     return Aggregator(inner.init, aggregate)
        >>> halved_mean = chain(halve, mean())
        >>> @fedpax.program(clients=2)
        ... def average(updates):
        ...     return halved_mean.aggregate(halved_mean.init(None), updates, None)[0]
        >>> average(jnp.array([1.0, 5.0])).item()
        1.5
    """
    for i, stage in enumerate(stages[:-1]):
        if isinstance(stage, Aggregator) or not callable(stage):
            raise ArgumentTypeError(
                f"chain(): stage {i} is {_describe(stage)}, expected a transformation such as "
                "clip_by_norm(1.0). Put the aggregator last."
            )
    if not stages or not isinstance(stages[-1], Aggregator):
        last = _describe(stages[-1]) if stages else "missing"
        raise ArgumentTypeError(
            f"chain(): the last stage is {last}, expected an aggregator. Add mean() at the end."
        )
    aggregator = stages[-1]
    for transform in reversed(stages[:-1]):
        aggregator = transform(aggregator)
    combine = stages[-1]
    return aggregator._replace(needs_all=combine.needs_all)


def _describe(stage: object) -> str:
    return "an Aggregator" if isinstance(stage, Aggregator) else f"a {type(stage).__name__}"
