"""Methods and private means against pfl: `pip install --no-deps pfl prv-accountant`.

pip cannot install pfl with its dependencies beside fedpax: through dp-accounting < 0.6 it needs
absl-py < 2.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from peers.server_rounds import cohort_of, draw_params, draw_updates, make

import fedpax
from fedpax.aggregators import adaptive_clip, chain, clip_by_norm, mean, noise_multiplier_for
from fedpax.algorithms import fedavg, fedprox, scaffold
from fedpax.transforms.program import program

torch = pytest.importorskip("torch")
pytest.importorskip("pfl")

CLIENTS, STEPS, BATCH, FEATURES, OUTPUTS, RATE = 4, 3, 5, 6, 2, 0.05


@pytest.fixture(scope="module")
def pfl():
    """Import pfl's modules, with PyTorch as their framework."""
    import_module = lambda name: importlib.import_module(f"pfl.{name}")
    selector = import_module("internal.ops.selector")
    selector.set_framework_module(import_module("internal.ops.pytorch_ops"))
    return import_module


def draw_data():
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.float32(rng.standard_normal(shape))
    params = {"weight": normal(FEATURES, OUTPUTS), "bias": normal(OUTPUTS)}
    x = normal(CLIENTS, STEPS, BATCH, FEATURES)
    return params, x, normal(CLIENTS, STEPS, BATCH, OUTPUTS)


def loss_fn(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["weight"] + params["bias"])
    return jnp.mean((predicted - batch["y"]) ** 2), {}


class Regression(torch.nn.Linear):
    """The same model in PyTorch, with the methods that pfl calls."""

    def loss(self, x, y):
        return torch.nn.functional.mse_loss(torch.tanh(self(x)), y)

    def metrics(self, x, y):
        return {}


def pfl_rounds(pfl, algorithm, rounds, params_type="algorithm.NNAlgorithmParams", **settings):
    """Run rounds of an algorithm of pfl on all clients, and return the server's model."""
    module, _, name = params_type.rpartition(".")
    params, x, y = draw_data()
    network = Regression(FEATURES, OUTPUTS)
    with torch.no_grad():
        network.weight.copy_(torch.tensor(params["weight"].T))
        network.bias.copy_(torch.tensor(params["bias"]))
    model = pfl("model.pytorch").PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    data = torch.tensor(x).flatten(1, 2), torch.tensor(y).flatten(1, 2)
    dataset = pfl("data.pytorch").PyTorchTensorDataset
    users = pfl("data.sampling").get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    backend = pfl("aggregate.simulate").SimulatedBackend(
        training_data=pfl("data").FederatedDataset(
            lambda user: dataset((data[0][user], data[1][user]), user_id=str(user)), users
        ),
        val_data=None,
    )
    algorithm.run(
        getattr(pfl(module), name)(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
            **settings,
        ),
        backend,
        model,
        pfl("hyperparam").NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH
        ),
        send_metrics_to_platform=False,
    )
    weight, bias = network.weight.detach().numpy().T, network.bias.detach().numpy()
    return {"weight": weight, "bias": bias}


def fedpax_rounds(algorithm, rounds):
    params, x, y = draw_data()
    cohort = fedpax.Cohort({"x": x, "y": y}, client_ids=jnp.arange(CLIENTS))
    state, train = algorithm.init(params), jax.jit(algorithm.round)
    for _ in range(rounds):
        state, _ = train(state, cohort)
    return state.params


def build(method, **settings):
    return method(loss_fn, cohort_size=CLIENTS, client_optimizer=optax.sgd(RATE), **settings)


def check(ours, theirs):
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_fedavg(pfl):
    theirs = pfl_rounds(pfl, pfl("algorithm").FederatedAveraging(), rounds=3)
    check(fedpax_rounds(build(fedavg), rounds=3), theirs)


def test_fedprox(pfl):
    module = "algorithm.fedprox"
    theirs = pfl_rounds(
        pfl, pfl(module).FedProx(), rounds=3, params_type=f"{module}.FedProxParams", mu=0.7
    )
    check(fedpax_rounds(build(fedprox, mu=0.7), rounds=3), theirs)


@pytest.mark.parametrize("sign", [1, -1], ids=["the paper's", "pfl's"])
def test_scaffold(pfl, sign):
    """pfl subtracts the correction c - c_i from a gradient where the paper adds it.

    Its controls are means of y_i - x and not of x - y_i, but it adds c - c_i all the same.
    """
    params, x, y = ({k: v.astype(np.float64) for k, v in draw_data()[0].items()}, *draw_data()[1:])
    gradient = jax.jit(jax.grad(lambda params, x, y: loss_fn(params, {"x": x, "y": y})[0]))
    server, control = params, jax.tree.map(np.zeros_like, params)
    controls = [control] * CLIENTS
    for _ in range(3):
        trained, new = [], []
        for i in range(CLIENTS):
            local = server
            for step in range(STEPS):
                result = gradient(local, x[i, step], y[i, step])
                local = jax.tree.map(
                    lambda w, g, c, own: w - RATE * (g + sign * (c - own)),
                    local,
                    result,
                    control,
                    controls[i],
                )
            trained.append(local)
            new.append(
                jax.tree.map(
                    lambda own, c, before, after: own - c + (before - after) / (STEPS * RATE),
                    controls[i],
                    control,
                    server,
                    local,
                )
            )
        server = jax.tree.map(lambda *all: np.mean(all, axis=0), *trained)
        control = jax.tree.map(lambda *all: np.mean(all, axis=0), *new)  # all clients take part
        controls = new

    if sign == 1:
        result = fedpax_rounds(build(scaffold, num_clients=CLIENTS, option="II"), rounds=3)
    else:
        module = "algorithm.scaffold"
        result = pfl_rounds(
            pfl,
            pfl(module).SCAFFOLD(),
            rounds=3,
            params_type=f"{module}.SCAFFOLDParams",
            population=CLIENTS,
            use_gradient_as_control_variate=False,
            user_state_storage=pfl("data.user_state").InMemoryUserStateStorage(),
        )
    check(result, server)


# ---- private means


def clip(pfl, mechanism, update):
    """Clip one user's update as a mechanism of pfl does."""
    tensors = {name: torch.tensor(x) for name, x in update.items()}
    statistics = pfl("stats").MappedVectorStatistics(tensors)
    clipped, metrics = mechanism.constrain_sensitivity(statistics)
    return {name: clipped[name].numpy() for name in update}, metrics


def test_clipping_to_a_norm(pfl):
    mechanism = pfl("privacy.gaussian_mechanism").GaussianMechanism(3.0, 1.0)
    updates = {name: x[0] for name, x in draw_updates(1, CLIENTS).items()}
    for x in updates.values():
        x[0] /= 10  # this one is below the norm
    clipped = [
        clip(pfl, mechanism, {name: x[i] for name, x in updates.items()})[0] for i in range(CLIENTS)
    ]
    algorithm = make(CLIENTS, aggregator=chain(clip_by_norm(3.0), mean()))
    start = draw_params()
    state, _ = jax.jit(algorithm.round)(algorithm.init(start), cohort_of(updates))
    expected = {n: start[n] + np.mean([own[n] for own in clipped], axis=0) for n in start}
    check(state.params, expected)


def test_noise_multiplier_of_one_release(pfl):
    """pfl's formula for one Gaussian mechanism is exact."""
    mechanism = pfl("privacy.gaussian_mechanism").GaussianMechanism
    for epsilon, delta in [(0.5, 1e-6), (2.0, 1e-5), (8.0, 1e-4)]:
        exact = mechanism.construct_single_iteration(1.0, epsilon, delta).relative_noise_stddev
        ours = noise_multiplier_for(epsilon=epsilon, num_rounds=1, delta=delta)
        assert exact - 1e-4 < ours < 1.01 * exact + 1e-3


def test_the_adaptive_clipping_norm(pfl):
    module = pfl("privacy.adaptive_clipping")
    gaussian = pfl("privacy.gaussian_mechanism").GaussianMechanism
    theirs = module.AdaptiveClippingGaussianMechanism(
        lambda norm: gaussian(norm, 1e-6),
        initial_clipping_bound=1.0,
        clipping_indicator_noise_stddev=1e-3,
        adaptive_clipping_norm_quantile=0.7,
        log_space_step_size=0.3,
    )
    aggregator = chain(adaptive_clip(initial_norm=1.0, quantile=0.7, learning_rate=0.3), mean())

    @jax.jit
    @program(clients=CLIENTS)
    def average(state, updates):
        return aggregator.aggregate(state, updates, None)[1]

    state = aggregator.init(None)
    for updates in np.random.default_rng(4).standard_normal((12, CLIENTS, 3)):
        norm = theirs.mutable_clipping_bound.value()
        np.testing.assert_allclose(state.max_norm, norm, rtol=1e-5)
        below = np.mean(np.linalg.norm(updates, axis=1) <= norm)
        theirs._geometric_update(below)
        state = average(state, np.float32(updates))
    assert state.max_norm > 1.1
