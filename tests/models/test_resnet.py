"""ResNet with group normalization: against NumPy, its size, and a step of training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax.algorithms import fedavg
from fedpax.models.losses import classification_loss
from fedpax.models.resnet import ResNetConfig, resnet

SMALL = ResNetConfig(num_channels=2, num_classes=5, filters=4, blocks=(2, 1))


def random_params(config: ResNetConfig) -> Any:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(resnet(config).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def convolve(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """Convolve with zeros around the image, as TensorFlow pads: the odd pixel at the end."""
    size, length = kernel.shape[0], -(-x.shape[1] // stride)
    pad = max((length - 1) * stride + size - x.shape[1], 0)
    x = np.pad(x, [(0, 0), (pad // 2, pad - pad // 2), (pad // 2, pad - pad // 2), (0, 0)])
    out = np.zeros((len(x), length, length, kernel.shape[-1]))
    for i in range(length):
        for j in range(length):
            window = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
            out[:, i, j] = np.einsum("bhwc,hwco->bo", window, kernel)
    return out


def normalize(x: np.ndarray, params: Any, groups: int) -> np.ndarray:
    parts = x.reshape(*x.shape[:3], groups, -1)
    mean = parts.mean(axis=(1, 2, 4), keepdims=True)
    variance = ((parts - mean) ** 2).mean(axis=(1, 2, 4), keepdims=True)
    normalized = ((parts - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape)
    return normalized * params["scale"] + params["bias"]


def reference(config: ResNetConfig, params: Any, x: np.ndarray) -> np.ndarray:
    relu = lambda x: np.maximum(x, 0)
    norm = lambda x, p: normalize(x, p, config.num_groups)
    x = relu(norm(convolve(x, params["convolution"]["kernel"], 2), params["norm_0"]))
    length = -(-x.shape[1] // 2)
    pad = (length - 1) * 2 + 3 - x.shape[1]
    x = np.pad(x, [(0, 0), (pad // 2, pad - pad // 2), (pad // 2, pad - pad // 2), (0, 0)])
    pooled = [
        [x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max(axis=(1, 2)) for j in range(length)]
        for i in range(length)
    ]
    x = np.moveaxis(np.array(pooled), 2, 0)
    for i in range(sum(config.blocks)):
        block = params["blocks"][f"block_{i}"]
        stride = config.stage_stride if i == config.blocks[0] else 1
        y = relu(norm(x, block["norm_0"])) if i else x
        y = convolve(y, block["convolution_0"]["kernel"], stride)
        y = convolve(relu(norm(y, block["norm_1"])), block["convolution_1"]["kernel"], 1)
        if "shortcut" in block:
            x = norm(convolve(x, block["shortcut"]["kernel"], stride), block["shortcut_norm"])
        x = x + y
    means = relu(norm(x, params["norm_1"])).mean(axis=(1, 2))
    return means @ params["dense"]["kernel"] + params["dense"]["bias"]


@pytest.mark.parametrize("stage_stride", [1, 2])
def test_logits_equal_numpy(stage_stride: int) -> None:
    config = ResNetConfig(2, 5, filters=4, blocks=(2, 1), stage_stride=stage_stride)
    params = random_params(config)
    x = np.random.default_rng(1).normal(size=(3, 13, 13, 2)).astype(np.float32)
    expected = reference(config, jax.tree.map(np.float64, params), x)
    result = jax.jit(resnet(config).apply)(params, x)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def test_the_published_network_has_11_2_million_parameters() -> None:
    """Its table gives 11.2 million; ResNet-18 with 100 classes has this number."""
    assert ResNetConfig().num_params() == ResNetConfig(stage_stride=2).num_params() == 11_227_812


def test_bfloat16() -> None:
    """The logits are near the logits of float32, in bfloat16."""
    model = resnet(SMALL)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    x = np.random.default_rng(1).normal(size=(4, 16, 16, 2)).astype(np.float32)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
    result, expected = jax.jit(model.apply)(*half), jax.jit(model.apply)(params, x)
    assert result.dtype == jnp.bfloat16
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(np.float32(result), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_rounds_of_fedavg_train_it(chunk_size: int) -> None:
    """Clients with kernels of their own, one after another and two at once."""
    model = resnet(SMALL)
    rng = np.random.default_rng(2)
    labels, patterns = rng.integers(5, size=(2, 3, 4)), rng.normal(size=(5, 16, 16, 2))
    images = patterns[labels] + 0.3 * rng.normal(size=(2, 3, 4, 16, 16, 2))
    batches = {"image": images.astype(np.float32), "label": labels}
    algorithm = fedavg(
        classification_loss(model.apply),
        cohort_size=2,
        client_optimizer=optax.sgd(0.3),
        chunk_size=chunk_size,
    )
    state, step = algorithm.init(model.init(jax.random.key(0))), jax.jit(algorithm.round)
    losses = []
    for _ in range(25):
        state, metrics = step(state, fedpax.Cohort(batches))
        losses.append(metrics["loss"].item())
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"blocks": ()}, "a stage or more"), ({"num_groups": 3}, "Set num_groups to a divisor")],
)
def test_sizes_that_do_not_fit_raise(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ResNetConfig(**settings)
