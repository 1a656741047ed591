import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.models import classifiers
from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, convolve, max_pool, mlp
from fedpax.models.losses import classification_loss
from fedpax.models.nnx_functional import FunctionalModel

MODELS = {
    "mlp": mlp(MLPConfig(layer_sizes=(64, 32, 10))),
    "cnn": cnn(CNNConfig(image_height=8, image_width=8, filters=(8, 16), hidden_dim=32)),
}


def noisy(model: FunctionalModel, *models: int) -> Any:
    """Draw kernels that keep the size of features, and biases of 0.1, of one or more models."""
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        scale = np.prod(leaf.shape[:-1]) ** -0.5 if leaf.ndim > 1 else 0.1
        return (scale * random.normal(size=(*models, *leaf.shape))).astype(np.float32)

    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))


def test_mlp_equals_numpy() -> None:
    model = mlp(MLPConfig(layer_sizes=(12, 7, 5, 3)))
    params = noisy(model)
    x = np.random.default_rng(1).normal(size=(4, 2, 6)).astype(np.float32)
    expected = x.reshape(4, 12).astype(np.float64)
    for i in range(3):
        layer = params["layers"][f"dense_{i}"]
        expected = (np.maximum(expected, 0) if i else expected) @ layer["kernel"] + layer["bias"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), expected, rtol=1e-4, atol=1e-5)


def jax_convolution(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


assert_close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 5, 6, 3, 4),
        pytest.param((1, 3, 3, 1, 2), marks=pytest.mark.slow),
        pytest.param((3, 7, 4, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_convolution_equals_jax_with_both_derivatives(shape: tuple[int, ...]) -> None:
    batch, height, width, inputs, outputs = shape
    random = np.random.default_rng(3)

    def draw(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    x, kernel = draw(batch, height, width, inputs), draw(3, 3, inputs, outputs)
    tangents = draw(*x.shape), draw(*kernel.shape)
    cotangent = draw(batch, height - 2, width - 2, outputs)

    def derivatives(fn: Any) -> Any:
        out, pull = jax.vjp(fn, x, kernel)
        second = jax.grad(lambda x, kernel: jnp.sum(pull_of(fn, x, kernel)[1] ** 2), (0, 1))
        return out, pull(cotangent), jax.jvp(fn, (x, kernel), tangents), second(x, kernel)

    def pull_of(fn: Any, x: Any, kernel: Any) -> Any:
        return jax.vjp(fn, x, kernel)[1](cotangent)

    ours = jax.jit(partial(derivatives, convolve))()
    expected = jax.jit(partial(derivatives, jax_convolution))()
    chex.assert_trees_all_close(ours, expected, rtol=1e-3, atol=1e-4)
    assert_close(jax.jit(convolve)(x[0], kernel), ours[0][0])


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (3, 5, 7, 1)])
@pytest.mark.parametrize(
    "draw",
    [
        lambda random, shape: random.normal(size=shape),
        lambda random, shape: random.binomial(1, 0.5, shape),
    ],
    ids=["distinct", "equal"],
)
def test_max_pool_equals_a_reduction_over_windows(draw: Any, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(4)
    x = draw(random, shape).astype(np.float32)

    def windows(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def value_and_pull(pool: Any) -> Any:
        def both(x: Any, cotangent: Any) -> Any:
            value, pull = jax.vjp(pool, x)
            return value, pull(cotangent)[0]

        return jax.jit(both)

    cotangent = random.normal(size=jax.eval_shape(max_pool, x).shape).astype(np.float32)
    ours, pulled = value_and_pull(max_pool)(x, cotangent)
    expected, expected_pulled = value_and_pull(windows)(x, cotangent)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(pulled, expected_pulled)
    tangent = random.normal(size=shape).astype(np.float32)
    moved = jax.jit(lambda x, tangent: jax.jvp(max_pool, (x,), (tangent,))[1])(x, tangent)
    np.testing.assert_allclose(np.vdot(moved, cotangent), np.vdot(tangent, pulled), rtol=1e-5)
    jitted = jax.jit(max_pool)
    one_by_one = np.stack([jitted(image) for image in x])
    np.testing.assert_array_equal(jax.jit(jax.vmap(max_pool))(x), one_by_one)


def test_pooling_stores_a_byte_per_window() -> None:
    x = jnp.zeros((4, 6, 3), jnp.bfloat16)
    assert max_pool(x).dtype == jnp.bfloat16
    kept = jax.tree.leaves(jax.vjp(max_pool, x)[1])
    assert sum(leaf.nbytes for leaf in kept) <= 2 * 3 * 3 + 4  # and the numbers of four places


@pytest.mark.slow
def test_images_one_by_one_equal_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch runs image by image on a CPU, with the same results."""
    model = MODELS["cnn"]
    params = noisy(model)
    random = np.random.default_rng(5)
    batch = {
        "image": random.uniform(size=(2, 4, 8, 8, 1)).astype(np.float32),
        "label": random.integers(0, 10, (2, 4)).astype(np.int32),
    }
    gradient = jax.value_and_grad(classification_loss(model.apply), has_aux=True)

    def run(params: Any, batch: Any) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        along = jax.jvp(lambda p: model.apply(p, first["image"]), (params,), (params,))
        return jax.vmap(gradient, (None, 0))(params, batch), gradient(params, first), along

    results, loops = [], []
    for cached in (10**9, 0):
        monkeypatch.setattr(classifiers, "CPU_CACHE_ELEMENTS", cached)
        traced = jax.jit(lambda *args: run(*args)).trace(params, batch)
        results.append(traced.lower().compile()(params, batch))
        loops.append(
            ["while" in traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu")]
        )
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-5)
    assert loops == [[False, False], [True, False]]


@pytest.mark.parametrize(
    ("axis", "axis_type"),
    [
        ("data", AxisType.Explicit),
        ("clients", AxisType.Auto),
        pytest.param("data", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param("clients", AxisType.Explicit, marks=pytest.mark.slow),
    ],
)
def test_no_image_moves_between_devices(
    axis: str, axis_type: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over images of several devices would gather them; one over a client's own does not."""
    monkeypatch.setattr(classifiers, "CPU_CACHE_ELEMENTS", 0)
    model = MODELS["cnn"]
    params = noisy(model)
    image = np.random.default_rng(6).uniform(size=(2, 4, 8, 8, 1)).astype(np.float32)

    def energy(params: Any, image: Any) -> jax.Array:
        return jnp.mean(model.apply(params, image) ** 2)

    @fedpax.program(clients=2)
    def by_client(params: Any, image: Any) -> Any:
        gradient = fedpax.federated_map(lambda image: jax.grad(energy)(params, image), image)
        return fedpax.federated_mean(gradient)

    def at_once(params: Any, image: Any) -> Any:
        return jax.grad(energy)(params, image.reshape(8, 8, 8, 1))

    expected = jax.jit(at_once)(params, image)
    mesh = fedpax.make_mesh(devices=jax.devices()[:2], axis_types=axis_type, **{axis: 2})
    with jax.set_mesh(mesh):
        laid_out = jax.device_put(image, NamedSharding(mesh, P(axis)))
        run = jax.jit(at_once if axis == "data" else by_client)
        compiled = run.lower(params, laid_out).compile()
        result = compiled(params, laid_out)
    chex.assert_trees_all_close(result, expected, rtol=1e-4, atol=1e-5)
    assert "all-gather" not in compiled.as_text()
    assert ("while" in compiled.as_text()) == (axis == "clients")


@pytest.mark.parametrize("channels", [1, 3])
def test_cnn_equals_jax_convolutions(channels: int) -> None:
    model = cnn(
        CNNConfig(
            image_height=9, image_width=8, num_channels=channels, filters=(4, 6), hidden_dim=5
        )
    )
    params = noisy(model)
    x = np.random.default_rng(1).normal(size=(3, 9, 8, channels)).astype(np.float32)
    expected: Any = x
    convolution = jax.jit(jax_convolution)
    for name in ("convolution_0", "convolution_1"):
        expected = np.asarray(convolution(expected, params[name]["kernel"]))
        expected = np.maximum(expected + params[name]["bias"], 0)
    # 5 x 4 pixels are left; pooling drops the fifth row.
    expected = expected[:, :4].reshape(3, 2, 2, 2, 2, 6).max(axis=(2, 4)).reshape(3, 24)
    expected = np.maximum(expected @ params["dense_0"]["kernel"] + params["dense_0"]["bias"], 0)
    expected = expected @ params["dense_1"]["kernel"] + params["dense_1"]["bias"]
    result = jax.jit(model.apply)(params, x)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    if channels == 1:
        np.testing.assert_array_equal(jax.jit(model.apply)(params, x[..., 0]), result)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MLPConfig(), 785 * 200 + 201 * 10),
        (MLPConfig((64, 10)), 65 * 10),
        (CNNConfig(), 10 * 32 + 289 * 64 + 9217 * 128 + 129 * 10),
        (CNNConfig(7, 9, 3, (4, 6), 5, 3), 28 * 4 + 37 * 6 + 13 * 5 + 6 * 3),
    ],
)
def test_parameters_are_counted(config: Any, expected: int) -> None:
    assert config.num_params() == expected


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "cnn" else n for n in MODELS]
)
def test_learns_digits(name: str) -> None:
    """After 150 steps of Adam on scikit-learn's digits, held-out accuracy is above 85%."""
    from sklearn.datasets import load_digits  # here, since its import takes seconds

    digits = load_digits()
    image, label = digits.images.astype(np.float32) / 16, digits.target.astype(np.int32)
    train, test = (
        {"image": image[part], "label": label[part]} for part in (slice(0, 1400), slice(1400, None))
    )
    model, optimizer = MODELS[name], optax.adam(1e-2)
    loss_fn = classification_loss(model.apply)

    @jax.jit
    def fit(params: Any, choices: jax.Array) -> Any:
        def step(carry: Any, chosen: jax.Array) -> Any:
            params, state = carry
            batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[chosen], train)
            (loss, _), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), loss

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), choices)
        return params, losses

    params = jax.jit(model.init)(jax.random.key(0))
    fresh, aux = jax.jit(loss_fn)(params, test)
    assert abs(fresh - np.log(10)) < 0.7 and aux["accuracy"] < 0.4
    params, losses = fit(params, np.random.default_rng(0).integers(0, 1400, (150, 64)))
    assert losses[-1] < 0.3
    assert jax.jit(loss_fn)(params, test)[1]["accuracy"] > 0.85


@pytest.mark.parametrize(
    "name", [n if n == "cnn" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_vmap_over_clients_equals_a_loop(name: str) -> None:
    model = MODELS[name]
    random = np.random.default_rng(2)
    params = noisy(model, 3)
    batches = {
        "image": random.uniform(size=(3, 4, 8, 8, 1)).astype(np.float32),
        "label": random.integers(0, 10, (3, 4)).astype(np.int32),
    }
    gradient = jax.grad(classification_loss(model.apply), has_aux=True)
    together = jax.jit(jax.vmap(gradient))(params, batches)[0]
    apart = jax.jit(lambda *args: jax.lax.map(lambda each: gradient(*each), args))(params, batches)
    chex.assert_trees_all_close(together, apart[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLPConfig(layer_sizes=(784,)), r"layer_sizes=\(784,\): expected at least two"),
        (lambda: MLPConfig(layer_sizes=(784, 0, 10)), r"\(784, 0, 10\): expected .* positive"),
        (lambda: CNNConfig(image_height=5), "image_height=5.*at least 6 pixels.*MLPConfig"),
        (lambda: CNNConfig(num_classes=0), "num_classes=0.*positive sizes"),
    ],
)
def test_invalid_sizes_raise(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


DROPOUT = CNNConfig(
    image_height=8, image_width=8, filters=(2, 3), hidden_dim=5, dropout_rates=(0.25, 0.5)
)


def test_dropout_equals_numpy_and_keeps_the_mean() -> None:
    """Features are dropped by their seeds alone; what is kept is scaled by 1 / (1 - rate)."""
    model, random = cnn(DROPOUT), np.random.default_rng(0)
    params = noisy(model)
    n = 4000
    image = np.tile(random.normal(size=(1, 8, 8)).astype(np.float32), (n, 1, 1))
    apply = jax.jit(model.apply)
    module = model.bind(params)
    pooled = np.asarray(jax.jit(module.features)(image[:1, ..., None]), np.float64).ravel()
    first, second = params["dense_0"], params["dense_1"]
    seeds = random.integers(2**32, size=n, dtype=np.uint32)
    masks = [
        np.asarray(
            jax.jit(
                jax.vmap(
                    lambda seed, layer=layer, rate=rate, size=size: jax.random.bernoulli(
                        jax.random.fold_in(jax.random.key(seed), layer), 1 - rate, (size,)
                    )
                )
            )(seeds)
        )
        for layer, (rate, size) in enumerate([(0.25, pooled.size), (0.5, 5)])
    ]
    hidden = masks[0] * pooled / 0.75 @ first["kernel"] + first["bias"]
    expected = masks[1] * np.maximum(hidden, 0) / 0.5 @ second["kernel"] + second["bias"]
    result = apply(params, image, seeds)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert_close(apply(params, image[:7], seeds[:7]), result[:7])
    for mask, rate in zip(masks, DROPOUT.dropout_rates, strict=True):
        deviation = np.sqrt(rate * (1 - rate) / n)
        assert np.abs(mask.mean(0) - (1 - rate)).max() < 5 * deviation
        correlations = np.corrcoef(mask.T) - np.eye(mask.shape[1])
        assert np.abs(correlations).max() < 6 / np.sqrt(n)
    # Without seeds, as in an evaluation, nothing is dropped.
    plain = jax.jit(cnn(dataclasses.replace(DROPOUT, dropout_rates=(0.0, 0.0))).apply)
    without = plain(params, image[:2])
    assert_close(apply(params, image[:2]), without)
    assert_close(plain(params, image[:2], seeds[:2]), without)


def test_a_loss_hands_the_seeds_of_a_batch_to_the_network() -> None:
    random = np.random.default_rng(0)
    image, seeds = np.float32(random.normal(size=(6, 3))), np.float32(random.normal(size=6))
    batch = {"image": image, "label": random.integers(3, size=6)}
    loss_fn = classification_loss(lambda w, x, seeds=0.5: w * x * np.reshape(seeds, (-1, 1)))
    for given, factor in (({}, 0.5), ({"dropout_seed": seeds}, seeds[:, None])):
        expected = classification_loss(lambda w, x, factor=factor: w * x * factor)(2.0, batch)
        assert loss_fn(2.0, batch | given)[0] == expected[0]


@pytest.mark.parametrize("rates", [(1.0, 0.5), (0.25, -0.1), (0.25, float("nan"))])
def test_dropout_rates_out_of_range_raise(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"dropout_rates=.* expected two numbers, each at least 0"):
        CNNConfig(dropout_rates=rates)
