"""A small experiment for syncers and islands in processes: a random regression that starts fast."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fedpax import Cohort
from fedpax.algorithms import decoupled_diloco, decoupled_diloco_parts
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.experiment import Experiment, Run, Shardings
from fedpax.training.training_config import TrainingConfig

FEATURES, BATCH, STEPS = 16, 8, 4


class RandomRounds:
    """An endless stream of regression batches, a function of the round alone."""

    def __init__(self, islands: int, pause: float) -> None:
        self.islands, self.pause, self.round = islands, pause, 0
        self.truth = np.random.default_rng(0).normal(size=FEATURES).astype(np.float32)

    def __next__(self) -> Cohort:
        time.sleep(self.pause)
        random = np.random.default_rng((1, self.round))
        self.round += 1
        x = random.normal(size=(self.islands, STEPS, BATCH, FEATURES)).astype(np.float32)
        return Cohort({"x": x, "y": np.tanh(x @ self.truth)})

    def get_state(self) -> dict[str, Any]:
        return {"round": self.round}

    def set_state(self, state: dict[str, Any]) -> None:
        self.round = state["round"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SitesRegression(Experiment):
    """Decoupled DiLoCo on a random regression, in two fragments.

    Attributes:
        islands: number of islands.
        quorum: islands that have to send a fragment before it is merged.
        max_steps_ahead: inner steps that an island takes at most beyond its last merge.
        max_staleness: merges of a fragment after which an update is dropped.
        learning_rate: inner learning rate.
        width: number of hidden units.
        pause: seconds before each cohort is drawn, so that signals arrive during the training.
    """

    islands: int = 2
    quorum: int = 1
    max_steps_ahead: int | None = None
    max_staleness: int = 4
    learning_rate: float = 0.01
    width: int = 32
    pause: float = 0.1

    def build(self) -> Run:
        mesh = self.mesh.make()

        def sharding(*axes: str | None) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*axes))

        def init(key: jax.Array) -> Any:
            first, second = jax.random.split(key)
            return {
                "hidden": jax.random.normal(first, (FEATURES, self.width)) / FEATURES**0.5,
                "out": jax.random.normal(second, (self.width,)) / self.width**0.5,
            }

        def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, None]:
            predicted = jax.nn.gelu(batch["x"] @ params["hidden"]) @ params["out"]
            return jnp.mean((predicted - batch["y"]) ** 2), None

        settings: dict[str, Any] = {
            "islands": self.islands,
            "inner_optimizer": optax.adam(self.learning_rate),
            # With the default momentum of 0.9, late updates make the loss noisy.
            "outer_optimizer": optax.sgd(0.7, momentum=0.6, nesterov=True),
            "fragments": lambda path, leaf: int(path == "out"),
        }
        parts = decoupled_diloco_parts(
            loss_fn,
            steps_per_sync=STEPS // 2,
            quorum=self.quorum,
            grace_seconds=0.2,
            max_steps_ahead=self.max_steps_ahead,
            max_staleness=self.max_staleness,
            **settings,
        )
        return Run(
            algorithm=decoupled_diloco(loss_fn, **settings)._replace(parts=parts),
            init=init,
            cohorts=RandomRounds(self.islands, self.pause),
            evaluate=lambda params: {"loss": 0.0},
            mesh=mesh,
            shardings=Shardings(
                params={"hidden": sharding(None, "fsdp"), "out": sharding("fsdp")},
                cohort=sharding("islands", None, "fsdp"),
            ),
            items_per_round=self.islands * STEPS * BATCH,
            placement="islands",
        )


def sites_regression() -> SitesRegression:
    """Two islands; a round is drawn every tenth of a second."""
    return SitesRegression(
        training=TrainingConfig(rounds=60, evaluate_every=0, checkpoint_every=5),
        mesh=MeshConfig(islands=2),
    )
