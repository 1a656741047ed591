from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.models.losses import next_word_loss
from fedpax.models.lstm import LSTMConfig, lstm


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("has_projections", [True, False])
def test_logits_equal_a_loop_over_layers_and_steps(has_projections: bool) -> None:
    rng = np.random.default_rng(0)
    config = LSTMConfig(7, 3, 5, num_layers=2, has_projections=has_projections)
    model = lstm(config)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape), jax.eval_shape(model.init, jax.random.key(0))
    )
    tokens = rng.integers(0, 7, (2, 4))
    x = params["embedding"][tokens]
    for k in range(config.num_layers):
        layer = params["layers"][f"lstm_{k}"]
        h, c, outputs = np.zeros((2, 5)), np.zeros((2, 5)), []
        for t in range(tokens.shape[1]):
            gates = x[:, t] @ layer["kernel"] + h @ layer["recurrent_kernel"] + layer["bias"]
            i, f, g, o = np.split(gates, 4, axis=-1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            outputs.append(h)
            if has_projections:
                dense = params["projections"][f"dense_{k}"]
                outputs[-1] = h @ dense["kernel"] + dense["bias"]
        x = np.stack(outputs, axis=1)
    expected = x @ params["logits"]["kernel"] + params["logits"]["bias"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, tokens), expected, atol=2e-4)


SHAKESPEARE = LSTMConfig(90, 8, 256, num_layers=2, has_projections=False)


def test_the_parameters_of_projected_layers_are_counted() -> None:
    layers = 2 * (4 * 12 * (8 + 12 + 1) + 13 * 8)
    assert LSTMConfig(50, 8, 12, num_layers=2).num_params() == 50 * 8 + layers + 9 * 50


def test_the_published_network_of_shakespeare_has_820_522_parameters() -> None:
    assert SHAKESPEARE.num_params() == 820_522


@pytest.mark.parametrize("has_projections", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_step_in_bfloat16_lowers_the_loss(has_projections: bool) -> None:
    model = lstm(LSTMConfig(11, 4, 6, num_layers=2, has_projections=has_projections))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.bfloat16(0.3 * rng.normal(size=leaf.shape)),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    rows = np.random.default_rng(0).integers(11, size=(4, 6))
    assert jax.eval_shape(model.apply, params, rows).dtype == jnp.bfloat16
    batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "mask": np.ones((4, 5), bool)}

    @jax.jit
    def step(params: Any) -> tuple[jax.Array, Any]:
        loss_fn = lambda p: next_word_loss(model.apply, 10)(p, batch)[0]
        loss, gradient = jax.value_and_grad(loss_fn)(params)
        return loss, jax.tree.map(lambda p, g: p - g, params, gradient)

    before, moved = step(params)
    after, _ = step(moved)
    assert after < before - 0.02


def test_forget_gates_start_open_and_embeddings_small() -> None:
    params = jax.jit(lstm(LSTMConfig(11, 4, 6)).init)(jax.random.key(0))
    assert params["layers"]["lstm_0"]["bias"].tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 12
    assert 0.04 < jnp.max(jnp.abs(params["embedding"])) <= 0.05


def test_a_size_of_0_raises() -> None:
    with pytest.raises(ValueError, match=r"num_layers=0, .*\): expected positive sizes"):
        LSTMConfig(num_layers=0)
