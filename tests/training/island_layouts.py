"""Methods for islands on layouts of devices, with random states."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from small_regression import RandomRounds

from fedpax import Cohort
from fedpax.aggregators import compressed_mean, quantized_mean
from fedpax.aggregators.codecs import e3m0
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    branch_train_merge,
    data_parallel,
    diloco,
    eager_diloco,
    noloco,
    streaming_diloco,
)
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.training.compiled_round import state_shardings, with_shardings
from fedpax.training.experiment import Experiment, Run, Shardings
from fedpax.training.training_config import TrainingConfig

FEATURES, LAYERS, STEPS, BATCH = 4, 6, 6, 4


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return x + 0.1 * jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2), {}


def make_diloco(islands: int) -> FederatedAlgorithm:
    inner = optax.adamw(optax.cosine_decay_schedule(0.02, 100))
    return diloco(loss_fn, islands=islands, inner_optimizer=inner, aggregator=quantized_mean(4))


def make_streaming(islands: int) -> FederatedAlgorithm:
    return streaming_diloco(
        loss_fn, islands=islands, inner_optimizer=optax.adam(0.02), fragments=2, mixing=0.5
    )


def make_streaming_e3m0(islands: int) -> FederatedAlgorithm:
    return streaming_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.adam(0.02),
        fragments=3,
        mixing=0.5,
        aggregator=compressed_mean(e3m0(), error_feedback=True),
    )


METHODS = {
    "diloco": make_diloco,
    "streaming_e3m0": make_streaming_e3m0,
    "streaming_diloco": make_streaming,
    "data_parallel": lambda n: data_parallel(loss_fn, islands=n, optimizer=optax.adam(0.02)),
    "eager_diloco": lambda n: eager_diloco(loss_fn, islands=n, inner_optimizer=optax.adam(0.02)),
    "noloco": lambda n: noloco(loss_fn, islands=n, inner_optimizer=optax.adam(0.02)),
    "branch_train_merge": lambda n: branch_train_merge(
        loss_fn, islands=n, optimizer=optax.adam(0.02)
    ),
}
# The fields of a state that hold one entry per island; all others are the server's.
PLACED = {
    "diloco": {"inner_optimizer_state", "aggregator_state"},
    "streaming_diloco": {"inner_optimizer_state", "local_params"},
    "data_parallel": set(),
}
PLACED_IN_RUNS = PLACED | {
    "streaming_e3m0": {"inner_optimizer_state", "local_params", "aggregator_state"},
}


class Layout(NamedTuple):
    """A number of islands, and a mesh for them."""

    islands: int
    mesh: MeshConfig


LAYOUTS = {
    "1 island, fsdp 2": Layout(1, MeshConfig(fsdp=2)),
    "2 islands, islands 2 x fsdp 2": Layout(2, MeshConfig(islands=2, fsdp=2)),
    "2 islands, fsdp 4": Layout(2, MeshConfig(fsdp=4)),
    "4 islands, islands 4 x fsdp 2": Layout(4, MeshConfig(islands=4, fsdp=2)),
    "4 islands, islands 2 x fsdp 4": Layout(4, MeshConfig(islands=2, fsdp=4)),
}
THREE = Layout(3, MeshConfig(islands=3, fsdp=2))
TWO_OF_FOUR = Layout(2, MeshConfig(islands=2, fsdp=4))


def init_params(key: jax.Array) -> Any:
    layers = jax.random.normal(key, (LAYERS, FEATURES, FEATURES))
    return {"layers": layers, "head": jax.random.normal(key, (FEATURES,))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Islands(Experiment):
    """A method of islands on a random regression."""

    method: str
    islands: int

    def build(self) -> Run:
        mesh = self.mesh.make(available_devices()[: self.mesh.size])
        axis = "islands" if "islands" in mesh.shape else None
        fsdp = "fsdp" if "fsdp" in mesh.shape else None
        return Run(
            algorithm=METHODS[self.method](self.islands),
            init=init_params,
            cohorts=Rounds((self.islands, STEPS, BATCH), FEATURES, seed=0),
            evaluate=lambda params: {"loss": float(jnp.sum(params["head"] ** 2))},
            mesh=mesh,
            shardings=Shardings(
                params={
                    "layers": NamedSharding(mesh, PartitionSpec(None, fsdp)),
                    "head": NamedSharding(mesh, PartitionSpec(fsdp)),
                },
                cohort=NamedSharding(mesh, PartitionSpec(axis)),
            ),
            items_per_round=self.islands * STEPS * BATCH,
            placement="islands",
        )


class Rounds(RandomRounds):
    """Cohorts that are a function of their shape and the round."""

    def __next__(self) -> Any:
        return Cohort(super().__next__())

    def get_state(self) -> dict[str, Any]:
        return {"round": self.round, "settings": list(self.shape)}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["settings"] != list(self.shape):
            raise ValueError(f"islands is {self.shape[0]} and was {state['settings'][0]}")
        self.round = state["round"]


def experiment_of(method: str, layout: Layout, rounds: int) -> Islands:
    return Islands(
        method=method,
        islands=layout.islands,
        mesh=layout.mesh,
        training=TrainingConfig(rounds=rounds, evaluate_every=0, checkpoint_every=0),
    )


@functools.cache
def abstract_state(method: str, layout: Layout) -> Any:
    """Return a method's state as shapes, dtypes and shardings."""
    run = experiment_of(method, layout, 1).build()
    params = jax.eval_shape(run.init, jax.random.key(0))
    state = jax.eval_shape(run.algorithm.init, params)
    shardings = state_shardings(
        state,
        params,
        run.shardings.params,
        run.mesh,
        placement="islands",
        num_participants=layout.islands,
    )
    return with_shardings(state, shardings)


@functools.cache
def random_state(method: str, layout: Layout) -> Any:
    """Draw a state as after some rounds: every leaf random, counts too."""
    random = np.random.default_rng(layout.islands)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.device_put(random.integers(9, size=leaf.shape, dtype="i4"), leaf.sharding)
        return jax.device_put(random.normal(size=leaf.shape).astype("f"), leaf.sharding)

    return jax.tree.map(draw, abstract_state(method, layout))


def assert_same_bits(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
