"""The noise that stages draw: Gaussian, discrete or not, from the system's randomness.

It imports NumPy alone, to be copied to a device without fedpax.

Reference:
    Canonne, Kamath and Steinke, arXiv:2004.00010, algorithms 2 and 3.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Random = Callable[[int], bytes]

_MOST_PROPOSALS = 1 << 18  # at a time, for the memory


def draw_noise(
    described: Iterable[Mapping[str, Any]], random: Random = secrets.token_bytes
) -> dict[str, NDArray[Any]]:
    """Draw the noise of one participant for a call of its function, or of the server for a run."""
    return {
        v["name"]: (normal if np.dtype(v.get("dtype", "int32")).kind == "f" else discrete_gaussian)(
            v["stddev"], v["shape"], random
        )
        for v in described
    }


def normal(
    stddev: float, shape: Iterable[int], random: Random = secrets.token_bytes
) -> NDArray[np.float32]:
    """Draw normal numbers: Box and Muller's transform of 64 random bits each, in float64."""
    shape = tuple(shape)
    size = math.prod(shape)
    samples = np.empty(size, np.float32)
    for first in range(0, size, _MOST_PROPOSALS):
        number = min(size - first, _MOST_PROPOSALS)
        radius, angle = (_uniform(_words((number + 1) // 2, random)) for _ in range(2))
        radius, angle = stddev * np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
        pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        samples[first : first + number] = pairs[:number]
    return samples.reshape(shape)


def discrete_gaussian(
    stddev: float, shape: Iterable[int], random: Random = secrets.token_bytes
) -> NDArray[np.int32]:
    """Draw integers k with probabilities proportional to `exp(-k^2 / (2 stddev^2))`, mod 2^32."""
    # 64 random bits are compared with a probability in float64, within a factor of 1e-12.
    shape = tuple(shape)
    size = math.prod(shape)
    samples = np.empty(size, np.int64)
    done = 0
    while done < size:
        # About every third proposal is accepted.
        proposals = min(3 * (size - done) + 8, _MOST_PROPOSALS)
        accepted = _accepted(stddev, proposals, random)[: size - done]
        samples[done : done + len(accepted)] = accepted
        done += len(accepted)
    return samples.astype(np.int32).reshape(shape)


def _accepted(stddev: float, proposals: int, random: Random) -> NDArray[np.int64]:
    """Return the accepted ones of some proposals of discrete Laplace numbers of scale t."""
    bits = max(0, math.ceil(math.log2(stddev)))
    t = 2**bits  # a power of two: uniform integers below it are bits
    word, first, second, third = (_words(proposals, random) for _ in range(4))
    negative, remainder = (word & 1).astype(bool), (word >> 1) & (t - 1)
    # exp(-(remainder + t quotient) / t) = exp(-remainder / t) exp(-quotient)
    quotient = np.floor(-np.log(_uniform(first)))
    size = remainder.astype(np.float64) + t * quotient
    keep = _uniform(second) < np.exp(-remainder.astype(np.float64) / t)
    keep &= ~(negative & (size == 0))  # otherwise 0 has twice its probability
    keep &= _uniform(third) < np.exp(-((size - stddev**2 / t) ** 2) / (2 * stddev**2))
    signed = np.where(negative, -size, size)
    return signed[keep].astype(np.int64)


def _words(number: int, random: Random) -> NDArray[np.uint64]:
    return np.frombuffer(random(8 * number), np.uint64)


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers between 0 and 1, those near 0 as precise as those near 1."""
    return (words.astype(np.float64) + 0.5) * 2.0**-64
