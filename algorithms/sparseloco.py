"""SparseLoCo."""

from __future__ import annotations

import optax

from fedpax.aggregators import codecs, compressed_mean
from fedpax.aggregators.codecs import Codec
from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms.diloco import DiLoCoState, diloco
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.checks import NON_NEGATIVE


def sparseloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    outer_learning_rate: float = 1.0,
    codec: Codec | None = None,
    decay: float = 0.95,
    seed: int = 0,
) -> FederatedAlgorithm[DiLoCoState]:
    """Train islands as DiLoCo does, without outer momentum, and send about 1% of each update.

    Each island i takes H inner steps from the shared model x to y_i. It keeps a residual e_i:

        m_i = beta e_i + (x - y_i);   q_i = Q(TopK(m_i));   e_i <- m_i - q_i;
        x <- x - eta mean_i q_i.

    TopK keeps the k entries of largest magnitude of each block of 4,096, and Q rounds them to 2
    bits.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        inner_optimizer: any optax optimizer; the paper uses AdamW.
        outer_learning_rate: eta. Default 1.0.
        codec: Q(TopK(.)), a codec of `fedpax.aggregators.codecs`. Default None: 64 entries of 4,096
            in 2 bits, `top_k(1 / 64, values=sign(bits=2))`.
        decay: beta, above 0 and at most 1. Default 0.95.
        seed: seed of a codec that rounds at random.

    Returns:
        As in `diloco`, with its state. `state.aggregator_state.residual` are the e_i.

    Raises:
        TypeError: as in `diloco`; `codec` is not a codec.
        ValueError: as in `diloco`; `outer_learning_rate` or `decay` is out of range.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (0.5 * jnp.sum((w - jnp.mean(x, 0)) ** 2), {})
        >>> algorithm = sparseloco(
        ...     loss_fn, islands=2, inner_optimizer=optax.sgd(1.0), codec=codecs.top_k(0.5))
        >>> state = algorithm.init(jnp.zeros(2))
        >>> cohort = fedpax.Cohort(jnp.array([[[[4.0, 1.0]]], [[[2.0, 6.0]]]]))  # y_i
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.params.tolist()  # one island sends the first entry, the other one the second
        [2.0, 3.0]
        >>> state.aggregator_state.residual.tolist()
        [[0.0, -1.0], [-2.0, 0.0]]

    Reference:
        Sarfi et al., SparseLoCo, arXiv:2508.15706, algorithm 1.
    """
    check_optimizer("sparseloco", "inner_optimizer", inner_optimizer)
    if not callable(outer_learning_rate):
        remedy = "Pass 1.0, the default."
        check_setting(
            "sparseloco", "outer_learning_rate", outer_learning_rate, NON_NEGATIVE, remedy=remedy
        )
    if codec is None:
        codec = codecs.top_k(1 / 64, values=codecs.sign(bits=2))
    return diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=inner_optimizer,
        outer_optimizer=optax.sgd(outer_learning_rate),
        aggregator=compressed_mean(codec, error_feedback=True, decay=decay, seed=seed),
    )
