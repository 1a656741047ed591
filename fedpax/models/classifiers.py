"""Small classifiers of images: a multilayer perceptron and a convolutional network."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.parallel.axes import partition_spec

CACHED = 2**18
"""Numbers that a CPU core keeps at hand: where a CNN computes more, it takes image after image."""


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of a multilayer perceptron.

    Attributes:
      layer_sizes: features of the input, of each hidden layer, and number of classes.

    Raises:
      ValueError: fewer than two sizes, or one that is not positive.

    Example:
      >>> MLPConfig(layer_sizes=(64, 32, 10)).num_params()
      2410
    """

    layer_sizes: tuple[int, ...] = (784, 200, 10)

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if len(self.layer_sizes) < 2 or min(self.layer_sizes) < 1:
            raise ValueError(
                f"MLPConfig.layer_sizes={self.layer_sizes}: expected at least two positive numbers, the "
                "features of the input first and the number of classes last."
            )

    def num_params(self) -> int:
        """Counts the parameters."""
        return sum((a + 1) * b for a, b in itertools.pairwise(self.layer_sizes))


@dataclass(frozen=True)
class CNNConfig:
    """Sizes of a convolutional network: two convolutions of 3 x 3, max-pooling, two dense layers.

    The default sizes with 62 classes are the network that is used for EMNIST, without dropout.

    Attributes:
      image_height: pixels, at least 6.
      image_width: pixels, at least 6.
      num_channels: numbers in a pixel.
      filters: channels after the first and after the second convolution.
      hidden_dim: features of the hidden dense layer.
      num_classes: number of classes.

    Raises:
      ValueError: a size is too small.

    Reference: Reddi et al., "Adaptive Federated Optimization" (arXiv:2003.00295), table 4.

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

    def __post_init__(self) -> None:
        """Checks that something is left of an image after convolutions and pooling."""
        for name in ("image_height", "image_width"):
            if (size := getattr(self, name)) < 6:
                raise ValueError(
                    f"CNNConfig.{name}={size}: two 3 x 3 convolutions and pooling need at least 6 "
                    "pixels: enlarge the images, or use MLPConfig."
                )
        if min(self.num_channels, *self.filters, self.hidden_dim, self.num_classes) < 1:
            raise ValueError(f"{self}: expected positive sizes only.")

    @property
    def pooled(self) -> int:
        """Number of features after pooling."""
        return ((self.image_height - 4) // 2) * ((self.image_width - 4) // 2) * self.filters[1]

    def num_params(self) -> int:
        """Counts the parameters."""
        first, second = self.filters
        convolutions = (9 * self.num_channels + 1) * first + (9 * first + 1) * second
        return (
            convolutions
            + (self.pooled + 1) * self.hidden_dim
            + (self.hidden_dim + 1) * self.num_classes
        )


class MLP(nnx.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
        pairs = itertools.pairwise(config.layer_sizes)
        self.layers = nnx.Dict(
            {f"dense_{i}": nnx.Linear(a, b, rngs=rngs) for i, (a, b) in enumerate(pairs)}
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [batch, ...] to logits [batch, classes]."""
        x = x.reshape(len(x), -1)
        for i in range(len(self.layers)):
            x = self.layers[f"dense_{i}"](nnx.relu(x) if i else x)
        return x


class CNN(nnx.Module):
    """Two convolutions, max-pooling and two dense layers, with ReLU between them."""

    def __init__(self, config: CNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        first, second = config.filters
        self.convolution_0 = Convolution(config.num_channels, first, rngs=rngs)
        self.convolution_1 = Convolution(first, second, rngs=rngs)
        self.dense_0 = nnx.Linear(config.pooled, config.hidden_dim, rngs=rngs)
        self.dense_1 = nnx.Linear(config.hidden_dim, config.num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [batch, height, width] or [..., channels] to logits [batch, classes]."""
        config = self.config
        x = x.reshape(len(x), config.image_height, config.image_width, config.num_channels)
        computed = x.size // config.num_channels * sum(config.filters)
        if computed > CACHED and _is_whole(x):
            one_by_one = functools.partial(jax.lax.map, self.features)
            x = jax.lax.platform_dependent(x, cpu=one_by_one, default=self.features)
        else:
            x = self.features(x)
        return self.dense_1(nnx.relu(self.dense_0(x.reshape(len(x), config.pooled))))

    def features(self, x: jax.Array) -> jax.Array:
        """Maps [..., height, width, channels] to what the dense layers see, still in its place."""
        # The first convolution is cheaper to compute again than to keep.
        x = jax.checkpoint(self._convolved, prevent_cse=False)(x)
        # Which is max_pool(nnx.relu(x + bias)), in a quarter of the work.
        return nnx.relu(max_pool(x) + self.convolution_1.bias[...])

    def _convolved(self, x: jax.Array) -> jax.Array:
        """Maps [..., height, width, channels] to the second convolution, without its bias."""
        first, second = self.convolution_0, self.convolution_1
        x = nnx.relu(convolve(x, first.kernel[...]) + first.bias[...])
        return convolve(x, second.kernel[...])


class Convolution(nnx.Module):
    """The kernel and the bias of a 3 x 3 convolution without padding."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        deviation = (9 * inputs) ** -0.5
        kernel = deviation * jax.random.normal(rngs.params(), (3, 3, inputs, outputs))
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(outputs))


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves images with a 3 x 3 kernel, without padding.

    One matrix product computes, for three neighbours in a row, their part in each of the three
    rows of pixels that they reach; what the three rows of the kernel give is then added up.
    Kernels that differ by client, under `vmap`, would make a grouped convolution of XLA's own, and
    inside a loop, such as local steps, these are many times slower on a CPU.

    Args:
      x: [..., height, width, inputs].
      kernel: [3, 3, inputs, outputs].

    Returns:
      [..., height - 2, width - 2, outputs].

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 6, 3))
      >>> kernel = jnp.zeros((3, 3, 3, 4)).at[1, 1, 0].set(1.0)
      >>> bool(jnp.allclose(convolve(x, kernel), x[:, 1:-1, 1:-1, :1]))
      True
    """
    *batch, height, width, inputs = x.shape
    outputs, width = kernel.shape[-1], width - 2
    neighbours = jnp.concatenate([x[..., i : i + width, :] for i in range(3)], axis=-1)
    # One axis for all pixels: with two, the kernel's gradient would need copies of both sides.
    pixels = neighbours.reshape(*batch, height * width, 3 * inputs)
    matrix = kernel.transpose(1, 2, 0, 3).reshape(3 * inputs, 3 * outputs)
    sums = (pixels @ matrix).reshape(*batch, height, width, 3 * outputs)
    rows = jnp.split(sums, 3, axis=-1)
    first, second, third = (row[..., i : i + height - 2, :, :] for i, row in enumerate(rows))
    return first + second + third


@jax.custom_jvp
def max_pool(x: jax.Array) -> jax.Array:
    """Takes the largest of each 2 x 2 pixels; an odd last row or column is left out.

    The derivative is that of the largest pixel, of equal ones the first in the order of reading.

    Args:
      x: [..., height, width, channels].

    Returns:
      [..., height // 2, width // 2, channels].

    Example:
      >>> max_pool(jnp.arange(12.0).reshape(3, 4, 1)).tolist()
      [[[5.0], [7.0]]]
    """
    return jnp.max(_windows(x), axis=(-4, -2))


@max_pool.defjvp
def _max_pool_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Takes the same pixels of the tangent.

    Gradients of a maximum or of a reduction over windows are slow on a CPU, and keep a number for
    each pixel; this one keeps a byte for each window.
    """
    windows = _windows(*primals)
    largest = jnp.max(windows, axis=(-4, -2))
    pixels = [windows[..., i, :, j, :] for i in range(2) for j in range(2)]
    place = jnp.full_like(largest, 3, dtype=jnp.int8)
    for i in reversed(range(3)):
        place = jnp.where(pixels[i] == largest, jnp.int8(i), place)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # so that nothing but places is kept
    def take(place: jax.Array, windows: jax.Array) -> jax.Array:
        places = np.arange(4, dtype=np.int8).reshape(2, 1, 2, 1)
        taken = place[..., :, None, :, None, :] == places
        return jnp.sum(jnp.where(taken, windows, 0), axis=(-4, -2))

    return largest, take(place, _windows(*tangents))


def _windows(x: jax.Array) -> jax.Array:
    """Cuts [..., height, width, channels] into [..., height // 2, 2, width // 2, 2, channels]."""
    *batch, height, width, channels = x.shape
    height, width = height // 2, width // 2
    x = x[..., : 2 * height, : 2 * width, :]
    # One axis is cut at a time, as JAX demands of arrays that are sharded explicitly.
    pairs = x.reshape(*batch, height, 2, 2 * width, channels)
    return pairs.reshape(*batch, height, 2, width, 2, channels)


def _is_whole(x: jax.Array) -> bool:
    """Whether a device has all images of a batch: a loop over others' would gather them."""
    return not any((*partition_spec(("batch",)), *jax.typeof(x).sharding.spec[:1]))


def mlp(config: MLPConfig) -> FunctionalModel:
    """Makes the multilayer perceptron as pure functions: `apply(params, images) -> logits`.

    Args:
      config: its sizes.

    Returns:
      The model; `apply` takes images, float [batch, ...], and returns logits [batch, classes].

    Example:
      >>> model = mlp(MLPConfig())
      >>> params = jax.jit(model.init)(jax.random.key(0))
      >>> jax.jit(model.apply)(params, jnp.zeros((5, 28, 28))).shape
      (5, 10)
    """
    return to_functional(functools.partial(MLP, config))


def cnn(config: CNNConfig) -> FunctionalModel:
    """Makes the convolutional network as pure functions: `apply(params, images) -> logits`.

    Args:
      config: its sizes.

    Returns:
      The model; `apply` takes images, float [batch, height, width] or with channels behind, and
      returns logits [batch, classes].

    Example:
      >>> model = cnn(CNNConfig(image_height=8, image_width=8))
      >>> params = jax.jit(model.init)(jax.random.key(0))
      >>> jax.jit(model.apply)(params, jnp.zeros((5, 8, 8, 1))).shape
      (5, 10)
    """
    return to_functional(functools.partial(CNN, config))
