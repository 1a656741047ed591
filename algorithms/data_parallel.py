"""Synchronous data parallelism: the baseline, and with one island ordinary SPMD training."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpax.algorithms.local_steps import LossFn, as_metrics
from fedpax.primitives import federated_map, federated_mean, program
from fedpax.training.algorithm import FederatedAlgorithm, Metrics


class DataParallelState(NamedTuple):
    """The model and the state of its optimizer."""

    params: Any
    optimizer: optax.OptState


def data_parallel(
    loss_fn: LossFn,
    *,
    islands: int,
    optimizer: optax.GradientTransformation,
) -> FederatedAlgorithm:
    """Synchronous training: the islands average their gradients at every step.

        x <- x + update(mean_i grad loss_fn(x, batch_i))

    A round is as many steps as it has batches. On the batches of another method's round it sees
    the same examples, so that losses compare token for token. With one island nothing is averaged,
    and a round is plain SPMD training over the model axes of the mesh.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        islands: the number of islands.
        optimizer: any optax optimizer.

    Returns:
        `init(params)` and `round(state, batches)`. `batches` is a pytree of arrays `[islands,
        steps, batch, ...]`. Metrics, all float32 scalars: `"loss"` and what `loss_fn` reports,
        averaged over steps and islands.

    Raises:
        TypeError: `islands` is no int.
        ValueError: `islands` below 1; in a round, batches without an axis of size `islands`, or
            with several numbers of steps.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = data_parallel(loss_fn, islands=2, optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> batches = jnp.array([[[1.0], [2.0]], [[5.0], [6.0]]])  # two islands, two steps
        >>> state, metrics = jax.jit(algorithm.round)(state, batches)
        >>> state.params.item(), metrics["loss"].item()
        (4.0, 9.0)
    """

    def init(params: Any) -> DataParallelState:
        return DataParallelState(params, optimizer.init(params))

    @program(islands=islands)
    def data_parallel_round(
        state: DataParallelState, batches: Any
    ) -> tuple[DataParallelState, Metrics]:
        def step(state: DataParallelState, i: jax.Array) -> tuple[DataParallelState, Metrics]:
            batch = jax.tree.map(
                lambda b: jax.lax.dynamic_index_in_dim(b, i, axis=1, keepdims=False), batches
            )

            def gradient_of(batch: Any) -> tuple[Any, Metrics]:
                (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
                    state.params, batch
                )
                return gradient, as_metrics(loss, aux)

            gradient, metrics = federated_mean(federated_map(gradient_of, batch))
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            return DataParallelState(params, optimizer_state), metrics

        steps = {b.shape[1] for b in jax.tree.leaves(batches)}
        if len(steps) > 1:  # an index past the end of the shorter ones would give their last batch
            raise ValueError(
                f"data_parallel: the leaves of batches have {sorted(steps)} steps, expected one "
                "number. Give each the shape [islands, steps, batch, ...]."
            )
        state, metrics = jax.lax.scan(step, state, jnp.arange(*steps))
        return state, jax.tree.map(lambda m: jnp.mean(m.astype(jnp.float32)), metrics)

    return FederatedAlgorithm(init, data_parallel_round)
