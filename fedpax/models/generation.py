"""Generation of text: one token after the other, with keys and values of the past kept."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from fedpax.models.attention.kernels import causal_attention
from fedpax.models.attention.layer import attend as attend_masked
from fedpax.models.attention.layer import visible
from fedpax.models.nnx_functional import Params
from fedpax.models.transformer import transformer
from fedpax.models.transformer_config import TransformerConfig
from fedpax.parallel.axes import constrain

KeysAndValues: TypeAlias = tuple[jax.Array, jax.Array]
CACHE = ("batch", None, "kv_heads", None)


def generate(
    params: Params,
    config: TransformerConfig,
    prompt: jax.Array,
    *,
    num_tokens: int,
    prompt_lengths: jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> jax.Array:
    """Continues prompts, token by token, in one compiled program.

    The prompt goes through the model at once; then each token goes through it alone, and attends
    to the keys and values that the tokens before it left.

    Args:
      params: the transformer's parameters.
      config: the transformer.
      prompt: integers [batch, sequence], at least one token a row.
      num_tokens: how many tokens to add to each row.
      prompt_lengths: integers [batch], how many tokens of a row are its prompt; the others, behind them,
        are not looked at. All by default.
      key: a random key; needed where the temperature is not 0.
      temperature: logits are divided by it; 0 takes the most likely token.
      top_p: only the most likely tokens that together have this probability are drawn from
        ("nucleus sampling"); 1 draws from all.

    Returns:
      int32 [batch, num_tokens], what follows each prompt.

    Raises:
      ValueError: a number out of range, a prompt or prompt_lengths of another shape, or a mesh with
        explicit axes.

    Example:
      >>> config = TransformerConfig(num_layers=2, embed_dim=64, num_heads=2)
      >>> params = jax.jit(transformer(config).init)(jax.random.key(0))
      >>> prompt = jnp.frombuffer(b"to be", jnp.uint8)[None]
      >>> generate(params, config, prompt, num_tokens=3, temperature=0.0).shape
      (1, 3)

    Reference: Holtzman et al., "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751),
    section 3.1, for nucleus sampling.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or not prompt.size or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(
            f"prompt has shape {prompt.shape} and dtype {prompt.dtype}: expected integers [batch, "
            "sequence] with at least one token. Give one prompt as prompt[None]."
        )
    if num_tokens < 1:
        raise ValueError(
            f"num_tokens={num_tokens}: expected how many tokens to generate, at least 1."
        )
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature={temperature} and top_p={top_p}: expected a temperature of at least 0 "
            "and 0 < top_p <= 1. For the most likely tokens set temperature=0."
        )
    if key is None and temperature > 0:
        raise ValueError(
            f"key=None with temperature={temperature}: pass key=jax.random.key(seed), or set "
            "temperature=0 for the most likely tokens."
        )
    batch, length = prompt.shape
    prompt_lengths = (
        jnp.full(batch, length) if prompt_lengths is None else jnp.asarray(prompt_lengths)
    )
    if prompt_lengths.shape != (batch,):
        raise ValueError(
            f"prompt_lengths has shape {prompt_lengths.shape}, but the prompt {prompt.shape}: expected one "
            f"number for each row, shape ({batch},)."
        )
    known = not isinstance(prompt_lengths, jax.core.Tracer)
    if known and (np.min(prompt_lengths) < 1 or np.max(prompt_lengths) > length):
        raise ValueError(
            f"prompt_lengths={np.asarray(prompt_lengths)}: expected 1 to {length}, the prompt's tokens in a row."
        )
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "generate() got a mesh with explicit axes, along which a cache cannot be written to: "
            "make it with axis_types=jax.sharding.AxisType.Auto."
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


def nucleus_filter(logits: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """Rules out all tokens but the most likely ones that together have a probability.

    Args:
      logits: [..., vocab_size].
      top_p: the probability, above 0. The token that reaches it is the last one that stays.

    Returns:
      The logits, -inf for tokens that are ruled out.

    Example:
      >>> nucleus_filter(jnp.log(jnp.array([0.2, 0.5, 0.3])), 0.6) > -jnp.inf
      Array([False,  True,  True], dtype=bool)
    """
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
    rows, length = jnp.arange(prompt.shape[0]), prompt.shape[1]

    def choose(features: jax.Array, key: jax.Array) -> jax.Array:
        """The next token after features [batch, 1, embed_dim]."""
        logits = constrain(model.logits(model.final_norm(features))[:, 0], ("batch", None))
        drawn = nucleus_filter(logits / jnp.where(temperature > 0, temperature, 1), top_p)
        random = jax.random.categorical(key, drawn)
        return jnp.where(temperature > 0, random, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def read(
        _: None, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KeysAndValues]:
        """Attends within the prompt, and keeps its keys and values with room for more."""
        attended = causal_attention(
            query, key, value, sliding_window=config.sliding_window, implementation=config.attention
        )
        room = [(0, 0), (0, num_tokens), (0, 0), (0, 0)]
        keys, values = (constrain(jnp.pad(x, room), CACHE) for x in (key, value))
        return attended, (keys, values)

    def write(
        cache: KeysAndValues, place: jax.Array, new: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        return tuple(old.at[rows, place].set(x[:, 0]) for old, x in zip(cache, new, strict=True))

    def step(carry: tuple[Any, ...], key: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
        cache, token, place = carry

        def attend(
            own: KeysAndValues, query: jax.Array, *new: jax.Array
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            """Attends to what lies behind, and keeps this token's key and value alone."""
            keys, values = write(own, place, new)
            mask = visible(place[:, None], jnp.arange(keys.shape[1])[None], config.sliding_window)
            return attend_masked(query, keys, values, mask), new

        x, rotation = model.embed(token[:, None]), model.rotation(place[:, None], 1)
        x, new = model.run_cached(x, rotation, attend, cache)
        cache = jax.vmap(write, in_axes=(0, None, 0))(cache, place, new)
        return (cache, choose(x, key), place + 1), token

    x, cache = model.run_cached(model.embed(prompt), model.rotation(None, length), read)
    first, *others = jax.random.split(key, num_tokens)
    last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)
    state = (cache, choose(last, first), prompt_lengths)
    if not others:
        return state[1][:, None]
    (_, token, _), before = jax.lax.scan(step, state, jnp.stack(others))
    return jnp.concatenate([before.T, token[:, None]], axis=1)
