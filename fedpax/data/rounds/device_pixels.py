"""Scaling of pixels on the devices, with the bits of the scaling on the host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, UInt8

# 1 / 255 as the sum of two numbers. The product of a pixel and the first one, of 16 bits, is exact.
_HIGH = np.float32(np.floor(np.ldexp(1 / 255, 23)) / 2**23)
_LOW = np.float32(1 / 255 - float(_HIGH))


def scale_on_devices(images: UInt8[jax.Array, "*shape"]) -> Float32[jax.Array, "*shape"]:
    """Divide pixels by 255 where they are, bit by bit as `scale_pixels` does.

    A division would not do: compilers multiply by the rounded 1 / 255, or round otherwise.

    Example:
        >>> pixels = np.arange(256, dtype=np.uint8)
        >>> scaled = scale_on_devices(jnp.asarray(pixels))
        >>> bool((np.asarray(scaled) == pixels / np.float32(255)).all())
        True
    """
    scaled: jax.Array = _scale(images.sharding)(images)
    return scaled


@functools.lru_cache(maxsize=8)
def _scale(sharding: jax.sharding.Sharding) -> Any:
    def scale(images: jax.Array) -> jax.Array:
        pixels = images.astype(jnp.float32)
        return pixels * _HIGH + pixels * _LOW

    return jax.jit(scale, out_shardings=sharding)
