"""Text generation."""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError
from fedpax.models.attention.causal import causal_attention, masked_attention, visible
from fedpax.models.transformer import transformer
from fedpax.models.transformer_config import TransformerConfig
from fedpax.parallel.axes import constrain

KeysAndValues: TypeAlias = tuple[jax.Array, jax.Array]
Carry: TypeAlias = tuple[KeysAndValues, jax.Array, jax.Array]  # cache, last token, its position
CACHE_AXES = ("batch", None, "kv_heads", None)


def generate(
    params: Params,
    config: TransformerConfig,
    prompt: Int[Array, "batch seq"],
    *,
    num_tokens: int,
    prompt_lengths: Int[Array, " batch"] | None = None,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Int[Array, "batch num_tokens"]:
    """Continue prompts, token by token, in one compiled program.

    Args:
        params: the transformer's parameters.
        config: the transformer's configuration.
        prompt: integers `[batch, seq_len]` from 0 to `vocab_size` - 1, at least one token per row.
        num_tokens: number of tokens to generate for each row.
        prompt_lengths: integers `[batch]`, the prompt's tokens in each row; later ones are ignored.
            Default None: all.
        key: a random key. Needed unless `temperature` is 0.
        temperature: divides the logits. 0 takes the most likely token (greedy decoding).
        top_p: sample from the most likely tokens whose probabilities add up to it (nucleus); 1:
            all.

    Returns:
        int32 `[batch, num_tokens]`, the continuation of each prompt.

    Raises:
        ValueError: a number or a token is out of range, `prompt` or `prompt_lengths` has the wrong
            shape or dtype, or the mesh has explicit axes.

    Example:
        >>> config = TransformerConfig(num_layers=2, embed_dim=64, num_heads=2)
        >>> params = jax.jit(transformer(config).init)(jax.random.key(0))
        >>> prompt = jnp.frombuffer(b"to be", jnp.uint8)[None]
        >>> generate(params, config, prompt, num_tokens=3, temperature=0.0).shape
        (1, 3)

    Reference:
        Holtzman et al. (arXiv:1904.09751), section 3.1, for nucleus sampling.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or not prompt.size or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ArgumentError(
            f"prompt has shape {prompt.shape} and dtype {prompt.dtype}: expected integers [batch, "
            "sequence] with at least one token. Pass one prompt as prompt[None]."
        )
    if num_tokens < 1:
        raise ArgumentError(f"num_tokens={num_tokens}: expected at least 1 token to generate.")
    if not temperature >= 0 or not 0 < top_p <= 1:
        raise ArgumentError(
            f"temperature={temperature} and top_p={top_p}: expected a temperature of at least 0 "
            "and 0 < top_p <= 1. For greedy decoding set temperature=0."
        )
    if key is None and temperature > 0:
        raise ArgumentError(
            f"key=None with temperature={temperature}: pass key=jax.random.key(seed), or set "
            "temperature=0 for greedy decoding."
        )
    batch, seq_len = prompt.shape
    prompt_lengths = (
        jnp.full(batch, seq_len) if prompt_lengths is None else jnp.asarray(prompt_lengths)
    )
    if prompt_lengths.shape != (batch,):
        raise ArgumentError(
            f"prompt_lengths has shape {prompt_lengths.shape}, but the prompt {prompt.shape}: "
            f"expected one number for each row, shape ({batch},)."
        )
    known = not isinstance(prompt_lengths, jax.core.Tracer)
    if known and (np.min(prompt_lengths) < 1 or np.max(prompt_lengths) > seq_len):
        raise ArgumentError(
            f"prompt_lengths={np.asarray(prompt_lengths)}: expected 1 to {seq_len}, the tokens in "
            "a row of the prompt."
        )
    if known and not isinstance(prompt, jax.core.Tracer) and prompt.is_fully_addressable:
        _check_tokens(np.asarray(prompt), np.asarray(prompt_lengths), config.vocab_size)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ArgumentError(
            "generate() got a mesh with explicit axes, along which the cache cannot be updated. "
            "Make the mesh with axis_types=jax.sharding.AxisType.Auto."
        )
    key = jax.random.key(0) if key is None else key
    return _generate(
        params,
        prompt,
        prompt_lengths,
        key,
        temperature,
        top_p,
        config=config,
        num_tokens=num_tokens,
    )


def _check_tokens(prompt: np.ndarray, lengths: np.ndarray, vocab_size: int) -> None:
    """Check that the tokens of prompts are in the vocabulary."""
    is_read = np.arange(prompt.shape[1]) < lengths[:, None]
    wrong = np.argwhere(is_read & ((prompt < 0) | (prompt >= vocab_size)))
    if len(wrong):
        row, position = wrong[0]
        raise ArgumentError(
            f"prompt[{row}, {position}]={prompt[row, position]}: expected a token from 0 to "
            f"{vocab_size - 1}, because the model has vocab_size={vocab_size}. Use the tokenizer "
            "that the model was trained with."
        )


def nucleus_filter(
    logits: Float[Array, "*batch vocab"], top_p: jax.Array | float
) -> Float[Array, "*batch vocab"]:
    """Set the logits outside the nucleus to -inf."""
    # The nucleus: the fewest most likely tokens whose probabilities add up to `top_p` or more.
    probabilities = jax.nn.softmax(logits, axis=-1)
    descending = jnp.sort(probabilities, axis=-1, descending=True)
    before = jnp.cumsum(descending, axis=-1) - descending
    smallest = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probabilities >= smallest, logits, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("config", "num_tokens"))
def _generate(
    params: Params,
    prompt: jax.Array,
    prompt_lengths: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    *,
    config: TransformerConfig,
    num_tokens: int,
) -> jax.Array:
    model = transformer(config).bind(params)
    rows, seq_len = jnp.arange(prompt.shape[0]), prompt.shape[1]

    def sample(features: jax.Array, key: jax.Array) -> jax.Array:
        """Return the next token from the features [batch, 1, embed_dim] of the last one."""
        logits = constrain(model.logits(model.final_norm(features))[:, 0], ("batch", None))
        filtered = nucleus_filter(logits / jnp.where(temperature > 0, temperature, 1), top_p)
        sampled = jax.random.categorical(key, filtered)
        return jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def prefill(
        _: None, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KeysAndValues]:
        """Attend within the prompt; return a cache with room for the generated tokens."""
        attended = causal_attention(
            query, key, value, sliding_window=config.sliding_window, implementation=config.attention
        )
        padding = [(0, 0), (0, num_tokens), (0, 0), (0, 0)]
        keys, values = (constrain(jnp.pad(x, padding), CACHE_AXES) for x in (key, value))
        return attended, (keys, values)

    def update(cache: KeysAndValues, position: jax.Array, new: KeysAndValues) -> KeysAndValues:
        keys, values = (
            old.at[rows, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True)
        )
        return keys, values

    def step(carry: Carry, key: jax.Array) -> tuple[Carry, jax.Array]:
        cache, token, position = carry

        def attend(
            layer_cache: KeysAndValues, query: jax.Array, key: jax.Array, value: jax.Array
        ) -> tuple[jax.Array, KeysAndValues]:
            """Attend to the cache and the token itself; return only the token's key and value."""
            keys, values = update(layer_cache, position, (key, value))
            mask = visible(
                position[:, None], jnp.arange(keys.shape[1])[None], config.sliding_window
            )
            return masked_attention(query, keys, values, mask), (key, value)

        x, rotation = model.embed(token[:, None]), model.rotation(position[:, None], 1)
        x, new = model.run_cached(x, rotation, attend, cache)
        cache = jax.vmap(update, in_axes=(0, None, 0))(cache, position, new)
        return (cache, sample(x, key), position + 1), token

    x, cache = model.run_cached(model.embed(prompt), model.rotation(None, seq_len), prefill)
    first_key, *other_keys = jax.random.split(key, num_tokens)
    last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)
    state = (cache, sample(last, first_key), prompt_lengths)
    if not other_keys:
        return state[1][:, None]
    (_, token, _), before = jax.lax.scan(step, state, jnp.stack(other_keys))
    return jnp.concatenate([before.T, token[:, None]], axis=1)
