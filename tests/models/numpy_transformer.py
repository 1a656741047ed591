"""The transformer in NumPy, float64 and loops over heads: what the tests compare with."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.models.transformer import TransformerConfig

Array = NDArray[np.float64]


def normalize(x: Array, scale: Array) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def turn(x: Array, position: int, base: float) -> Array:
    """Rotates the pairs (i, i + d / 2) of a head's d features, each as one complex number."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    pairs = pairs * np.exp(1j * position * base ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])


def attention(x: Array, w: Any, config: TransformerConfig, segments: Any, positions: Any) -> Array:
    """One sequence x [tokens, width]."""
    result = np.zeros_like(x)
    for head in range(config.heads):
        group = head * config.key_value_heads // config.heads
        query, key, value = (
            x @ w["query"][:, head],
            x @ w["key"][:, group],
            x @ w["value"][:, group],
        )
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            q = turn(query[t], positions[t], config.rope_base)
            scores = np.array([q @ turn(key[s], positions[s], config.rope_base) for s in seen])
            weights = np.exp(scores / np.sqrt(len(q)))
            result[t] += (weights / weights.sum()) @ value[seen] @ w["output"][head]
    return result


def feed_forward(x: Array, w: Any) -> Array:
    gate, up = x @ w["gate"], x @ w["up"]
    return (gate / (1 + np.exp(-gate)) * up) @ w["down"]


def logits(
    params: Any, tokens: Any, config: TransformerConfig, segments: Any = None, positions: Any = None
) -> Array:
    """Logits [batch, sequence, vocabulary] of tokens [batch, sequence]."""
    segments = np.ones_like(tokens) if segments is None else segments
    positions = np.arange(tokens.shape[1]) + 0 * tokens if positions is None else positions
    result = []
    for row, segment, position in zip(tokens, segments, positions, strict=True):
        x = params["embedding"][row] * params["embedding"].shape[1] ** 0.5
        for i in range(config.layers):
            layer = {
                name: {key: leaf[i] for key, leaf in part.items()}
                for name, part in params["layers"].items()
            }
            y = normalize(x, layer["attention_norm"]["scale"])
            x = x + attention(y, layer["attention"], config, segment, position)
            y = normalize(x, layer["feed_forward_norm"]["scale"])
            x = x + feed_forward(y, layer["feed_forward"])
        result.append(normalize(x, params["final_norm"]["scale"]) @ params["embedding"].T)
    return np.stack(result)
