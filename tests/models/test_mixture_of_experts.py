"""The mixture of experts on one device, against loops over tokens and experts."""

import functools
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedpax
from fedpax.models.losses import transformer_loss
from fedpax.models.mixture_of_experts import MixtureOfExperts, routing_losses
from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.models.transformer import TransformerConfig, transformer

EMBED_DIM, MLP_DIM = 6, 5


def mixture(experts: int, k: int) -> FunctionalModel:
    return to_functional(
        partial(MixtureOfExperts, EMBED_DIM, MLP_DIM, experts, k, output_scale=1.0)
    )


def draw(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def draw_params(model: FunctionalModel, *front: int) -> Any:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    flat, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(
        tree, [draw(*front, *leaf.shape, seed=2 + i) for i, leaf in enumerate(flat)]
    )


def take(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


def softmax(x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def loops(params: Any, x: Any, k: int) -> tuple[Any, dict[str, float]]:
    """Compute the reference with loops over tokens and experts."""
    tokens = x.reshape(-1, EMBED_DIM)
    logits = tokens @ params["router"]
    y, experts = np.zeros_like(tokens), logits.shape[1]
    counts = np.zeros(experts)
    for n, token in enumerate(tokens):
        chosen = np.argsort(-logits[n])[:k]
        for share, e in zip(softmax(logits[n, chosen]), chosen, strict=True):
            gate = token @ params["gate"][e]
            inner = gate / (1 + np.exp(-gate)) * (token @ params["up"][e])
            y[n] += share * (inner @ params["down"][e])
            counts[e] += 1
    losses = {
        "load_balance": experts * (counts / counts.sum()) @ softmax(logits).mean(0),
        "router_z": np.mean(np.log(np.exp(logits).sum(-1)) ** 2),
    }
    return y.reshape(x.shape), losses


def dense(params: Any, x: Any, k: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Apply every expert to every token, with weight 0 where it was not chosen."""
    logits = x @ params["router"]
    chosen_logits, chosen = jax.lax.top_k(logits, k)
    picked = jax.nn.one_hot(chosen, logits.shape[-1], dtype=x.dtype)
    weights = jnp.einsum("btk,btke->bte", jax.nn.softmax(chosen_logits), picked)
    inner = jax.nn.silu(jnp.einsum("btw,ewm->btem", x, params["gate"]))
    inner = inner * jnp.einsum("btw,ewm->btem", x, params["up"])
    y = jnp.einsum("btem,emw,bte->btw", inner, params["down"], weights)
    fraction = picked.mean((0, 1, 2))
    return y, {
        "load_balance": logits.shape[-1] * fraction @ jax.nn.softmax(logits).mean((0, 1)),
        "router_z": jnp.mean(jax.nn.logsumexp(logits, -1) ** 2),
    }


def total(outputs: Any) -> jax.Array:
    """Reduce all outputs to one number."""
    y, losses = outputs
    direction = draw(*y.shape, seed=9).astype(y.dtype)
    return jnp.sum(y * direction) + 3 * losses["load_balance"] + 0.5 * losses["router_z"]


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    actual, expected = jax.device_get((actual, expected))
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


@functools.cache
def compiled(experts: int, k: int) -> tuple[Any, Any]:
    """Compile the mixture's gradient and outputs, and the gradient of the dense computation."""
    model = mixture(experts, k)

    def with_outputs(p: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        outputs = model.apply(p, x)
        return total(outputs).astype(jnp.float32), outputs

    return (
        jax.jit(jax.grad(with_outputs, (0, 1), has_aux=True)),
        jax.jit(jax.grad(lambda p, x: total(dense(p, x, k)), (0, 1))),
    )


def check(params: Any, x: Any, experts: int, k: int) -> Any:
    """Compare values with loops, gradients with the dense computation, in float64."""
    step, dense_step = compiled(experts, k)
    with jax.enable_x64(True):
        gradient, outputs = step(params, x)
        assert outputs[0].dtype == jnp.float64
        close(outputs, loops(params, x, k))
        close(gradient, dense_step(params, x))
    return gradient


@pytest.mark.parametrize(
    ("experts", "k", "shape"),
    [
        (4, 2, (2, 7)),
        pytest.param(8, 2, (1, 1), marks=pytest.mark.slow),  # one token
        pytest.param(3, 3, (1, 4), marks=pytest.mark.slow),  # every expert for every token
        pytest.param(5, 1, (2, 7), marks=pytest.mark.slow),
    ],
)
def test_equals_loops(experts: int, k: int, shape: tuple[int, int]) -> None:
    check(draw_params(mixture(experts, k)), draw(*shape, EMBED_DIM), experts, k)


def test_all_tokens_to_the_same_experts() -> None:
    """No token is dropped, and experts without tokens have no gradient."""
    params, x = draw_params(mixture(4, 2)), draw(2, 7, EMBED_DIM)
    x[..., 0] = 1
    params["router"][0] = [0, 90, 0, 100]
    gradient, _ = check(params, x, 4, 2)
    for name in ("gate", "up", "down"):
        used = np.any(np.asarray(gradient[name]) != 0, axis=(1, 2))
        assert used.tolist() == [False, True, False, True]


@pytest.mark.slow
def test_bfloat16_over_float32_parameters() -> None:
    x = jnp.asarray(draw(2, 7, EMBED_DIM), jnp.bfloat16)
    params = jax.tree.map(np.float32, draw_params(mixture(4, 2)))
    step, dense_step = compiled(4, 2)
    (gradient, _), (y, losses) = step(params, x)
    assert y.dtype == jnp.bfloat16
    assert {loss.dtype for loss in losses.values()} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    exact = np.asarray(x, np.float32)
    expected = loops(params, exact, 2)
    close(losses, expected[1], 1e-5)
    slope, _ = dense_step(params, exact)
    # Each of three matmuls rounds to 8 bits of mantissa.
    pairs = [(gradient[name], slope[name]) for name in params]
    for mine, true in [(y.astype(np.float32), expected[0]), *pairs]:
        assert np.linalg.norm(mine - true) / np.linalg.norm(true) < 0.02


def test_the_router_computes_in_float32() -> None:
    """Logits that are equal in bfloat16 still choose the larger one."""
    params = jax.tree.map(np.float32, draw_params(mixture(4, 2)))
    x = np.zeros((2, 7, EMBED_DIM), np.float32)
    x[..., 0] = 1
    step, other = compiled(4, 2)[0], []
    for larger in (1, 2):
        params["router"][0] = [9, 8, 8, 0]
        params["router"][0, larger] += 1e-4
        _, (y, _) = step(params, jnp.asarray(x, jnp.bfloat16))
        other.append(loops(params, x, 2)[0])
        np.testing.assert_allclose(y.astype(np.float32), other[-1], rtol=0.03, atol=0.03)
    assert np.abs(other[0] - other[1]).max() > 0.2


@pytest.mark.slow
def test_scan_over_layers() -> None:
    model, x = mixture(4, 2), jnp.asarray(draw(2, 5, EMBED_DIM), jnp.float32)
    stacked = jax.tree.map(np.float32, draw_params(model, 3))

    @partial(jax.checkpoint, prevent_cse=False)
    def step(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        y, losses = model.apply(params, x)
        return jnp.tanh(x + y), losses

    def scanned(params: Any) -> jax.Array:
        y, losses = jax.lax.scan(step, x, params)
        return total((y, jax.tree.map(jnp.sum, losses)))

    def looped(params: Any) -> jax.Array:
        y, sums = x, {"load_balance": 0.0, "router_z": 0.0}
        for i in range(3):
            z, losses = dense(take(params, i), y, 2)
            y, sums = jnp.tanh(y + z), jax.tree.map(jnp.add, sums, losses)
        return total((y, sums))

    close(
        jax.jit(jax.value_and_grad(scanned))(stacked),
        jax.jit(jax.value_and_grad(looped))(stacked),
        1e-4,  # float32 sums in another order
    )


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_vmap(shared: bool) -> None:
    """Islands with parameters of their own, or shared ones."""
    model, x = mixture(4, 2), draw(3, 2, 5, EMBED_DIM).astype(np.float32)
    params = jax.tree.map(np.float32, draw_params(model, *([] if shared else [3])))
    step = jax.value_and_grad(lambda p, x: total(model.apply(p, x)), (0, 1))
    result = jax.device_get(jax.jit(jax.vmap(step, (None if shared else 0, 0)))(params, x))
    jitted = jax.jit(jax.value_and_grad(lambda p, x: total(dense(p, x, 2)), (0, 1)))
    for i in range(3):
        close(take(result, i), jitted(params if shared else take(params, i), x[i]), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [None, 1])
def test_inside_federated_map(at_once: int | None) -> None:
    model, x = mixture(4, 2), draw(3, 2, 5, EMBED_DIM).astype(np.float32)
    params = jax.tree.map(np.float32, draw_params(model))

    @fedpax.program(islands=3, chunk_size=at_once)
    def mean_loss(params: Any, x: jax.Array) -> jax.Array:
        return fedpax.federated_mean(
            fedpax.federated_map(lambda x: total(model.apply(params, x)), x)
        )

    def plain(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.stack([total(dense(params, x[i], 2)) for i in range(3)]))

    result = jax.jit(jax.value_and_grad(mean_loss))(params, x)
    close(result, jax.jit(jax.value_and_grad(plain))(params, x), 1e-4)


def test_routing_losses_of_even_and_of_collapsed_routing() -> None:
    losses = jax.jit(routing_losses)
    even = losses(np.zeros((6, 3), np.float32), np.arange(12).reshape(6, 2) % 3)
    close(even, {"load_balance": 1.0, "router_z": np.log(3) ** 2}, 1e-6)
    certain = draw(6, 3).astype(np.float32)
    certain[:, 1] = 200
    collapsed = losses(certain, np.ones((6, 1), int))
    close(collapsed, {"load_balance": 3.0, "router_z": 200.0**2}, 1e-5)


def switch_loss(logits: Any) -> float:
    """Compute Switch Transformers' loss without alpha (arXiv:2101.03961, equations 4 to 6)."""
    tokens, experts = logits.shape
    probabilities, total = softmax(logits), 0.0
    for i in range(experts):
        f = sum(np.argmax(probabilities[x]) == i for x in range(tokens)) / tokens
        total += f * sum(probabilities[x, i] for x in range(tokens)) / tokens
    return experts * total


def mixtral_loss(layers: list[Any], k: int) -> float:
    """Compute Hugging Face's `load_balancing_loss_func` of the layers' logits [tokens, experts]."""
    logits = np.concatenate(layers)
    weights = softmax(logits)
    chosen = np.argsort(-weights)[:, :k]
    mask = np.eye(logits.shape[1])[chosen]  # [layers tokens, k, experts]
    tokens_per_expert, probability = mask.mean(axis=0), weights.mean(axis=0)
    return logits.shape[1] * np.sum(tokens_per_expert * probability[None])


def load_balance(logits: Any, k: int) -> float:
    with jax.enable_x64(True):
        chosen = jax.lax.top_k(jnp.asarray(logits), k)[1]
        return float(routing_losses(jnp.asarray(logits), chosen)["load_balance"])


def test_with_one_expert_per_token_load_balance_is_the_loss_of_switch_transformers() -> None:
    logits = 2 * draw(40, 6)
    assert load_balance(logits, 1) == pytest.approx(switch_loss(logits), rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_load_balance_is_the_loss_of_mixtral_over_k(k: int) -> None:
    logits = 2 * draw(40, 6)
    assert k * load_balance(logits, k) == pytest.approx(mixtral_loss([logits], k), rel=1e-12)


def test_layers_are_balanced_one_by_one_where_mixtral_balances_their_union() -> None:
    """Two layers, each with one expert for all tokens: Mixtral's loss is as for even routing."""
    layers = [np.tile([9.0, 0.0], (8, 1)), np.tile([0.0, 9.0], (8, 1))]
    assert mixtral_loss(layers, 1) == pytest.approx(1.0)
    assert np.mean([load_balance(logits, 1) for logits in layers]) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.slow
def test_the_transformer_loss_weighs_the_mean_over_layers() -> None:
    """Switch adds alpha times the loss of each layer: alpha = 0.01 is 0.01 * num_layers here."""
    config = TransformerConfig(
        vocab_size=23, num_layers=3, embed_dim=16, num_heads=2, mlp_dim=8, num_experts=4
    )
    model, alpha = transformer(config), 0.01
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 23, (2, 9)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss_fn = transformer_loss(config, load_balance_weight=alpha * config.num_layers)
    loss, aux = jax.jit(loss_fn)(params, batch)
    _, sums = jax.jit(lambda p: model.bind(p).hidden(batch["inputs"]))(params)
    assert sums["load_balance"] > 3
    np.testing.assert_allclose(loss, aux["cross_entropy"] + alpha * sums["load_balance"], rtol=1e-6)


@pytest.mark.slow
def test_minimizing_the_load_balancing_loss_balances_the_router() -> None:
    """50 steps of gradient descent on it alone."""
    model = mixture(4, 1)
    params = jax.tree.map(np.float32, draw_params(model))
    x = draw(4, 32, EMBED_DIM).astype(np.float32)
    x[..., 0] = 1
    params["router"][0] = [2, 0, 0, 0]
    step = jax.jit(jax.value_and_grad(lambda p: model.apply(p, jnp.asarray(x))[1]["load_balance"]))
    before, _ = step(params)
    for _ in range(50):
        loss, gradient = step(params)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)
    assert before > 1.3 and loss < 1.1


@pytest.mark.parametrize("k", [1, 2])
def test_the_output_trains_the_router_with_two_experts_per_token_and_not_with_one(k: int) -> None:
    """As in Mixtral, whose weights are renormalized over the chosen experts."""
    model = mixture(4, k)
    params, x = jax.tree.map(np.float32, draw_params(model)), draw(2, 8, EMBED_DIM)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.apply(p, jnp.float32(x))[0] ** 2)))(params)
    assert np.any(gradient["router"]) == (k == 2) and np.all(np.any(gradient["down"], axis=(1, 2)))


def test_parameters_and_their_axes() -> None:
    model = to_functional(partial(MixtureOfExperts, 64, 96, 8, 2, output_scale=0.5))
    params = jax.jit(model.init)(jax.random.key(0))
    assert {name: (leaf.shape, model.logical_axes[name]) for name, leaf in params.items()} == {
        "router": ((64, 8), (None, None)),
        "gate": ((8, 64, 96), ("experts", "embed", "mlp")),
        "up": ((8, 64, 96), ("experts", "embed", "mlp")),
        "down": ((8, 96, 64), ("experts", "mlp", "embed")),
    }
    stddevs = {"router": 64**-0.5, "gate": 64**-0.5, "up": 64**-0.5, "down": 0.5 * 96**-0.5}
    for name, stddev in stddevs.items():
        # The estimate has a relative standard deviation of 1 / sqrt(2 n): 3% for the router's 512.
        assert abs(float(np.std(params[name])) / stddev - 1) < 0.1
    assert not np.allclose(params["gate"][0], params["gate"][1])


@pytest.mark.parametrize(
    ("experts", "k", "message"),
    [
        (4, 5, r"num_experts_per_token=5, but there are num_experts=4: expected 1 to 4 experts"),
        (4, 0, r"num_experts_per_token=0.*expected 1 to 4 experts"),
        (0, 1, r"num_experts=0, expected at least 1.*FeedForward"),
    ],
)
def test_an_invalid_number_of_experts_raises(experts: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(EMBED_DIM, MLP_DIM, experts, k, output_scale=1.0, rngs=nnx.Rngs(0))
