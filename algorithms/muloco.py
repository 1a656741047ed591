"""MuLoCo: DiLoCo with Muon as the inner optimizer."""

from __future__ import annotations

from typing import Any

import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithms.diloco import diloco
from fedpax.training.algorithm import FederatedAlgorithm, LossFn


def muloco(
    loss_fn: LossFn,
    *,
    islands: int,
    learning_rate: optax.ScalarOrSchedule = 0.02,
    weight_dimension_numbers: Any = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Train islands as DiLoCo does, with Muon inside.

    Muon replaces the momentum M = U S V^T of a matrix by the nearest orthogonal matrix, U V^T. Its
    steps have the same size in all directions. The outer gradients of the islands agree more, and
    can be compressed to 2 bits with error feedback:

        muloco(loss_fn, islands=4,
               aggregator=compressed_mean(codecs.sign(bits=2), error_feedback=True))

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        islands: number of islands.
        learning_rate: Muon's, and that of Adam for what Muon does not update. A number, or a
            schedule of the inner step over all rounds. Default 0.02, as in the authors' code.
        weight_dimension_numbers: which parameters are matrices, and which of their axes, as
            `optax.contrib.muon` takes them: a tree of `optax.contrib.MuonDimensionNumbers`, or None
            for a parameter that Adam updates. Default None: every parameter of two axes. Stacked
            layers need it, and embeddings, which Muon should not update.
        outer_optimizer: any optax optimizer. Default None: SGD with Nesterov momentum, learning
            rate 0.7 and momentum 0.6, as in the authors' code.
        aggregator: as in `diloco`. Default None: the mean in float32.

    Returns:
        As in `diloco`, with its state.

    Raises:
        TypeError: as in `diloco`.
        ValueError: as in `diloco`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((x @ w) ** 2), {})
        >>> algorithm = muloco(loss_fn, islands=2, outer_optimizer=optax.sgd(1.0))
        >>> state = algorithm.init(jnp.eye(2))
        >>> x = jax.random.normal(jax.random.key(0), (2, 3, 4, 2))  # islands, steps, batch
        >>> state, metrics = jax.jit(algorithm.round)(state, fedpax.Cohort(x))
        >>> bool(jnp.all(jnp.diag(state.params) < 0.97))  # three steps of about 0.02
        True

    Reference:
        Therien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo, arXiv:2505.23725,
        algorithm 1.
    """
    inner = optax.contrib.muon(
        learning_rate, muon_weight_dimension_numbers=weight_dimension_numbers
    )
    if outer_optimizer is None:
        outer_optimizer = optax.sgd(0.7, momentum=0.6, nesterov=True)
    return diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=inner,
        outer_optimizer=outer_optimizer,
        aggregator=aggregator,
    )
