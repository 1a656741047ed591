"""Federated meta-learning: Per-FedAvg (MAML) and Reptile."""

from __future__ import annotations

from typing import Any

import chex
import jax
import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params, Scalar
from fedpax.algorithms.fedavg import FedAvgState, fedavg
from fedpax.algorithms.parts.local_steps import full_gradient, gradient_and_metrics, local_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.tree_arithmetic import scale, subtract
from fedpax.checks import NON_NEGATIVE
from fedpax.clients.cohort import NumSteps
from fedpax.errors import ArgumentError
from fedpax.primitives.placement import ChunkSize


def per_fedavg(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    adaptation_learning_rate: Scalar,
    first_order: bool = False,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedAvgState]:
    """Minimize the clients' loss after one step of adaptation: FedAvg on MAML's objective.

        F_i(w) = f_i(w - alpha grad f_i(w; D); D')

    The model adapts on the even examples of each batch, D, and is evaluated on the odd ones, D'.
    Local steps follow the exact gradient, with the Hessian on D. The server averages as in FedAvg.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`, for batches of half the size.
        cohort_size: number of clients in a round.
        client_optimizer: any optax optimizer; the paper's is SGD with learning rate beta.
        adaptation_learning_rate: alpha, at least 0.
        first_order: leave out the Hessian: Per-FedAvg (FO). Default False: the exact gradient, at
            about twice the cost. With True, derivatives through a round leave it out too.
        server_optimizer: as in `fedavg`.
        aggregator: as in `fedavg`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`, with batches of at least two
        examples. Metrics are the adapted model's on D'. Let `loss_fn` be 0 for an empty D', of a
        batch with one valid example.

    Raises:
        ValueError: `adaptation_learning_rate` below 0; batches of fewer than two examples; and as
            in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = per_fedavg(loss_fn, cohort_size=2, adaptation_learning_rate=0.5,
        ...                        client_optimizer=optax.sgd(1.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0, 3.0]], [[5.0, 5.0]]]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item()  # mean of 0.5 (3 - 0.5) and 0.5 (5 - 2.5)
        1.25

    Reference:
        Fallah et al., arXiv:2002.07948, algorithm 1.
    """
    check_optimizer("per_fedavg", "client_optimizer", client_optimizer)
    check_optimizer("per_fedavg", "server_optimizer", server_optimizer, optional=True)
    remedy = "Pass 0.0 for fedavg on every second example."
    check_setting(
        "per_fedavg",
        "adaptation_learning_rate",
        adaptation_learning_rate,
        NON_NEGATIVE,
        remedy=remedy,
    )

    def meta_loss(params: Params, batch: chex.ArrayTree) -> tuple[jax.Array, Metrics | None]:
        support, query = (_every_second(batch, start) for start in (0, 1))
        gradient, _ = gradient_and_metrics(loss_fn, params, support)
        if first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return loss_fn(subtract(params, scale(adaptation_learning_rate, gradient)), query)

    def adapted_model(state: FedAvgState, batches: chex.ArrayTree, num_steps: NumSteps) -> Params:
        """Take one step along the gradient of all training batches."""
        gradient = full_gradient(loss_fn, state.params, batches, num_steps)
        return subtract(state.params, scale(adaptation_learning_rate, gradient))

    return fedavg(
        meta_loss,
        cohort_size=cohort_size,
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        aggregator=aggregator,
        chunk_size=chunk_size,
    )._replace(adapted_model=adapted_model)


def reptile(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    meta_learning_rate: optax.ScalarOrSchedule,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedAvgState]:
    """Move the model a part of the way to the mean of the clients' fine-tuned models.

        x <- x + epsilon mean_i (y_i - x)

    This is `fedavg` with SGD of learning rate epsilon on the server; clients are its tasks.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        client_optimizer: any optax optimizer.
        meta_learning_rate: epsilon. A schedule counts rounds.
        aggregator: as in `fedavg`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. The paper averages uniformly:
        leave `cohort.num_examples` None.

    Raises:
        ValueError: `meta_learning_rate` below 0; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = reptile(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.5),
        ...                     meta_learning_rate=0.5)
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item()
        0.75

    Reference:
        Nichol et al., arXiv:1803.02999, algorithm 2.
    """
    check_optimizer("reptile", "client_optimizer", client_optimizer)
    if not callable(meta_learning_rate):
        remedy = "Pass 1.0 for fedavg."
        check_setting(
            "reptile", "meta_learning_rate", meta_learning_rate, NON_NEGATIVE, remedy=remedy
        )

    def adapted_model(state: FedAvgState, batches: chex.ArrayTree, num_steps: NumSteps) -> Params:
        """Take the local steps of a round."""
        start = client_optimizer.init(state.params)
        return local_steps(loss_fn, client_optimizer, state.params, start, batches, num_steps)[0]

    return fedavg(
        loss_fn,
        cohort_size=cohort_size,
        client_optimizer=client_optimizer,
        server_optimizer=optax.sgd(meta_learning_rate),
        aggregator=aggregator,
        chunk_size=chunk_size,
    )._replace(adapted_model=adapted_model)


def _every_second(batch: chex.ArrayTree, start: int) -> chex.ArrayTree:
    def half(path: Any, leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 1 or leaf.shape[0] < 2:
            raise ArgumentError(
                f"per_fedavg(): a batch{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, "
                "expected at least two examples, one to adapt to and one to judge by. Use larger "
                "batches."
            )
        return leaf[start::2]

    return jax.tree_util.tree_map_with_path(half, batch)
