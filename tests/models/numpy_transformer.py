"""The transformer in NumPy, float64 and loops over heads: what the tests compare with."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.models.transformer import TransformerConfig

Array = NDArray[np.float64]


def normalize(x: Array, scale: Array) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def frequencies(half: int, config: TransformerConfig) -> Array:
    """The angle of each pair of features at position 1."""
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
            result.append(
                (1 - smooth) * frequency / config.rope_scaling_factor + smooth * frequency
            )
    return np.array(result)


def turn(x: Array, position: int, config: TransformerConfig) -> Array:
    """Rotates the pairs (i, i + d / 2) of a head's d features, each as one complex number."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    pairs = pairs * np.exp(1j * position * frequencies(half, config))
    return np.concatenate([pairs.real, pairs.imag])


def attention(x: Array, w: Any, config: TransformerConfig, segments: Any, positions: Any) -> Array:
    """One sequence x [tokens, embed_dim]."""
    result = np.zeros_like(x)
    window = config.sliding_window or len(x)
    for head in range(config.num_heads):
        group = head * config.num_kv_heads // config.num_heads
        query, key, value = (
            x @ w["query"][:, head],
            x @ w["key"][:, group],
            x @ w["value"][:, group],
        )
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if segments[s] == segments[t] and t - s < window]
            q = turn(query[t], positions[t], config)
            scores = np.array([q @ turn(key[s], positions[s], config) for s in seen])
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
    """One token x [embed_dim] through the experts with the largest logits."""
    scores = x @ w["router"]
    chosen = np.argsort(-scores)[: config.num_experts_per_token]
    shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
    total = np.zeros_like(x)
    for share, e in zip(shares, chosen, strict=True):
        gate = x @ w["gate"][e]
        total += share * (gate / (1 + np.exp(-gate)) * (x @ w["up"][e])) @ w["down"][e]
    return total


def logits(
    params: Any, tokens: Any, config: TransformerConfig, segments: Any = None, positions: Any = None
) -> Array:
    """Logits [batch, sequence, vocab_size] of tokens [batch, sequence]."""
    segments = np.ones_like(tokens) if segments is None else segments
    positions = np.arange(tokens.shape[1]) + 0 * tokens if positions is None else positions
    table = params["embedding"] if config.tied_embeddings else params["output"]
    result = []
    for row, segment, position in zip(tokens, segments, positions, strict=True):
        x = params["embedding"][row] * params["embedding"].shape[1] ** 0.5
        for i in range(config.num_layers):
            layer = {
                name: {key: leaf[i] for key, leaf in part.items()}
                for name, part in params["layers"].items()
            }
            y = normalize(x, layer["attention_norm"]["scale"])
            x = x + attention(y, layer["attention"], config, segment, position)
            y = normalize(x, layer["feed_forward_norm"]["scale"])
            x = x + feed_forward(y, layer["feed_forward"], config)
        result.append(normalize(x, params["final_norm"]["scale"]) @ table.T)
    cap = config.logit_softcap
    stacked = np.stack(result)
    return stacked if cap is None else cap * np.tanh(stacked / cap)
