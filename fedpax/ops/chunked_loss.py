"""Cross-entropy for large vocabularies, computed one chunk of tokens at a time."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpax.parallel.axes import constrain, entry_axes, explicit_spec, partition_spec

TOKENS_PER_CHUNK = 1024
TOKEN_AXES = ("batch", "sequence")


_Pair: TypeAlias = tuple[jax.Array, jax.Array]


class _Options(NamedTuple):
    softcap: float | None
    z_loss_weight: float
    tokens_per_chunk: int


def chunked_cross_entropy(
    features: Float[Array, "batch seq embed"],
    table: Float[Array, "vocab embed"],
    targets: Int[Array, "batch seq"],
    mask: Float[Array, "batch seq"] | None = None,
    *,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the mean of -log softmax(logits)[target] with logits = features table^T.

    Each device computes the logits of `tokens_per_chunk` tokens, their loss and its gradient, then
    those of the next chunk: the float32 logits of all tokens never exist at once.

    On a mesh that shards tokens, one reduction at the end adds the table's gradients. On a mesh
    that shards the vocabulary, the logits stay sharded.

    There is no forward-mode derivative.

    Args:
        features: `[batch, seq_len, embed_dim]`, floating. The logits are computed in this dtype
            and summed in float32.
        table: `[vocab_size, embed_dim]`, float32.
        targets: integers `[batch, seq_len]` from 0 to vocab_size - 1.
        mask: `[batch, seq_len]`, the weight of each target in the mean. Default None: every weight
            is 1. If all weights are 0, the loss is 0.
        softcap: replaces each logit by cap tanh(logit / cap). Default None: no cap.
        z_loss_weight: weight of the mean of log(sum(exp(logits)))^2.
        tokens_per_chunk: tokens per device whose logits exist at once.

    Returns:
        The loss with the z-loss, and the cross-entropy alone, which is not differentiated. Both
        are float32 (float64 for float64 features).

    Example:
        >>> features, table = jnp.eye(4)[None], 5.0 * jnp.eye(4)
        >>> targets = jnp.array([[0, 1, 2, 3]])
        >>> loss, _ = chunked_cross_entropy(features, table, targets, tokens_per_chunk=2)
        >>> round(float(loss), 4)  # log(e^5 + 3) - 5
        0.02

    Reference:
        Gemma 2 (arXiv:2408.00118), section 2 (soft-cap); PaLM (arXiv:2204.02311), section 5
        (z-loss).
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
    """Return the weighted sums of the loss and of the cross-entropy."""
    sums, _ = _scan(features, table, targets, weights, options, with_gradient=False)
    return sums


def _forward(*arguments: Any) -> tuple[_Pair, _Pair]:
    return _scan(*arguments, with_gradient=True)


def _backward(
    options: _Options, gradients: _Pair, cotangents: _Pair
) -> tuple[jax.Array, jax.Array, None, None]:
    scale, _ = cotangents
    d_features, d_table = ((scale * g).astype(g.dtype) for g in gradients)
    return d_features, d_table, None, None


_sums.defvjp(_forward, _backward)


def _scan(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: _Options,
    *,
    with_gradient: bool,
) -> tuple[_Pair, Any]:
    """Return the two sums over all chunks and, if `with_gradient`, the gradients of the first."""
    gathered = constrain(table.astype(features.dtype), ("vocab", None))
    chunking = _Chunking.of(features.shape, options.tokens_per_chunk)
    chunks = tuple(chunking.split(x) for x in (features, targets, weights))

    def compute(chunk: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], Any]:
        """Return the sums over a chunk and the gradient with respect to its features."""
        inputs, target, weight = chunk
        loss, cross_entropy, d_logits = _chunk_loss(inputs, gathered, target, weight, options)
        if not with_gradient:
            return (loss, cross_entropy), None
        spec = explicit_spec((*TOKEN_AXES, None, None), inputs.shape)
        d_features = jnp.einsum("srcv,vd->srcd", d_logits, gathered, out_sharding=spec)
        d_table = jnp.einsum("srcv,srcd->srvd", d_logits, inputs, preferred_element_type=loss.dtype)
        d_table = constrain(d_table, (*TOKEN_AXES, "vocab", None))
        return (loss, cross_entropy, d_table), constrain(d_features, (*TOKEN_AXES, None, None))

    def step(sums: tuple[jax.Array, ...], chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        more, d_features = compute(chunk)
        return jax.tree.map(jnp.add, sums, more), d_features

    # The first chunk runs before the loop, so that the loop's carry starts with the right sharding.
    sums, d_features = compute(jax.tree.map(lambda x: x[0], chunks))
    d_features = jax.tree.map(lambda x: x[None], d_features)
    if chunking.num_chunks > 1:
        sums, later = jax.lax.scan(step, sums, jax.tree.map(lambda x: x[1:], chunks))
        d_features = jax.tree.map(lambda *x: jnp.concatenate(x), d_features, later)
    loss, cross_entropy, *d_table = (jnp.sum(x, axis=(0, 1)) for x in sums)
    if not with_gradient:
        return (loss, cross_entropy), None
    gradient = constrain(d_table[0], ("vocab", "embed")).astype(table.dtype)
    return (loss, cross_entropy), (chunking.join(d_features), gradient)


def _chunk_loss(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: _Options,
) -> tuple[jax.Array, ...]:
    """Return each shard's sums, and the gradient of the loss with respect to the raw logits."""
    logits = jnp.einsum("srcd,vd->srcv", features, table, preferred_element_type=weights.dtype)
    logits = constrain(logits, (*TOKEN_AXES, None, "vocab"))
    slope: float | jax.Array = 1.0
    if options.softcap is not None:
        squeezed = jnp.tanh(logits / options.softcap)
        logits, slope = options.softcap * squeezed, 1 - jnp.square(squeezed)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # A comparison, not an index: indexing an axis that the mesh shards would gather it.
    is_target = targets[..., None] == jnp.arange(table.shape[0])
    cross_entropy = log_sum - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    loss = cross_entropy + options.z_loss_weight * jnp.square(log_sum)
    scale = 1 + 2 * options.z_loss_weight * log_sum
    d_logits = jnp.exp(logits - log_sum[..., None]) * scale[..., None] - is_target
    d_logits = (d_logits * slope * weights[..., None]).astype(features.dtype)
    totals = (jnp.sum(weights * x, axis=-1) for x in (loss, cross_entropy))
    return *totals, d_logits


class _Chunking(NamedTuple):
    """The split of tokens [batch, seq_len] into chunks [chunks, *shards, tokens]."""

    batch: int
    seq_len: int
    shards: tuple[int, int]  # of the rows, and of the sequence
    num_chunks: int
    size: int  # tokens of a shard in a chunk. The last chunk is padded with tokens of weight 0

    @classmethod
    def of(cls, shape: tuple[int, ...], tokens_per_chunk: int) -> _Chunking:
        """Split features of a shape as the mesh in context shards them."""
        batch, seq_len = shape[:2]
        sizes = jax.sharding.get_abstract_mesh().shape
        entries = partition_spec(TOKEN_AXES, shape=(batch, seq_len))
        rows, parts = (math.prod(sizes[name] for name in entry_axes(entry)) for entry in entries)
        tokens = batch // rows * (seq_len // parts)
        chunks = -(-tokens // tokens_per_chunk)
        return cls(batch, seq_len, (rows, parts), chunks, -(-tokens // chunks))

    def split(self, x: jax.Array) -> jax.Array:
        """Reshape [batch, seq_len, ...] to [chunks, row shards, sequence shards, size, ...]."""
        (rows, parts), rest = self.shards, x.shape[2:]
        x = x.reshape(rows, self.batch // rows, parts, self.seq_len // parts, *rest)
        x = x.swapaxes(1, 2).reshape(rows, parts, -1, *rest)
        missing = self.num_chunks * self.size - x.shape[2]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * len(rest)])
        x = x.reshape(rows, parts, self.num_chunks, self.size, *rest)
        return jnp.moveaxis(x, 2, 0)

    def join(self, chunks: jax.Array) -> jax.Array:
        """Invert `split`."""
        (rows, parts), rest = self.shards, chunks.shape[4:]
        x = jnp.moveaxis(chunks, 0, 2).reshape(rows, parts, self.num_chunks * self.size, *rest)
        x = x[:, :, : self.batch // rows * (self.seq_len // parts)]
        x = x.reshape(rows, parts, self.batch // rows, self.seq_len // parts, *rest)
        return x.swapaxes(1, 2).reshape(self.batch, self.seq_len, *rest)
