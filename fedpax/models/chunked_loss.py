"""The cross-entropy of large vocabularies: logits of a few tokens at a time, and their gradient."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.parallel.axes import constrain, explicit_spec, partition_spec

TOKENS_PER_CHUNK = 1024
TOKENS = ("batch", "sequence")


class _Options(NamedTuple):
    softcap: float | None
    z_loss_weight: float
    tokens_per_chunk: int


def chunked_cross_entropy(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Computes the mean of -log softmax(logits)[target] with logits = features table^T.

    A device computes logits of `tokens_per_chunk` tokens, their loss and its gradient, then those of the
    next: float32 logits of all tokens never exist. The gradient is made on the way and kept until
    the backward pass asks for it, which needs no logits then. Where the mesh shards tokens, each
    device sums the table's gradient over its own, and one reduction at the end joins them; where
    it shards the vocabulary, logits stay in their parts.

    It has no forward-mode derivative; `fedpax.models.losses.cross_entropy` has.

    Args:
      features: [batch, sequence, embed_dim], floating; logits are computed in their dtype, with sums
        in float32.
      table: [vocab_size, embed_dim], float32.
      targets: integers [batch, sequence] from 0 to vocab_size - 1.
      mask: [batch, sequence], the weight of each target in the mean, 1 for all by default. Where
        all weights are 0, the loss is 0.
      softcap: squeezes logits to cap tanh(logits / cap).
      z_loss_weight: weight of the mean of log(sum(exp(logits)))^2, which keeps logits near 0.
      tokens_per_chunk: tokens of a device at a time; fewer need less memory.

    Returns:
      The loss with the z-loss, and the cross-entropy alone, which is not differentiated: both
      float32 (float64 for float64 features).

    Example:
      >>> features, table = jnp.eye(4)[None], 5.0 * jnp.eye(4)
      >>> loss, _ = chunked_cross_entropy(features, table, jnp.array([[0, 1, 2, 3]]), tokens_per_chunk=2)
      >>> round(float(loss), 4)  # log(e^5 + 3) - 5
      0.02

    Reference: Gemma 2 (arXiv:2408.00118), section 2, for the soft-cap; PaLM (arXiv:2204.02311),
    section 5, for the z-loss.
    """
    accurate = jnp.promote_types(features.dtype, jnp.float32)
    weights = jnp.ones(targets.shape, accurate) if mask is None else mask.astype(accurate)
    options = _Options(softcap, z_loss_weight, tokens_per_chunk)
    total, cross_entropy = _sums(features, table, targets, weights, options)
    weight = jnp.sum(weights)
    weight = jnp.where(weight > 0, weight, 1)
    return total / weight, jax.lax.stop_gradient(cross_entropy / weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of loss and of cross-entropy."""
    sums, _ = _scan(features, table, targets, weights, options, with_gradient=False)
    return sums


def _forward(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: _Options,
) -> tuple[Any, Any]:
    return _scan(features, table, targets, weights, options, with_gradient=True)


def _backward(_: _Options, gradients: Any, cotangents: Any) -> tuple[Any, ...]:
    scale, _ = cotangents
    of_features, of_table = ((scale * g).astype(g.dtype) for g in gradients)
    return of_features, of_table, None, None


_sums.defvjp(_forward, _backward)


def _scan(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: _Options,
    *,
    with_gradient: bool,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Goes through the tokens: the two sums, and the gradients of the first, if wanted."""
    gathered = constrain(table.astype(features.dtype), ("vocab", None))
    layout = _Layout.of(features.shape, options.tokens_per_chunk)
    chunks = tuple(layout.split(x) for x in (features, targets, weights))

    def compute(chunk: Any) -> tuple[Any, Any]:
        """Sums over the chunk, and the gradient with respect to its own features."""
        own, target, weight = chunk
        loss, cross_entropy, of_logits = _of_chunk(own, gathered, target, weight, options)
        if not with_gradient:
            return (loss, cross_entropy), None
        spec = explicit_spec((*TOKENS, None, None), own.shape)
        of_features = jnp.einsum("srcv,vd->srcd", of_logits, gathered, out_sharding=spec)
        of_table = jnp.einsum("srcv,srcd->srvd", of_logits, own, preferred_element_type=loss.dtype)
        of_table = constrain(of_table, (*TOKENS, "vocab", None))
        return (loss, cross_entropy, of_table), constrain(of_features, (*TOKENS, None, None))

    def step(sums: Any, chunk: Any) -> tuple[Any, Any]:
        more, of_features = compute(chunk)
        return jax.tree.map(jnp.add, sums, more), of_features

    # The first chunk before the loop: its sums are what the loop starts from, laid out as they are.
    sums, of_features = compute(jax.tree.map(lambda x: x[0], chunks))
    of_features = jax.tree.map(lambda x: x[None], of_features)
    if layout.chunks > 1:
        sums, others = jax.lax.scan(step, sums, jax.tree.map(lambda x: x[1:], chunks))
        of_features = jax.tree.map(lambda *x: jnp.concatenate(x), of_features, others)
    loss, cross_entropy, *of_table = (jnp.sum(x, axis=(0, 1)) for x in sums)
    if not with_gradient:
        return (loss, cross_entropy), None
    gradient = constrain(of_table[0], ("vocab", "embed")).astype(table.dtype)
    return (loss, cross_entropy), (layout.join(of_features), gradient)


def _of_chunk(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: _Options,
) -> tuple[jax.Array, ...]:
    """Sums of loss and cross-entropy by shard, and the former's gradient of the raw logits."""
    logits = jnp.einsum("srcd,vd->srcv", features, table, preferred_element_type=weights.dtype)
    logits = constrain(logits, (*TOKENS, None, "vocab"))
    slope: Any = 1.0
    if options.softcap is not None:
        squeezed = jnp.tanh(logits / options.softcap)
        logits, slope = options.softcap * squeezed, 1 - jnp.square(squeezed)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # Compared instead of indexed: an index into an axis that the mesh shards would gather it.
    chosen = targets[..., None] == jnp.arange(table.shape[0])
    cross_entropy = log_sum - jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
    loss = cross_entropy + options.z_loss_weight * jnp.square(log_sum)
    pull = 1 + 2 * options.z_loss_weight * log_sum
    of_logits = jnp.exp(logits - log_sum[..., None]) * pull[..., None] - chosen
    of_logits = (of_logits * slope * weights[..., None]).astype(features.dtype)
    totals = (jnp.sum(weights * x, axis=-1) for x in (loss, cross_entropy))
    return *totals, of_logits


class _Layout(NamedTuple):
    """How tokens [batch, sequence] become chunks [chunks, *shards, tokens]: each device its own.

    Attributes:
      batch: rows.
      seq_len: tokens in a row.
      shards: parts into which the mesh cuts rows, and sequences.
      chunks: how many chunks follow each other.
      size: tokens of a part in a chunk; the last chunk is filled up with tokens of weight 0.
    """

    batch: int
    seq_len: int
    shards: tuple[int, int]
    chunks: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], tokens_per_chunk: int) -> _Layout:
        batch, seq_len = shape[:2]
        sizes = jax.sharding.get_abstract_mesh().shape
        entries = partition_spec(TOKENS, shape=(batch, seq_len))
        names = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
        rows, parts = (math.prod(sizes[name] for name in axes) for axes in names)
        tokens = batch // rows * (seq_len // parts)
        chunks = -(-tokens // tokens_per_chunk)
        return cls(batch, seq_len, (rows, parts), chunks, -(-tokens // chunks))

    def split(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, ...] to [chunks, rows' shards, sequence's shards, size, ...]."""
        (rows, parts), rest = self.shards, x.shape[2:]
        x = x.reshape(rows, self.batch // rows, parts, self.seq_len // parts, *rest)
        x = x.swapaxes(1, 2).reshape(rows, parts, -1, *rest)
        missing = self.chunks * self.size - x.shape[2]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * len(rest)])
        x = x.reshape(rows, parts, self.chunks, self.size, *rest)
        return jnp.moveaxis(x, 2, 0)

    def join(self, chunks: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        (rows, parts), rest = self.shards, chunks.shape[4:]
        x = jnp.moveaxis(chunks, 0, 2).reshape(rows, parts, self.chunks * self.size, *rest)
        x = x[:, :, : self.batch // rows * (self.seq_len // parts)]
        x = x.reshape(rows, parts, self.batch // rows, self.seq_len // parts, *rest)
        return x.swapaxes(1, 2).reshape(self.batch, self.seq_len, *rest)
