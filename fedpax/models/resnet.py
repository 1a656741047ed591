"""ResNet with group normalization."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from fedpax.errors import ArgumentError
from fedpax.models.nnx_functional import FunctionalModel, count_params, functional_model

EPSILON = 1e-3
"""The term beside the variance in normalizations, as in the authors' library."""


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a residual network of two-convolution blocks, with group normalization.

    The defaults are ResNet-18 for CIFAR-100 in the experiments of FedOpt.

    Attributes:
        num_channels: channels of an image, 1 for gray and 3 for RGB.
        num_classes: number of classes.
        filters: output channels of the first convolution and stage, doubled at each later stage.
        blocks: number of blocks in each stage.
        num_groups: groups of channels that are normalized together.
        stage_stride: stride of the first block of each stage after the first. Default 1, as in
            FedOpt; the network for ImageNet has 2.

    Raises:
        ValueError: a size is below 1, or `num_groups` does not divide `filters`.

    Reference:
        He et al., arXiv:1603.05027 (the order of normalization and convolution); Reddi et al.,
        arXiv:2003.00295, appendix.

    Example:
        >>> ResNetConfig().num_params()
        11227812
    """

    num_channels: int = 3
    num_classes: int = 100
    filters: int = 64
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    num_groups: int = 2
    stage_stride: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = (self.num_channels, self.num_classes, self.filters, self.num_groups)
        if min(*sizes, self.stage_stride, *self.blocks) < 1 or not self.blocks:
            raise ArgumentError(f"{self}: expected positive sizes, and a stage or more.")
        if self.filters % self.num_groups:
            raise ArgumentError(
                f"ResNetConfig.filters={self.filters}, num_groups={self.num_groups}: expected "
                "groups of one size. Set num_groups to a divisor of filters."
            )

    @property
    def widths(self) -> list[int]:
        """Output channels of the first convolution, then of every block."""
        stages = enumerate(self.blocks)
        return [self.filters, *(self.filters << k for k, count in stages for _ in range(count))]

    def num_params(self) -> int:
        """Count the parameters."""
        return count_params(resnet(self))


class ResidualBlock(nnx.Module):
    """Two 3 x 3 convolutions, each after normalization and ReLU, added to the input."""

    # The first block of a network has no `norm_0`: its input is normalized. `shortcut` is a 1 x 1
    # convolution of the input to the shape of the output, or None if they are equal.

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        num_groups: int,
        *,
        is_first: bool,
        rngs: nnx.Rngs,
    ):
        self.norm_0 = None if is_first else _norm(inputs, num_groups, rngs)
        self.convolution_0 = _convolution(inputs, outputs, 3, stride, rngs)
        self.norm_1 = _norm(outputs, num_groups, rngs)
        self.convolution_1 = _convolution(outputs, outputs, 3, 1, rngs)
        is_projected = inputs != outputs or stride != 1
        self.shortcut = _convolution(inputs, outputs, 1, stride, rngs) if is_projected else None
        self.shortcut_norm = _norm(outputs, num_groups, rngs) if is_projected else None

    def __call__(
        self, x: Float[Array, "batch height width inputs"]
    ) -> Float[Array, "batch height/stride width/stride outputs"]:
        """Apply the block."""
        y = x if self.norm_0 is None else nnx.relu(self.norm_0(x))
        y = self.convolution_0(y)
        y = self.convolution_1(nnx.relu(self.norm_1(y)))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return x + y


class ResNet(nnx.Module):
    """A 7 x 7 convolution with max-pooling, stages of blocks, and a dense layer of the means."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.convolution = _convolution(config.num_channels, config.filters, 7, 2, rngs)
        self.norm_0 = _norm(config.filters, config.num_groups, rngs)
        pairs = list(itertools.pairwise(config.widths))
        self.blocks = nnx.Dict(
            {
                f"block_{i}": ResidualBlock(
                    a,
                    b,
                    config.stage_stride if a != b else 1,
                    config.num_groups,
                    is_first=i == 0,
                    rngs=rngs,
                )
                for i, (a, b) in enumerate(pairs)
            }
        )
        self.norm_1 = _norm(config.widths[-1], config.num_groups, rngs)
        self.dense = nnx.Linear(
            config.widths[-1],
            config.num_classes,
            kernel_init=jax.nn.initializers.normal(0.01),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images [batch, height, width] or [..., channels] to logits [batch, num_classes]."""
        x = x.reshape(*x.shape[:3], self.config.num_channels)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32)
        x = nnx.relu(self.norm_0(self.convolution(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        for i in range(len(self.blocks)):
            x = self.blocks[f"block_{i}"](x)
        return self.dense(jnp.mean(nnx.relu(self.norm_1(x)), axis=(1, 2)))


def _convolution(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        (stride, stride),
        use_bias=False,
        kernel_init=jax.nn.initializers.he_normal(),
        rngs=rngs,
    )


def _norm(features: int, num_groups: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(features, num_groups, epsilon=EPSILON, rngs=rngs)


def resnet(config: ResNetConfig) -> FunctionalModel:
    """Make a residual network as pure functions: `apply(params, images) -> logits`.

    Clients that run at once (`chunk_size` above 1) have grouped convolutions, which are slow on a
    CPU.

    Returns:
        The model. `apply` takes images of any size, float `[batch, height, width, channels]`, and
        returns logits `[batch, num_classes]`.

    Example:
        >>> model = resnet(ResNetConfig(filters=4, blocks=(1,), num_classes=10))
        >>> params = jax.eval_shape(model.init, jax.random.key(0))
        >>> jax.eval_shape(model.apply, params, jnp.zeros((5, 24, 24, 3))).shape
        (5, 10)
    """
    return functional_model(ResNet, config)
