"""Clients' local steps against PyTorch's optimizers: `pip install torch`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax.algorithms import fedavg

torch = pytest.importorskip("torch")

CLIENTS, STEPS, BATCH, FEATURES, OUTPUTS = 3, 6, 4, 5, 2
OPTIMIZERS = {
    "SGD": ({"lr": 0.1}, optax.sgd(0.1)),
    "SGD, weight decay": (
        {"lr": 0.1, "weight_decay": 0.03},
        optax.chain(optax.add_decayed_weights(0.03), optax.sgd(0.1)),
    ),
    "SGD, Nesterov": (
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        optax.sgd(0.05, momentum=0.9, nesterov=True),
    ),
    "Adam": ({"lr": 0.02, "betas": (0.8, 0.95)}, optax.adam(0.02, b1=0.8, b2=0.95)),
    "AdamW": ({"lr": 0.02, "weight_decay": 0.1}, optax.adamw(0.02, weight_decay=0.1)),
    "RMSprop": ({"lr": 0.01, "alpha": 0.9}, optax.rmsprop(0.01, eps_in_sqrt=False)),
}


def draw():
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.float32(rng.standard_normal(shape))
    params = {"weight": normal(FEATURES, OUTPUTS), "bias": normal(OUTPUTS)}
    x, y = normal(CLIENTS, STEPS, BATCH, FEATURES), normal(CLIENTS, STEPS, BATCH, OUTPUTS)
    return params, x, y, np.array([3, 10, 5])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_round_of_fedavg(name):
    options, optimizer = OPTIMIZERS[name]
    params, x, y, num_examples = draw()

    trained, losses = [], []
    for client in range(CLIENTS):
        model = {key: torch.tensor(value, requires_grad=True) for key, value in params.items()}
        steps = getattr(torch.optim, name.partition(",")[0])(list(model.values()), **options)
        for inputs, targets in zip(torch.tensor(x[client]), torch.tensor(y[client]), strict=True):
            steps.zero_grad()
            logits = torch.tanh(inputs @ model["weight"] + model["bias"])
            loss = torch.nn.functional.mse_loss(logits, targets)
            loss.backward()
            steps.step()
            losses.append(loss.item())
        trained.append({key: value.detach().numpy() for key, value in model.items()})

    def loss_fn(params, batch):
        logits = jnp.tanh(batch["x"] @ params["weight"] + params["bias"])
        return jnp.mean((logits - batch["y"]) ** 2), {}

    algorithm = fedavg(loss_fn, cohort_size=CLIENTS, client_optimizer=optimizer)
    cohort = fedpax.Cohort({"x": x, "y": y}, jnp.array(num_examples))
    state, metrics = jax.jit(algorithm.round)(algorithm.init(params), cohort)
    for key in params:
        mean = np.average([own[key] for own in trained], axis=0, weights=num_examples)
        np.testing.assert_allclose(state.params[key], mean, rtol=1e-4, atol=1e-5)
    by_client = np.reshape(losses, (CLIENTS, STEPS)).mean(1)
    np.testing.assert_allclose(
        metrics["loss"], np.average(by_client, weights=num_examples), rtol=1e-5
    )
