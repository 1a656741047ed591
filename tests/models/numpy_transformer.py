"""Reference transformer in NumPy: float64, with loops over heads, tokens and layers."""

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.models.transformer import TransformerConfig

Array = NDArray[np.float64]


def normalize(x: Array, scale: Array, config: TransformerConfig) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale


def frequencies(half: int, config: TransformerConfig) -> Array:
    """Return the rotation angle of each pair of features at position 1."""
    plain = config.rope_base ** (-np.arange(half) / half)
    if config.rope_scaling_factor is None:
        return plain
    result = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < config.rope_original_seq_len / 4:
            result.append(frequency)
        elif wavelength > config.rope_original_seq_len:
            result.append(frequency / config.rope_scaling_factor)
        else:
            smooth = (config.rope_original_seq_len / wavelength - 1) / (4 - 1)
            scaled = frequency / config.rope_scaling_factor
            result.append((1 - smooth) * scaled + smooth * frequency)
    return np.array(result)


def rotate(x: Array, position: int, config: TransformerConfig) -> Array:
    """Rotate the pairs (i, i + d / 2) of a head's d features as complex numbers."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    pairs = pairs * np.exp(1j * position * frequencies(half, config))
    return np.concatenate([pairs.real, pairs.imag])


def attention(x: Array, w: Any, config: TransformerConfig, segments: Any, positions: Any) -> Array:
    """Attend within one sequence x [tokens, embed_dim]."""
    result = np.zeros_like(x)
    window = config.sliding_window or len(x)
    for head in range(config.num_heads):
        group = head * config.num_kv_heads // config.num_heads
        query, key, value = (
            x @ w["query"][:, head],
            x @ w["key"][:, group],
            x @ w["value"][:, group],
        )
        if config.qk_norm:
            query = normalize(query, w["query_norm"]["scale"], config)
            key = normalize(key, w["key_norm"]["scale"], config)
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if segments[s] == segments[t] and t - s < window]
            q = rotate(query[t], positions[t], config)
            scores = np.array([q @ rotate(key[s], positions[s], config) for s in seen])
            weights = np.exp(scores / np.sqrt(len(q)))
            result[t] += (weights / weights.sum()) @ value[seen] @ w["output"][head]
    return result


def gelu(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def feed_forward(x: Array, w: Any, config: TransformerConfig) -> Array:
    if config.num_experts:
        return np.stack([mixture(token, w, config) for token in x])
    up = x @ w["up"]
    if config.feed_forward == "gelu":
        return gelu(up) @ w["down"]
    gate = x @ w["gate"]
    return (gate / (1 + np.exp(-gate)) * up) @ w["down"]


def mixture(x: Array, w: Any, config: TransformerConfig) -> Array:
    """Send one token x [embed_dim] through the experts with the largest logits."""
    scores = x @ w["router"]
    chosen = np.argsort(-scores)[: config.num_experts_per_token]
    weights = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
    total = np.zeros_like(x)
    for weight, e in zip(weights, chosen, strict=True):
        gate = x @ w["gate"][e]
        total += weight * (gate / (1 + np.exp(-gate)) * (x @ w["up"][e])) @ w["down"][e]
    return total


def logits(
    params: Any, tokens: Any, config: TransformerConfig, segments: Any = None, positions: Any = None
) -> Array:
    """Compute logits [batch, seq_len, vocab_size] of tokens [batch, seq_len]."""
    segments = np.ones_like(tokens) if segments is None else segments
    positions = np.arange(tokens.shape[1]) + 0 * tokens if positions is None else positions
    table = params["embedding"] if config.tied_embeddings else params["output"]
    result = []
    for row, segment, position in zip(tokens, segments, positions, strict=True):
        x = params["embedding"][row]
        if config.scale_embeddings:
            x = x * np.sqrt(config.embed_dim)
        for i in range(config.num_layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            y = normalize(x, layer["attention_norm"]["scale"], config)
            x = x + attention(y, layer["attention"], config, segment, position)
            y = normalize(x, layer["feed_forward_norm"]["scale"], config)
            x = x + feed_forward(y, layer["feed_forward"], config)
        result.append(normalize(x, params["final_norm"]["scale"], config) @ table.T)
    cap = config.logit_softcap
    stacked = np.stack(result)
    return stacked if cap is None else cap * np.tanh(stacked / cap)
