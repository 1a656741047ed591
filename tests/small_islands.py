"""A small experiment of islands that keep their own optimizers: DiLoCo on a random regression."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from small_regression import RandomRounds

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import diloco
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.training.experiment import Experiment, Run, Shardings
from fedpax.training.training_config import TrainingConfig

FEATURES = 16


class IslandRounds(RandomRounds):
    """The rounds of `small_regression` as cohorts."""

    def __next__(self) -> Any:
        return Cohort(super().__next__())

    @property
    def shapes(self) -> Any:
        return Cohort(super().shapes)


def make_algorithm(islands: int) -> FederatedAlgorithm:
    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), {}

    return diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=optax.adam(0.01),
        outer_optimizer=optax.sgd(0.7, momentum=0.9, nesterov=True),
    )


def make_rounds(islands: int, pause: float = 0.0) -> IslandRounds:
    return IslandRounds((islands, 3, 8), FEATURES, seed=0, pause=pause)


def init(key: jax.Array) -> Any:
    return {"w": jax.random.normal(key, (FEATURES,))}


@dataclasses.dataclass(frozen=True)
class Islands(Experiment):
    """DiLoCo with Adam on each island.

    Attributes:
        islands: number of islands.
        pause: seconds before each cohort is drawn, so that signals arrive during the training.
    """

    islands: int = 3
    pause: float = 0.0

    def build(self) -> Run:
        mesh = self.mesh.make(available_devices()[: self.mesh.size])
        rounds = make_rounds(self.islands, self.pause)
        return Run(
            algorithm=make_algorithm(self.islands),
            init=init,
            cohorts=rounds,
            cohort_shapes=rounds.shapes,
            evaluate=lambda params: {"loss": float(jnp.sum(params["w"] ** 2))},
            mesh=mesh,
            shardings=Shardings(
                params={
                    "w": NamedSharding(
                        mesh, PartitionSpec("fsdp" if "fsdp" in mesh.shape else None)
                    )
                },
                cohort=NamedSharding(
                    mesh, PartitionSpec("islands" if "islands" in mesh.shape else None)
                ),
            ),
            items_per_round=self.islands * 24,
            placement="islands",
        )


def islands() -> Islands:
    """DiLoCo on 3 islands, one device each."""
    return Islands(
        training=TrainingConfig(rounds=60, evaluate_every=0, checkpoint_every=20),
        mesh=MeshConfig(islands=3),
    )
