"""A small experiment for tests of training, also in separate processes.

Local SGD on a random regression: every client takes some steps from the server's model on its own
data and keeps its momentum between rounds; the server averages the models.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithm import FederatedAlgorithm
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.training import round_loop
from fedpax.training.compiled_round import compile_round
from fedpax.training.experiment import Experiment, Run, Shardings
from fedpax.training.training_config import TrainingConfig


@contextlib.contextmanager
def shared_compilation() -> Iterator[None]:
    """Compile the rounds of runs that differ in their data alone once."""
    compiled: dict[Any, Any] = {}

    def compile_cached(run: Run, cohort: Any, **options: Any) -> Any:
        size = getattr(run.cohorts, "num_clients", None)
        key = (run.mesh, size, str(jax.tree.map(jax.typeof, cohort)), *options.items())
        if key not in compiled:
            compiled[key] = compile_round(run, cohort, **options)
        return compiled[key]

    with mock.patch.object(round_loop, "compile_round", compile_cached):
        yield


class LocalSGDState(NamedTuple):
    params: Any
    momentum: Any  # per client: [clients, ...]
    steps: jax.Array
    key: jax.Array


def local_sgd(
    loss_fn: Callable[[Any, Any], jax.Array], clients: int, learning_rate: float
) -> FederatedAlgorithm:
    """Return SGD with momentum on every client and the mean of the models on the server."""

    def init(params: Any) -> LocalSGDState:
        momentum = jax.tree.map(lambda x: jnp.zeros((clients, *x.shape), x.dtype), params)
        return LocalSGDState(params, momentum, jnp.zeros((), jnp.int32), jax.random.key(7))

    def round(state: LocalSGDState, batches: Any) -> tuple[LocalSGDState, dict[str, jax.Array]]:
        key, noise_key = jax.random.split(state.key)

        def client(momentum: Any, batches: Any) -> tuple[Any, Any, jax.Array]:
            def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
                params, momentum = carry
                loss, slope = jax.value_and_grad(loss_fn)(params, batch)
                momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slope)
                params = jax.tree.map(lambda p, m: p - learning_rate * m, params, momentum)
                return (params, momentum), loss

            (params, momentum), losses = jax.lax.scan(step, (state.params, momentum), batches)
            return params, momentum, losses.mean()

        params, momentum, losses = jax.vmap(client)(state.momentum, batches)
        # Noise, so that the random key of the state must be restored from a checkpoint too.
        params = jax.tree.map(lambda p: p.mean(0) + 1e-3 * jax.random.uniform(noise_key), params)
        new = LocalSGDState(params, momentum, state.steps + batches["x"].shape[1], key)
        return new, {"loss": losses.mean(), "largest": losses.max()}

    return FederatedAlgorithm(init, round)


class RandomRounds:
    """An endless stream of random regression batches, a function of (seed, round) alone."""

    def __init__(
        self, shape: tuple[int, int, int], features: int, seed: int, pause: float = 0.0
    ) -> None:
        self.shape, self.features, self.seed, self.round = shape, features, seed, 0
        self.pause = pause
        self.truth = np.random.default_rng(seed).normal(size=features).astype(np.float32)

    def __next__(self) -> dict[str, np.ndarray]:
        time.sleep(self.pause)
        random = np.random.default_rng((self.seed, self.round))
        self.round += 1
        x = random.normal(size=(*self.shape, self.features)).astype(np.float32)
        noise = 0.1 * random.normal(size=self.shape).astype(np.float32)
        return {"x": x, "y": x @ self.truth + noise}

    @property
    def shapes(self) -> Any:
        x = jax.ShapeDtypeStruct((*self.shape, self.features), jnp.float32)
        return {"x": x, "y": jax.ShapeDtypeStruct(self.shape, jnp.float32)}

    def get_state(self) -> dict[str, Any]:
        return {"round": self.round}

    def set_state(self, state: dict[str, Any]) -> None:
        self.round = state["round"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model.

    Attributes:
        features: number of inputs of the regression.
        hidden: width of the hidden layer.
    """

    features: int = 16
    hidden: int = 32


@dataclasses.dataclass(frozen=True)
class Regression(Experiment):
    """Local SGD on a random regression.

    Attributes:
        model: the model.
        learning_rate: learning rate of the clients.
        clients: number of clients.
        pause: seconds before each cohort is drawn, so that signals arrive during the training.
    """

    model: ModelConfig = ModelConfig()
    learning_rate: float = 0.01
    clients: int = 8
    pause: float = 0.0

    def build(self) -> Run:
        features, hidden = self.model.features, self.model.hidden
        mesh = self.mesh.make(available_devices()[: self.mesh.size])

        def init(key: jax.Array) -> Any:
            first, second = jax.random.split(key)
            return {
                "hidden": 2
                * jax.random.uniform(first, (features, hidden), minval=-1)
                / features**0.5,
                "out": 2 * jax.random.uniform(second, (hidden,), minval=-1) / hidden**0.5,
            }

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            predicted = jax.nn.gelu(batch["x"] @ params["hidden"]) @ params["out"]
            return jnp.mean((predicted - batch["y"]) ** 2)

        held_out = RandomRounds((1, 1, 64), features, seed=0)
        held_out.round = 10**6
        held_out_batch = jax.tree.map(lambda x: x[0, 0], next(held_out))
        held_out_loss = jax.jit(loss_fn)

        fsdp = "fsdp" if "fsdp" in mesh.shape else None
        clients = "clients" if "clients" in mesh.shape else None
        return Run(
            algorithm=local_sgd(loss_fn, self.clients, self.learning_rate),
            init=init,
            cohorts=RandomRounds((self.clients, 2, 8), features, seed=0, pause=self.pause),
            evaluate=lambda params: {"loss": float(held_out_loss(params, held_out_batch))},
            mesh=mesh,
            shardings=Shardings(
                params={
                    "hidden": NamedSharding(mesh, PartitionSpec(None, fsdp)),
                    "out": NamedSharding(mesh, PartitionSpec(fsdp)),
                },
                cohort=NamedSharding(mesh, PartitionSpec(clients)),
            ),
            items_per_round=self.clients * 2 * 8,
            placement="clients",
        )


def regression() -> Regression:
    """Local SGD on 8 clients; the parameters of each are sharded over two devices."""
    return Regression(
        training=TrainingConfig(rounds=12, evaluate_every=4, checkpoint_every=3),
        mesh=MeshConfig(clients=4, fsdp=2),
    )


def single_client() -> Regression:
    """The same model with one client."""
    return dataclasses.replace(regression(), clients=1, mesh=MeshConfig(fsdp=2))
