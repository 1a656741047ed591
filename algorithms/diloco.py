"""DiLoCo: islands that train for many steps apart, joined by an outer optimizer."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from fedpax.aggregators.quantized_mean import check_levels, quantized_mean
from fedpax.algorithms.local_steps import LossFn, local_steps, subtract
from fedpax.primitives import federated_broadcast, federated_map, federated_mean, program
from fedpax.training.algorithm import FederatedAlgorithm, Metrics


class DiLoCoState(NamedTuple):
    """The shared model, the outer optimizer's state, and what each island keeps, placed.

    Attributes:
        params: the shared model.
        outer_optimizer: the state of the outer optimizer.
        inner_optimizer: the islands' states of the inner optimizer.
        error: what the islands have not sent yet; None where outer gradients cross as floats.
    """

    params: Any
    outer_optimizer: optax.OptState
    inner_optimizer: optax.OptState
    error: Any = None


def diloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    levels: int | None = None,
) -> FederatedAlgorithm:
    """Distributed low-communication training.

    Island i starts from the shared model x and takes H inner steps, one a batch, which end at y_i.
    Then the islands communicate, once:

        delta = mean_i (x - y_i);   v <- beta v + delta;   x <- x - eta (delta + beta v).

    The inner optimizer's state, such as Adam's moments and its step count, stays on its island from
    round to round and is never averaged.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        islands: the number of islands.
        inner_optimizer: any optax optimizer; the paper uses AdamW. A schedule in it counts inner
            steps over all rounds.
        outer_optimizer: any optax optimizer; None is the paper's SGD with Nesterov momentum,
            eta = 0.7 and beta = 0.9.
        levels: how many values an entry of an island's outer gradient can take on the wire, 2 to
            256, with error feedback (`fedpax.aggregators.quantized_mean`); None sends float32.

    Returns:
        `init(params)` and `round(state, batches)`. `batches` is a pytree of arrays `[islands, H,
        batch, ...]`. Metrics, all float32 scalars: `"loss"` and what `loss_fn` reports, averaged
        over inner steps and islands.

    Raises:
        TypeError: `islands` or `levels` is no int.
        ValueError: `islands` below 1, `levels` out of range; in a round, batches without an axis of
            size `islands`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = diloco(
        ...     loss_fn, islands=2, inner_optimizer=optax.sgd(0.5), outer_optimizer=optax.sgd(1.0)
        ... )
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> batches = jnp.array([[[1.0]], [[5.0]]])  # two islands, H = 1, one example
        >>> state, metrics = jax.jit(algorithm.round)(state, batches)
        >>> state.params.item(), metrics["loss"].item()
        (3.0, 13.0)

    Reference:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        arXiv:2311.08105, algorithm 1.
    """
    if levels is not None:
        check_levels(levels)
    outer = (
        optax.sgd(0.7, momentum=0.9, nesterov=True) if outer_optimizer is None else outer_optimizer
    )

    @program(islands=islands)
    def init(params: Any) -> DiLoCoState:
        model = federated_broadcast(params)
        inner_state = federated_map(inner_optimizer.init, model)
        zeros = functools.partial(optax.tree.zeros_like, dtype=jnp.float32)
        error = None if levels is None else federated_map(zeros, model)
        return DiLoCoState(params, outer.init(params), inner_state, error)

    @program(islands=islands)
    def diloco_round(state: DiLoCoState, batches: Any) -> tuple[DiLoCoState, Metrics]:
        def inner_steps(
            inner_state: optax.OptState, batches: Any
        ) -> tuple[Any, optax.OptState, Metrics]:
            params, inner_state, metrics = local_steps(
                loss_fn, inner_optimizer, state.params, inner_state, batches
            )
            return subtract(state.params, params), inner_state, metrics

        change, inner_state, metrics = federated_map(inner_steps, state.inner_optimizer, batches)
        error = state.error
        if levels is None:
            outer_gradient, metrics = federated_mean((change, metrics))
        else:
            metrics = federated_mean(metrics)
            outer_gradient, error = quantized_mean(change, error, levels=levels)
        updates, outer_state = outer.update(outer_gradient, state.outer_optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return DiLoCoState(params, outer_state, inner_state, error), metrics

    return FederatedAlgorithm(init, diloco_round)
