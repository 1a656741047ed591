import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.models.lstm import LSTMConfig, lstm


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_logits_equal_a_loop_over_layers_and_steps() -> None:
    rng = np.random.default_rng(0)
    config = LSTMConfig(vocab_size=7, embed_dim=3, hidden_dim=5, num_layers=2)
    model = lstm(config)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape), jax.eval_shape(model.init, jax.random.key(0))
    )
    tokens = rng.integers(0, 7, (2, 4))
    x = params["embedding"][tokens]
    for k in range(config.num_layers):
        layer, dense = params["layers"][f"lstm_{k}"], params["projections"][f"dense_{k}"]
        h, c, outputs = np.zeros((2, 5)), np.zeros((2, 5)), []
        for t in range(tokens.shape[1]):
            gates = x[:, t] @ layer["kernel"] + h @ layer["recurrent_kernel"] + layer["bias"]
            i, f, g, o = np.split(gates, 4, axis=-1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            outputs.append(h @ dense["kernel"] + dense["bias"])
        x = np.stack(outputs, axis=1)
    expected = x @ params["logits"]["kernel"] + params["logits"]["bias"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, tokens), expected, atol=2e-4)


@pytest.mark.parametrize("config", [LSTMConfig(), LSTMConfig(50, 8, 12, num_layers=2)])
def test_the_parameters_are_those_that_the_configuration_counts(config: LSTMConfig) -> None:
    shapes = jax.eval_shape(lstm(config).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.num_params()


def test_forget_gates_start_open_and_embeddings_small() -> None:
    params = jax.jit(lstm(LSTMConfig(11, 4, 6)).init)(jax.random.key(0))
    assert params["layers"]["lstm_0"]["bias"].tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 12
    assert 0.04 < jnp.max(jnp.abs(params["embedding"])) <= 0.05


def test_a_size_of_0_raises() -> None:
    with pytest.raises(ValueError, match=r"num_layers=0\): expected positive sizes"):
        LSTMConfig(num_layers=0)
