"""Local SGD."""

from __future__ import annotations

import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms.diloco import DiLoCoState, diloco
from fedpax.algorithms.parts.method_checks import check_optimizer


def local_sgd(
    loss_fn: LossFn,
    *,
    islands: int,
    optimizer: optax.GradientTransformation,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[DiLoCoState]:
    """Average the islands' models after every H local steps.

    Each island i takes H steps, one per batch, from the shared model x to y_i; then
    x <- mean_i y_i. H = 1 is synchronous mini-batch SGD.

    It is `diloco` with SGD of learning rate 1 outside.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands, the paper's workers.
        optimizer: any optax optimizer; the paper's is SGD.
        aggregator: combines the differences x - y_i. Default None: their mean.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`; H is the number of steps in
        `cohort.batches`.

    Raises:
        TypeError, ValueError: as in `diloco`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = local_sgd(loss_fn, islands=2, optimizer=optax.sgd(0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]] * 2, [[5.0]] * 2]))  # H = 2
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item()
        2.25

    Reference:
        Stich, arXiv:1805.09767, algorithm 1.
    """
    check_optimizer("local_sgd", "optimizer", optimizer)
    return diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optimizer,
        outer_optimizer=optax.sgd(1.0),
        aggregator=aggregator,
    )
