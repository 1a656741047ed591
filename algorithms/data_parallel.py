"""Synchronous data parallelism, the baseline."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import gradient_and_metrics, optimizer_step
from fedpax.algorithms.parts.method_checks import check_no_keys, check_optimizer
from fedpax.algorithms.parts.participation import counted_examples, placed_valid_steps
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.primitives import federated_map, federated_max, federated_mean
from fedpax.transforms.program import program


class DataParallelState(NamedTuple):
    """The state of data parallelism."""

    params: Params
    optimizer_state: optax.OptState


def data_parallel(
    loss_fn: LossFn,
    *,
    islands: int,
    optimizer: optax.GradientTransformation,
) -> FederatedAlgorithm[DataParallelState]:
    """Average the islands' gradients at every step.

        x <- x + update(mean_i grad loss_fn(x, batch_i))

    A round takes one step per batch. With one island it is plain SPMD training over the model axes
    of the mesh.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        optimizer: any optax optimizer.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`. At each step, an island whose
        batch is padding is left out of the mean, and `cohort.num_examples` weighs the others. A
        step without an island that counts changes nothing.

    Raises:
        TypeError: as in `diloco`.
        ValueError: in a round, different numbers of steps; and as in `diloco`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp, optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = data_parallel(loss_fn, islands=2, optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> batches = jnp.array([[[1.0], [2.0]], [[5.0], [6.0]]])  # two islands, two steps
        >>> state, metrics = jax.jit(algorithm.round)(state, fedpax.Cohort(batches))
        >>> state.params.item(), metrics["loss"].item()
        (4.0, 9.0)
    """
    check_optimizer("data_parallel", "optimizer", optimizer)

    def init(params: Params) -> DataParallelState:
        check_no_keys(params)
        # Copied, so that a round that donates the state does not delete the caller's arrays.
        return DataParallelState(jax.tree.map(jnp.copy, params), optimizer.init(params))

    @program(islands=islands)
    def data_parallel_round(
        state: DataParallelState, cohort: Cohort
    ) -> tuple[DataParallelState, Metrics]:
        check_cohort("data_parallel", cohort, islands, size_argument="islands")
        batches = cohort.batches
        valid, examples = placed_valid_steps(cohort), counted_examples(cohort)
        steps = jax.tree.leaves(batches)[0].shape[1]
        if examples is not None:
            # Without an island that counts, the optimizer does not step.
            valid = federated_map(
                lambda n, v: jnp.full(steps, n != 0) if v is None else v & (n != 0), examples, valid
            )
        # [steps]: whether any island takes the step, without communication in each step.
        taken = None if valid is None else federated_max(valid.astype(jnp.int32)) > 0

        def step(state: DataParallelState, i: Int[Array, ""]) -> tuple[DataParallelState, Metrics]:
            batch, valid_now = jax.tree.map(
                lambda b: jax.lax.dynamic_index_in_dim(b, i, axis=1, keepdims=False),
                (batches, valid),
            )

            def gradient_of(
                batch: chex.ArrayTree, is_valid: Bool[Array, ""] | None
            ) -> tuple[Params, Metrics]:
                outcome = gradient_and_metrics(loss_fn, state.params, batch)
                if is_valid is None:
                    return outcome
                # A weight of 0 does not remove the NaN of a padded batch; a select does.
                return jax.tree.map(lambda x: jnp.where(is_valid, x, jnp.zeros_like(x)), outcome)

            weights = examples
            if valid_now is not None:
                weights = jnp.where(valid_now, 1.0 if weights is None else weights, 0)
            gradient, metrics = federated_mean(
                federated_map(gradient_of, batch, valid_now), weights
            )
            after = DataParallelState(
                *optimizer_step(optimizer, gradient, state.optimizer_state, state.params)
            )
            if taken is not None:
                after = select(taken[i], after, state)
            return after, metrics

        state, metrics = jax.lax.scan(step, state, jnp.arange(steps))

        def average(values: jax.Array) -> jax.Array:
            values = values.astype(jnp.float32)
            if taken is None:
                return jnp.mean(values)
            return jnp.sum(jnp.where(taken, values, 0)) / jnp.maximum(jnp.sum(taken), 1)

        return state, jax.tree.map(average, metrics)

    return FederatedAlgorithm(init, data_parallel_round)
