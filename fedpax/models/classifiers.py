"""Small image classifiers: a multilayer perceptron and a convolutional network."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from fedpax.errors import ArgumentError
from fedpax.models.nnx_functional import FunctionalModel, count_params, functional_model
from fedpax.parallel.axes import partition_spec

CPU_CACHE_ELEMENTS = 2**18
"""Activations that fit the cache of a CPU core. A CNN with more of them runs image by image."""


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of a multilayer perceptron.

    Attributes:
        layer_sizes: number of input features, sizes of the hidden layers, number of classes.

    Raises:
        ValueError: there are fewer than two sizes, or one is not positive.

    Example:
        >>> MLPConfig(layer_sizes=(64, 32, 10)).num_params()
        2410
    """

    layer_sizes: tuple[int, ...] = (784, 200, 10)

    def __post_init__(self) -> None:
        """Check the sizes."""
        if len(self.layer_sizes) < 2 or min(self.layer_sizes) < 1:
            raise ArgumentError(
                f"MLPConfig.layer_sizes={self.layer_sizes}: expected at least two positive "
                "numbers, the number of input features first and the number of classes last."
            )

    def num_params(self) -> int:
        """Count the parameters."""
        return count_params(mlp(self))


@dataclass(frozen=True)
class CNNConfig:
    """Sizes of a convolutional network: two 3 x 3 convolutions, max-pooling, two dense layers.

    With 62 classes and dropout rates (0.25, 0.5), it is EMNIST's network in the reference.

    Attributes:
        image_height: height of an image in pixels, at least 6.
        image_width: likewise.
        num_channels: channels of an image, 1 for gray and 3 for RGB.
        filters: output channels of the first and of the second convolution.
        hidden_dim: features of the hidden dense layer.
        num_classes: number of classes.
        dropout_rates: probabilities, below 1, of a feature's dropout after pooling and in the
            hidden dense layer. Only an `apply` with seeds drops features.

    Raises:
        ValueError: a size is too small, or a rate is out of range.

    Reference:
        Reddi et al. (arXiv:2003.00295), table 4.

    Example:
        >>> CNNConfig(num_classes=62).num_params()
        1206590
    """

    image_height: int = 28
    image_width: int = 28
    num_channels: int = 1
    filters: tuple[int, int] = (32, 64)
    hidden_dim: int = 128
    num_classes: int = 10
    dropout_rates: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the rates, and that an image is not empty after the pooling."""
        for name in ("image_height", "image_width"):
            if (size := getattr(self, name)) < 6:
                raise ArgumentError(
                    f"CNNConfig.{name}={size}: two 3 x 3 convolutions and pooling need at least 6 "
                    "pixels. Enlarge the images, or use MLPConfig."
                )
        if min(self.num_channels, *self.filters, self.hidden_dim, self.num_classes) < 1:
            raise ArgumentError(f"{self}: expected positive sizes.")
        if not all(0 <= rate < 1 for rate in self.dropout_rates):
            raise ArgumentError(
                f"CNNConfig.dropout_rates={self.dropout_rates}: expected two numbers, each at "
                "least 0 and below 1. 0 drops nothing."
            )

    @property
    def pooled_dim(self) -> int:
        """Number of features of an image after pooling."""
        return ((self.image_height - 4) // 2) * ((self.image_width - 4) // 2) * self.filters[1]

    def num_params(self) -> int:
        """Count the parameters."""
        return count_params(cnn(self))


class MLP(nnx.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
        pairs = itertools.pairwise(config.layer_sizes)
        self.layers = nnx.Dict(
            {f"dense_{i}": nnx.Linear(a, b, rngs=rngs) for i, (a, b) in enumerate(pairs)}
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images [batch, ...] to logits [batch, num_classes]."""
        x = x.reshape(len(x), -1)
        for i in range(len(self.layers)):
            x = self.layers[f"dense_{i}"](nnx.relu(x) if i else x)
        return x


class CNN(nnx.Module):
    """Two convolutions, max-pooling and two dense layers, with ReLU between them, and dropout."""

    def __init__(self, config: CNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        first, second = config.filters
        self.convolution_0 = Convolution(config.num_channels, first, rngs=rngs)
        self.convolution_1 = Convolution(first, second, rngs=rngs)
        self.dense_0 = nnx.Linear(config.pooled_dim, config.hidden_dim, rngs=rngs)
        self.dense_1 = nnx.Linear(config.hidden_dim, config.num_classes, rngs=rngs)

    def __call__(self, x: jax.Array, dropout_seeds: jax.Array | None = None) -> jax.Array:
        """Map images [batch, height, width] or [..., channels] to logits [batch, num_classes]."""
        config, (pooled_rate, hidden_rate) = self.config, self.config.dropout_rates
        x = x.reshape(len(x), config.image_height, config.image_width, config.num_channels)
        num_activations = x.size // config.num_channels * sum(config.filters)
        if num_activations > CPU_CACHE_ELEMENTS and not _batch_is_sharded(x):
            image_by_image = functools.partial(jax.lax.map, self.features)
            x = jax.lax.platform_dependent(x, cpu=image_by_image, default=self.features)
        else:
            x = self.features(x)
        x = _dropout(x.reshape(len(x), config.pooled_dim), pooled_rate, dropout_seeds, layer=0)
        x = _dropout(nnx.relu(self.dense_0(x)), hidden_rate, dropout_seeds, layer=1)
        return self.dense_1(x)

    def features(self, x: jax.Array) -> jax.Array:
        """Map [..., height, width, channels] to pooled features [..., height, width, filters]."""
        # Recomputing the first convolution in the backward pass is cheaper than storing it.
        x = jax.checkpoint(self._convolved, prevent_cse=False)(x)
        # Equals max_pool(nnx.relu(x + bias)), with bias and ReLU on a quarter of the pixels.
        return nnx.relu(max_pool(x) + self.convolution_1.bias[...])

    def _convolved(self, x: jax.Array) -> jax.Array:
        """Apply both convolutions to [..., height, width, channels], the second without bias."""
        first, second = self.convolution_0, self.convolution_1
        x = nnx.relu(convolve(x, first.kernel[...]) + first.bias[...])
        return convolve(x, second.kernel[...])


class Convolution(nnx.Module):
    """Kernel and bias of a 3 x 3 convolution without padding."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        stddev = (9 * inputs) ** -0.5
        kernel = stddev * jax.random.normal(rngs.params(), (3, 3, inputs, outputs))
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(outputs))


def convolve(
    x: Float[Array, "*batch height width inputs"], kernel: Float[Array, "3 3 inputs outputs"]
) -> Float[Array, "*batch height-2 width-2 outputs"]:
    """Convolve images with a 3 x 3 kernel, without padding."""
    # One matmul multiplies each pixel and its two right neighbors with all three rows of the
    # kernel, whose results are shifted and added. Under `vmap` over clients' own kernels, XLA's
    # convolution becomes a grouped one, many times slower on a CPU inside a loop (local steps).
    *batch, height, width, inputs = x.shape
    outputs, width = kernel.shape[-1], width - 2
    neighbors = jnp.concatenate([x[..., i : i + width, :] for i in range(3)], axis=-1)
    # Height and width become one axis: with two, the gradient with respect to the kernel would
    # copy both operands of the matmul.
    pixels = neighbors.reshape(*batch, height * width, 3 * inputs)
    matrix = kernel.transpose(1, 2, 0, 3).reshape(3 * inputs, 3 * outputs)
    sums = (pixels @ matrix).reshape(*batch, height, width, 3 * outputs)
    rows = jnp.split(sums, 3, axis=-1)
    first, second, third = (row[..., i : i + height - 2, :, :] for i, row in enumerate(rows))
    return first + second + third


@jax.custom_jvp
def max_pool(
    x: Float[Array, "*batch height width channels"],
) -> Float[Array, "*batch height/2 width/2 channels"]:
    """Take the maximum of each 2 x 2 window; drop an odd last row or column."""
    # Of equal pixels, the first in row-major order has the derivative.
    return jnp.max(_windows(x), axis=(-4, -2))


@max_pool.defjvp
def _max_pool_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Take the tangents of the pixels that are the maxima."""
    # JAX's own gradients are slow on a CPU and store a number for each pixel. This one stores a
    # byte for each window: the position of its maximum.
    windows = _windows(*primals)
    largest = jnp.max(windows, axis=(-4, -2))
    pixels = [windows[..., i, :, j, :] for i in range(2) for j in range(2)]
    place = jnp.full_like(largest, 3, dtype=jnp.int8)
    for i in reversed(range(3)):
        place = jnp.where(pixels[i] == largest, jnp.int8(i), place)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # stores `place` alone
    def take(place: jax.Array, windows: jax.Array) -> jax.Array:
        places = np.arange(4, dtype=np.int8).reshape(2, 1, 2, 1)
        taken = place[..., :, None, :, None, :] == places
        return jnp.sum(jnp.where(taken, windows, 0), axis=(-4, -2))

    return largest, take(place, _windows(*tangents))


def _windows(x: jax.Array) -> jax.Array:
    """Reshape to windows [..., height // 2, 2, width // 2, 2, channels]."""
    *batch, height, width, channels = x.shape
    height, width = height // 2, width // 2
    x = x[..., : 2 * height, : 2 * width, :]
    # One axis at a time: JAX requires this of explicitly sharded arrays.
    pairs = x.reshape(*batch, height, 2, 2 * width, channels)
    return pairs.reshape(*batch, height, 2, width, 2, channels)


def _dropout(x: jax.Array, rate: float, seeds: jax.Array | None, *, layer: int) -> jax.Array:
    """Set features of [batch, features] to 0 at random, and scale the rest to the same mean."""
    if seeds is None or rate == 0:
        return x

    def kept(seed: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), layer)
        return jax.random.bernoulli(key, 1 - rate, x.shape[1:])

    return jnp.where(jax.vmap(kept)(seeds), x / (1 - rate), 0)


def _batch_is_sharded(x: jax.Array) -> bool:
    """Return whether the batch is sharded over devices: a loop over images would gather them."""
    return any((*partition_spec(("batch",)), *jax.typeof(x).sharding.spec[:1]))


def mlp(config: MLPConfig) -> FunctionalModel:
    """Make a multilayer perceptron as pure functions: `apply(params, images) -> logits`.

    Images are floats `[batch, ...]`, logits `[batch, num_classes]`.

    Example:
        >>> model = mlp(MLPConfig())
        >>> params = jax.jit(model.init)(jax.random.key(0))
        >>> jax.jit(model.apply)(params, jnp.zeros((5, 28, 28))).shape
        (5, 10)
    """
    return functional_model(MLP, config)


def cnn(config: CNNConfig) -> FunctionalModel:
    """Make a convolutional network as pure functions: `apply(params, images) -> logits`.

    Images are floats `[batch, height, width]` or `[..., channels]`. With dropout,
    `apply(params, images, dropout_seeds)` takes a random number for each image, uint32 `[batch]`:
    equal seeds drop equal features.

    Example:
        >>> model = cnn(CNNConfig(image_height=8, image_width=8))
        >>> params = jax.jit(model.init)(jax.random.key(0))
        >>> jax.jit(model.apply)(params, jnp.zeros((5, 8, 8, 1))).shape
        (5, 10)
    """
    return functional_model(CNN, config)
