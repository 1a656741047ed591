"""Losses of language models and classifiers: `loss_fn(params, batch) -> (loss, aux)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from fedpax.algorithm import Metrics
from fedpax.clients.cohort import MASK
from fedpax.errors import ArgumentError
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.ops.chunked_loss import TOKENS_PER_CHUNK, chunked_cross_entropy

Batch: TypeAlias = Mapping[str, jax.Array]
ModelLoss: TypeAlias = Callable[[chex.ArrayTree, Batch], tuple[jax.Array, Metrics]]
"""A `fedpax.algorithm.LossFn` that always returns metrics."""


def cross_entropy(
    logits: Float[Array, "*batch classes"],
    targets: Int[Array, "*batch"],
    mask: Num[Array, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Compute the mean of -log softmax(logits)[target], in nats.

    Args:
        logits: `[..., classes]`, any floating dtype.
        targets: integers `[...]` from 0 to classes - 1.
        mask: `[...]`, the weight of each target in the mean. Default None: every weight is 1.
            Logits and targets of weight 0 may hold any value. If all weights are 0, the loss is 0.

    Returns:
        The loss, float32 (float64 for float64 logits).

    Raises:
        ValueError: the shapes do not match.

    Example:
        >>> logits = jnp.array([[0.0, 0.0], [100.0, 0.0]])
        >>> round(float(cross_entropy(logits, jnp.array([1, 0]))), 4)  # (log 2 + 0) / 2
        0.3466
    """
    if logits.shape[:-1] != targets.shape:
        raise ArgumentError(
            f"targets have shape {targets.shape}, but logits {logits.shape}: expected targets of "
            f"shape {logits.shape[:-1]}, one for each row of logits."
        )
    if mask is not None and mask.shape != targets.shape:
        raise ArgumentError(
            f"mask has shape {mask.shape}, but targets {targets.shape}: expected one weight for "
            "each target."
        )
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A comparison, not an index: indexing an axis that the mesh shards would gather it.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return _mean(jax.nn.logsumexp(logits, axis=-1) - target_logits, mask)


def next_token_loss(apply: Callable[..., jax.Array]) -> ModelLoss:
    """Make the loss of a language model: the mean cross-entropy of the next token, in nats.

    Args:
        apply: `apply(params, inputs, segments, positions)` returns logits
            `[batch, seq_len, vocab_size]`.

    Returns:
        `loss_fn(params, batch) -> (loss, {"tokens": sum of the mask})`. A batch has `inputs` and
        `targets`, int32 `[batch, seq_len]`, and of packed sequences `segments` and `positions`,
        int32, and `mask`, float32, 0 where a target does not count.

    Example:
        >>> def bigrams(params, tokens, segments, positions):
        ...     return params[tokens]
        >>> text = jnp.frombuffer(b"to be or not to be", jnp.uint8).astype(int)[None]
        >>> batch = {"inputs": text[:, :-1], "targets": text[:, 1:]}
        >>> loss, aux = next_token_loss(bigrams)(jnp.zeros((256, 256)), batch)
        >>> bool(jnp.isclose(loss, jnp.log(256))), int(aux["tokens"])
        (True, 17)
    """

    def loss_fn(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = apply(params, batch["inputs"], batch.get("segments"), batch.get("positions"))
        targets, mask = batch["targets"], batch.get("mask")
        tokens = jnp.float32(targets.size) if mask is None else jnp.sum(mask, dtype=jnp.float32)
        return cross_entropy(logits, targets, mask), {"tokens": tokens}

    return loss_fn


def transformer_loss(
    config: TransformerConfig,
    *,
    z_loss_weight: float = 0.0,
    load_balance_weight: float = 0.01,
    router_z_weight: float = 0.0,
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> ModelLoss:
    """Make the training loss of a transformer: the mean next-token cross-entropy, in nats.

    The logits are computed in chunks of tokens (`chunked_cross_entropy`). The z-loss and the losses
    of a mixture of experts are added.

    Args:
        config: the transformer's configuration.
        z_loss_weight: weight of the mean of log(sum(exp(logits)))^2.
        load_balance_weight: weight of the load-balancing loss, averaged over layers; see
            `fedpax.models.mixture_of_experts.routing_losses`.
        router_z_weight: weight of the mean of log(sum(exp(router logits)))^2, averaged over layers.
        tokens_per_chunk: tokens per device whose logits exist at once.

    Returns:
        `loss_fn(params, batch) -> (loss, aux)` for batches as in `next_token_loss`. `aux` has

        - `tokens`, the sum of the mask;
        - `cross_entropy`, the loss without the other terms, if there are any;
        - for a mixture of experts `load_balance` and `router_z`, unweighted, averaged over layers
          and, in a pipeline, over microbatches.

    Example:
        >>> config = TransformerConfig(num_layers=2, embed_dim=64, num_heads=2)
        >>> params = jax.jit(transformer(config).init)(jax.random.key(0))
        >>> text = jnp.frombuffer(b"to be or not to be", jnp.uint8).astype(int)[None]
        >>> batch = {"inputs": text[:, :-1], "targets": text[:, 1:]}
        >>> loss, aux = jax.jit(transformer_loss(config, z_loss_weight=1e-4))(params, batch)
        >>> bool(loss > aux["cross_entropy"] > 0), int(aux["tokens"])
        (True, 17)
    """
    model = transformer(config)

    def loss_fn(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        module = model.bind(params)
        features, auxiliary = module.hidden(
            batch["inputs"], batch.get("segments"), batch.get("positions")
        )
        targets, mask = batch["targets"], batch.get("mask")
        loss, cross_entropy = chunked_cross_entropy(
            features,
            module.output_table[...],
            targets,
            mask,
            softcap=config.logit_softcap,
            z_loss_weight=z_loss_weight,
            tokens_per_chunk=tokens_per_chunk,
        )
        tokens = jnp.float32(targets.size) if mask is None else jnp.sum(mask, dtype=jnp.float32)
        auxiliary = {name: value / config.num_layers for name, value in auxiliary.items()}
        weights = {"load_balance": load_balance_weight, "router_z": router_z_weight}
        terms = [weights[name] * x for name, x in auxiliary.items() if weights.get(name)]
        if terms or z_loss_weight:
            auxiliary["cross_entropy"] = cross_entropy
        return sum(terms, loss), {"tokens": tokens, **auxiliary}

    return loss_fn


def classification_loss(apply: Callable[..., jax.Array], *, field: str = "image") -> ModelLoss:
    """Make the loss of a classifier: the mean cross-entropy of the labels, in nats.

    Args:
        apply: `apply(params, images)` returns logits `[batch, classes]`.
        field: the field of a batch that `apply` takes.

    Returns:
        `loss_fn(params, batch) -> (loss, {"accuracy": fraction of labels with the largest
        logit})`. A batch has `field`, `[batch, ...]`, and `label`, integers `[batch]`; it may have
        `mask`, float32 `[batch]`, 0 where an example does not count, and `dropout_seed`, uint32
        `[batch]`, the third argument of `apply`.

    Example:
        >>> loss_fn = classification_loss(lambda w, x: x @ w)
        >>> batch = {"image": jnp.eye(2), "label": jnp.array([0, 0])}
        >>> loss, aux = loss_fn(jnp.eye(2), batch)
        >>> aux["accuracy"].item()
        0.5
    """

    def loss_fn(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        seeds = [batch["dropout_seed"]] if "dropout_seed" in batch else []
        logits = apply(params, batch[field], *seeds)
        label, mask = batch["label"], batch.get("mask")
        correct = (jnp.argmax(logits, axis=-1) == label).astype(jnp.float32)
        return cross_entropy(logits, label, mask), {"accuracy": _mean(correct, mask)}

    return loss_fn


def squared_error_loss(apply: Callable[..., jax.Array], *, field: str = "features") -> ModelLoss:
    """Make the loss of a regression: the mean squared error.

    Args:
        apply: `apply(params, features)` returns numbers `[batch, 1]`.
        field: the field of a batch that `apply` takes.

    Returns:
        `loss_fn(params, batch) -> (loss, {})`. A batch is as in `classification_loss`, with floats
        as `label`.

    Example:
        >>> loss_fn = squared_error_loss(lambda w, x: x @ w)
        >>> batch = {"features": jnp.eye(2), "label": jnp.array([1.0, 5.0])}
        >>> loss_fn(jnp.array([[2.0], [3.0]]), batch)[0].item()
        2.5
    """

    def loss_fn(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        error = apply(params, batch[field])[..., 0] - batch["label"]
        return _mean(jnp.square(error).astype(jnp.float32), batch.get("mask")), {}

    return loss_fn


def l2_regularized(loss_fn: ModelLoss, factor: float) -> ModelLoss:
    """Add `factor` times the sum of the squared weights of matmuls and convolutions to a loss."""
    # Their key is `"kernel"`. Their biases are added too; normalization is not.

    def regularized(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        loss, aux = loss_fn(params, batch)
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/"): leaf
            for path, leaf in jax.tree.leaves_with_path(params)
        }
        layers = {layer for layer, _, name in leaves if name == "kernel"}
        for (layer, _, _), leaf in leaves.items():
            if layer in layers:
                loss += factor * jnp.sum(jnp.square(leaf.astype(loss.dtype)))
        return loss, aux

    return regularized


def next_word_loss(
    apply: Callable[[chex.ArrayTree, jax.Array], jax.Array], words: int
) -> ModelLoss:
    """Make the loss of a language model of words, with the parts of its accuracy on known words."""
    # Targets 1 to `words` are words of the vocabulary; other targets are padding, the unknown word,
    # and begin and end of a sentence. The quotient of the means of `known_correct` and `known` is
    # the accuracy on known words.

    def loss_fn(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = apply(params, batch["inputs"])
        targets, mask = batch["targets"], batch["mask"]
        known = (targets >= 1) & (targets <= words)
        correct = known & (jnp.argmax(logits, axis=-1) == targets)
        shares = {"known": known, "known_correct": correct}
        aux = {name: _mean(share.astype(jnp.float32), mask) for name, share in shares.items()}
        return cross_entropy(logits, targets, mask), aux

    return loss_fn


def _mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return jnp.mean(values)
    # `where` besides the product: a value of weight 0 may be infinite.
    total = jnp.sum(jnp.where(mask > 0, values * mask, 0))
    weight = jnp.sum(mask, dtype=values.dtype)
    return total / jnp.where(weight > 0, weight, 1)


def accumulate_gradients(loss_fn: ModelLoss, grad_accum_steps: int) -> ModelLoss:
    """Split the batch of a loss into microbatches that run one after another.

    The loss, its gradient and its metrics are means over microbatches, weighted by the sum of the
    microbatch's `mask`. They equal those of the whole batch if the loss is a mean over the mask.
    The gradient accumulates in float32 (float64 for float64 parameters), and each microbatch is
    recomputed in the backward pass.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`, all of them means. The metric
            `tokens` is a sum.
        grad_accum_steps: number of microbatches, a divisor of the number of rows. 1 returns
            `loss_fn` itself.

    Returns:
        A loss of the same signature. Without `mask`, microbatches weigh the same. A microbatch
        whose mask is 0 everywhere is not read, unless all of them are.

    Raises:
        ValueError: `grad_accum_steps` is below 1 or does not divide the number of rows.

    Example:
        >>> loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
        >>> batch = {"x": jnp.arange(4.0)}
        >>> jax.grad(accumulate_gradients(loss_fn, 2), has_aux=True)(1.0, batch)[0].item()
        -1.0
    """
    if grad_accum_steps < 1:
        raise ArgumentError(
            f"accumulate_gradients(): grad_accum_steps={grad_accum_steps}, expected at least 1 "
            "microbatch."
        )
    if grad_accum_steps == 1:
        return loss_fn

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % grad_accum_steps:
            raise ArgumentError(
                f"accumulate_gradients(): grad_accum_steps={grad_accum_steps} does not divide a "
                f"batch of {x.shape[0]} rows. Change one of the two numbers."
            )
        # Strided, not contiguous: a device that holds a block of rows keeps part of each
        # microbatch, and no row moves between devices.
        rows = x.shape[0] // grad_accum_steps
        return jnp.moveaxis(x.reshape(rows, grad_accum_steps, *x.shape[1:]), 1, 0)

    def accumulated(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        microbatches = jax.tree.map(split, dict(batch))
        weights = jnp.ones(grad_accum_steps, jnp.float32)
        if MASK in microbatches:
            mask = microbatches[MASK]
            weights = jnp.sum(mask, axis=range(1, mask.ndim), dtype=jnp.float32)
            is_read = (weights > 0) | ~jnp.any(weights > 0)
            weights = jnp.where(is_read, jnp.where(weights > 0, weights, 1), 0)
            # An empty microbatch may hold NaN, which a weight of 0 would not remove.
            places = jnp.where(is_read, jnp.arange(grad_accum_steps), jnp.argmax(is_read))
            microbatches = jax.tree.map(lambda x: x[places], microbatches)
        sums = jax.tree.map(_gradient_sum, params)

        @jax.checkpoint
        def micro_loss(
            params: chex.ArrayTree, sums: chex.ArrayTree, microbatch: Batch
        ) -> chex.ArrayTree:
            loss, aux = loss_fn(jax.tree.map(_add_gradient_to, params, sums), microbatch)
            return loss, dict(aux or {})

        types = jax.eval_shape(
            lambda: micro_loss(params, sums, jax.tree.map(lambda x: x[0], microbatches))
        )
        is_sum = (False, {name: name == "tokens" for name in types[1]})

        def add(
            totals: chex.ArrayTree, step: tuple[jax.Array, Batch]
        ) -> tuple[chex.ArrayTree, None]:
            weight, microbatch = step
            scales = jax.tree.map(lambda s: jnp.sign(weight) if s else weight, is_sum)
            value = micro_loss(params, sums, microbatch)
            return jax.tree.map(lambda t, s, x: t + s * x, totals, scales, value), None

        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.result_type(x, jnp.float32)), types)
        totals, _ = jax.lax.scan(add, start, (weights, microbatches))
        return jax.tree.map(lambda t, s: t if s else t / jnp.sum(weights), totals, is_sum)

    return accumulated


# The gradient of a loop's constants accumulates in their dtype. A constant beside the parameter
# gets it in float32 at least. A wide copy of a frozen parameter would take memory.


@jax.custom_jvp
def _gradient_sum(x: jax.Array) -> jax.Array:
    """Return zeros that pass their gradient on to a parameter."""
    return jnp.zeros(jnp.shape(x), _accurate_dtype(x))


@_gradient_sum.defjvp
def _(x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _gradient_sum(*x), dx[0].astype(_accurate_dtype(x[0]))


@jax.custom_jvp
def _add_gradient_to(x: jax.Array, total: jax.Array) -> jax.Array:
    """Return a parameter whose gradient is added to that of `total`."""
    return x


@_add_gradient_to.defjvp
def _(xs: tuple[jax.Array, jax.Array], d: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
    return xs[0], d[1].astype(jnp.result_type(xs[0]))


def _accurate_dtype(x: Any) -> Any:
    dtype = jnp.result_type(x)
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
