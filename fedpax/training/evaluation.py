"""Evaluation: metrics of the server's model on held-out data, computed on the training mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from fedpax.algorithm import LossFn, Params, loss_and_metrics
from fedpax.checks import COUNT, check_argument
from fedpax.clients.cohort import MASK
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_map, federated_sum
from fedpax.primitives.casts import checked_tree
from fedpax.primitives.user_functions import check_tree_not_deleted
from fedpax.training.experiment import HeldoutMetrics, Run
from fedpax.training.prefetch import put_on_mesh
from fedpax.transforms.program import program

Batch = Mapping[str, np.ndarray]
TOKENS = "tokens"  # a metric that is a sum, as `accumulate_gradients` has it


def evaluator(
    loss_fn: LossFn,
    batches: Sequence[Batch],
    *,
    placement: str,
    num_participants: int,
    sharding: NamedSharding | None = None,
) -> Callable[[Params], dict[str, float]]:
    """Make a function that evaluates a model on a fixed list of batches.

    Every metric is the mean over all batches, weighted by the sum of a batch's `mask`, or without
    one by its number of examples; `"tokens"`, as of `transformer_loss`, is the sum.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars, or None)`.
        batches: dicts of arrays `[batch, ...]`, all of the same shapes.
        placement: the placement's name.
        num_participants: the placement's size.
        sharding: the batches' sharding, as arrays `[participants, steps, batch, ...]`. Default
            None: JAX's default device.

    Returns:
        A function `params -> metrics`: `"loss"` and the metrics of `loss_fn`, as floats.

    Raises:
        TypeError: an array is not numbers.
        ValueError: there are no batches, or JAX cannot hold a value, such as an int64 beyond int32.

    Example:
        >>> batches = [{"x": np.array([1.0, 3.0])}, {"x": np.array([5.0, 7.0])}]
        >>> loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
        >>> evaluate = evaluator(loss_fn, batches, placement="islands", num_participants=4)
        >>> evaluate(jnp.float32(4.0))
        {'loss': 5.0}
    """
    remedy = "It is the placement's size."
    check_argument("evaluator", "num_participants", num_participants, COUNT, remedy=remedy)
    batches = _checked("evaluator", "batch", batches, of_equal_sizes=True)
    if not batches:
        raise ArgumentError(
            "evaluator() got no batches, expected at least one. Load a held-out split that has "
            "examples, and choose a batch size that is not larger than the split."
        )
    num_steps = -(-len(batches) // num_participants)
    padding = num_steps * num_participants - len(batches)
    weights = np.array([*[batch_weight(b) for b in batches], *[0.0] * padding], np.float32)
    stacked = jax.tree.map(lambda *xs: np.stack([*xs, *[xs[0]] * padding]), *batches)
    del batches  # they may take as much memory as `stacked`
    placed, placed_weights = jax.tree.map(
        lambda x: x.reshape(num_participants, num_steps, *x.shape[1:]), (stacked, weights)
    )
    return placed_evaluator(loss_fn, placed, placed_weights, placement=placement, sharding=sharding)


def placed_evaluator(
    loss_fn: LossFn,
    batches: Any,
    weights: Float[np.ndarray, "participants steps"],
    *,
    placement: str,
    sharding: NamedSharding | None = None,
) -> Callable[[Params], dict[str, float]]:
    """Make a function that evaluates a model on batches that are divided among participants.

    Batches are arrays `[participants, steps, batch, ...]` or `fedpax.data.LocalRows`. A batch of
    weight 0 adds nothing.
    """

    @jax.jit
    @program(placements={placement: len(weights)})
    def totals(
        params: Params,
        batches: chex.ArrayTree,
        weights: Float[Array, "participants steps"],
    ) -> dict[str, jax.Array]:
        def local_totals(
            batches: chex.ArrayTree, weights: Float[Array, " steps"]
        ) -> dict[str, jax.Array]:
            def weighted_metrics(
                batch_and_weight: tuple[chex.ArrayTree, Float[Array, ""]],
            ) -> dict[str, jax.Array]:
                batch, weight = batch_and_weight
                _, metrics = loss_and_metrics(loss_fn, params, batch)
                # Padding of weight 0 must add nothing, even NaN.
                scales = {TOKENS: jnp.float32(1)}
                return {
                    name: jnp.where(weight > 0, scales.get(name, weight) * jnp.float32(value), 0)
                    for name, value in metrics.items()
                }

            return jax.tree.map(
                lambda x: jnp.sum(x), jax.lax.map(weighted_metrics, (batches, weights))
            )

        return federated_sum(federated_map(local_totals, batches, weights))

    on_devices = (
        jax.device_put(batches) if sharding is None else put_on_mesh(batches, sharding),
        weights,
    )

    def evaluate(params: Params) -> dict[str, float]:
        check_tree_not_deleted(params, "params")
        sums = jax.device_get(totals(params, *on_devices))
        counts = {TOKENS: 1}
        return {name: float(x / counts.get(name, weights.sum())) for name, x in sums.items()}

    return evaluate


def evaluate_by_client(
    loss_fn: LossFn, clients: Sequence[Batch], *, batch_size: int = 128
) -> Callable[[Params], dict[str, np.ndarray]]:
    """Make a function that evaluates a model on the examples of each client.

    A metric must be a mean over examples, as a loss is.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars, or None)`, for batches of one
            example.
        clients: for each client a dict of arrays `[examples, ...]`, of equal shapes and dtypes but
            for the number of examples. A field `mask` weighs the examples: by its sum.
        batch_size: number of examples that are evaluated at once.

    Returns:
        A function `params -> metrics`: `"loss"` and the metrics of `loss_fn`, float64 `[clients]`;
        NaN for a client without an example.

    Raises:
        TypeError: an array is not numbers.
        ValueError: there is no example, or `batch_size` is below 1.

    Example:
        >>> loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
        >>> clients = [{"x": np.array([1.0, 3.0])}, {"x": np.array([5.0])}]
        >>> evaluate_by_client(loss_fn, clients)(jnp.float32(3.0))
        {'loss': array([2., 4.])}
    """
    clients = _checked("evaluate_by_client", "client", clients, of_equal_sizes=False)
    sizes = [len(jax.tree.leaves(client)[0]) for client in clients]
    if not sum(sizes) or batch_size < 1:
        raise ArgumentError(
            f"evaluate_by_client() got {sum(sizes)} examples of {len(clients)} clients and "
            f"batch_size={batch_size}, expected at least one of each. Load a held-out split that "
            "has examples."
        )
    examples = jax.tree.map(lambda *xs: np.concatenate(xs), *clients)
    owners = np.repeat(np.arange(len(clients)), sizes)
    weights = np.ones(len(owners))
    if "mask" in examples:
        weights = np.sum(examples["mask"].reshape(len(owners), -1), axis=1, dtype=np.float64)
    present = np.bincount(owners, weights, len(clients))

    def losses(params: Params, batch: chex.ArrayTree) -> dict[str, jax.Array]:
        _, metrics = loss_and_metrics(loss_fn, params, batch)
        return {name: jnp.float32(value) for name, value in metrics.items()}

    evaluate_examples = map_examples(losses, examples, batch_size=batch_size)

    def evaluate(params: Params) -> dict[str, np.ndarray]:
        values = evaluate_examples(params)
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
            return {
                name: np.bincount(owners, np.where(weights > 0, weights * value, 0), len(clients))
                / present
                for name, value in values.items()
            }

    return evaluate


def map_examples(
    function: Callable[[Params, Any], Any], examples: Batch, *, batch_size: int = 128
) -> Callable[[Params], Any]:
    """Make a function that applies a model to examples one by one, in batches of one size."""
    count = len(jax.tree.leaves(examples)[0])
    batch_size = min(batch_size, count)

    @jax.jit
    def map_batch(params: Params, batch: chex.ArrayTree) -> Any:
        return jax.vmap(lambda example: function(params, jax.tree.map(lambda x: x[None], example)))(
            batch
        )

    def run(params: Params) -> Any:
        check_tree_not_deleted(params, "params")
        outputs = []
        for start in range(0, count, batch_size):
            rows = np.minimum(np.arange(start, start + batch_size), count - 1)
            batch = jax.tree.map(lambda x, rows=rows: x[rows], examples)
            outputs.append(jax.device_get(map_batch(params, batch)))
        return jax.tree.map(lambda *xs: np.concatenate(xs)[:count], *outputs)

    return run


def heldout_metrics(run: Run, state: Any) -> HeldoutMetrics:
    """Evaluate the state of a run: the server's model, and the participants' own."""
    metrics = run.evaluate(state.params)
    return metrics if run.evaluate_state is None else {**metrics, **run.evaluate_state(state)}


def batch_weight(batch: Batch) -> float:
    """Return the sum of a batch's mask, or its number of examples."""
    if "mask" in batch:
        return float(np.sum(batch["mask"], dtype=np.float64))
    return float(jax.tree.leaves(batch)[0].shape[0])


def _checked(function: str, noun: str, batches: Any, *, of_equal_sizes: bool) -> list[Batch]:
    """Return batches whose arrays JAX can hold and that can be stacked, or raise."""
    if isinstance(batches, Mapping) or not hasattr(batches, "__len__"):
        remedy = f"[{noun}]" if isinstance(batches, Mapping) else "list(...)"
        raise ArgumentTypeError(
            f"{function}() got a {type(batches).__name__}, expected a list with the arrays of each "
            f"{noun}. Pass {remedy}."
        )
    checked = [checked_tree(batch, noun) for batch in batches]
    first: dict[str, tuple[int, ...]] = {}
    for k, batch in enumerate(checked):
        shapes = {
            jax.tree_util.keystr(path): np.shape(leaf)
            for path, leaf in jax.tree.leaves_with_path(batch)
        }
        sizes = sorted({shape[:1] for shape in shapes.values()})
        if len(sizes) != 1 or sizes == [()]:
            raise ArgumentError(
                f"{function}(): {noun} {k} has arrays of the shapes {shapes}, expected arrays "
                "[examples, ...] with the same number of examples. Stack the examples along axis 0."
            )
        skip = 0 if of_equal_sizes else 1
        first = first or shapes
        if shapes.keys() != first.keys() or any(
            shape[skip:] != first[name][skip:] for name, shape in shapes.items()
        ):
            raise ArgumentError(
                f"{function}(): {noun} {k} has arrays of the shapes {shapes}, expected the shapes "
                f"of {noun} 0, {first}. Pad the arrays, and mark the padding in a field 'mask'."
            )
        _check_mask(function, f"{noun} {k}", batch)
    return checked


def _check_mask(function: str, name: str, batch: Any) -> None:
    if not isinstance(batch, Mapping) or MASK not in batch:
        return
    mask = np.asarray(batch[MASK], np.float64)
    wrong = mask[~(np.isfinite(mask) & (mask >= 0))]
    if wrong.size:
        raise ArgumentError(
            f"{function}(): the mask of {name} has the value {wrong[0]}, expected finite numbers "
            "of at least 0. Mark padding with 0, and other examples with 1."
        )
