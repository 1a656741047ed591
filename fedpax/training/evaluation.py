"""Held-out metrics of the server's model, computed by all participants together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fedpax.primitives import federated_map, federated_sum, program
from fedpax.training.algorithm import Params

Batch = Mapping[str, np.ndarray]


def evaluator(
    loss_fn: Callable[[Params, Any], tuple[jax.Array, dict[str, jax.Array]]],
    batches: Sequence[Batch],
    *,
    placement: str,
    participants: int,
    sharding: NamedSharding | None = None,
) -> Callable[[Params], dict[str, float]]:
    """Makes a function that evaluates a model on a fixed list of batches.

    The batches are dealt out to the participants, who each go through theirs one by one; so the
    mesh that trains a model also evaluates it. Every metric is the mean over all batches, weighted
    by the sum of a batch's `mask`, or by its number of examples where it has none.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        batches: dicts of arrays `[batch, ...]`, all of the same shapes.
        placement: the placement's name.
        participants: its size.
        sharding: where the batches live, as arrays `[participants, steps, batch, ...]`; by default
            where JAX puts them.

    Returns:
        A function of the parameters that returns `"loss"` and what `loss_fn` reports, as floats.

    Raises:
        ValueError: no batches.

    Example:
        >>> batches = [{"x": np.array([1.0, 3.0])}, {"x": np.array([5.0, 7.0])}]
        >>> loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
        >>> evaluate = evaluator(loss_fn, batches, placement="islands", participants=4)
        >>> evaluate(jnp.float32(4.0))
        {'loss': 5.0}
    """
    if not batches:
        raise ValueError(
            "evaluator() got no batches, expected at least one. Load a held-out split that has "
            "examples, and take a batch that is not larger than the split."
        )
    steps = -(-len(batches) // participants)
    idle = steps * participants - len(batches)
    weights = np.array([*[_weight(b) for b in batches], *[0.0] * idle], np.float32)
    stacked = jax.tree.map(lambda *xs: np.stack([*xs, *[xs[0]] * idle]), *batches)
    placed = jax.tree.map(
        lambda x: x.reshape(participants, steps, *x.shape[1:]), (stacked, weights)
    )

    @jax.jit
    @program(placements={placement: participants})
    def totals(params: Params, batches: Any, weights: jax.Array) -> dict[str, jax.Array]:
        def local_totals(batches: Any, weights: jax.Array) -> dict[str, jax.Array]:
            def one(batch_and_weight: tuple[Any, jax.Array]) -> dict[str, jax.Array]:
                batch, weight = batch_and_weight
                loss, aux = loss_fn(params, batch)
                # A repeated batch of weight 0 adds nothing, whatever its metrics are.
                return {
                    name: jnp.where(weight > 0, weight * value.astype(jnp.float32), 0)
                    for name, value in {**aux, "loss": loss}.items()
                }

            return jax.tree.map(lambda x: jnp.sum(x), jax.lax.map(one, (batches, weights)))

        return federated_sum(federated_map(local_totals, batches, weights))

    on_device = (jax.device_put(placed[0], sharding), placed[1])

    def evaluate(params: Params) -> dict[str, float]:
        sums = jax.device_get(totals(params, *on_device))
        return {name: float(total / weights.sum()) for name, total in sums.items()}

    return evaluate


def _weight(batch: Batch) -> float:
    if "mask" in batch:
        return float(batch["mask"].sum())
    return float(jax.tree.leaves(batch)[0].shape[0])
