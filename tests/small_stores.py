"""A small experiment whose clients keep states, of which every checkpoint writes a part."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_regression import RandomRounds

from fedpax.algorithms import scaffold
from fedpax.checkpoints import saved_stores
from fedpax.clients.cohort import Cohort
from fedpax.parallel.mesh import MeshConfig, available_devices
from fedpax.training.experiment import Experiment, Run
from fedpax.training.training_config import TrainingConfig

COHORT, POPULATION, FEATURES = 4, 509, 24


class Cohorts:
    """Random batches of random clients, a function of the round alone."""

    num_clients = POPULATION

    def __init__(self, cohort: int, pause: float) -> None:
        self._cohort = cohort
        self._batches = RandomRounds((cohort, 2, 8), FEATURES, seed=0)
        self._pause = pause

    def __next__(self) -> Cohort:
        time.sleep(self._pause)
        rng = np.random.default_rng(self._batches.round)
        ids = rng.permutation(POPULATION)[: self._cohort].astype(np.int32)
        return Cohort(next(self._batches), client_ids=ids)

    def get_state(self) -> dict[str, Any]:
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state)


@dataclasses.dataclass(frozen=True)
class Scaffold(Experiment):
    """SCAFFOLD on a random regression.

    Attributes:
        cohort: clients of a round.
        pause: seconds before each cohort is drawn, so that signals arrive during the training.
    """

    cohort: int = COHORT
    pause: float = 0.0

    def build(self) -> Run:
        saved_stores.SMALL_STORES = 0  # this store too

        def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            predicted = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
            return jnp.mean((predicted - batch["y"]) ** 2), {}

        def init(key: jax.Array) -> Any:
            hidden = jax.random.normal(key, (FEATURES, 8)) / FEATURES**0.5
            return {"hidden": hidden, "out": jnp.ones(8) / 8}

        return Run(
            algorithm=scaffold(
                loss_fn,
                cohort_size=self.cohort,
                num_clients=POPULATION,
                client_optimizer=optax.sgd(0.05),
            ),
            init=init,
            cohorts=Cohorts(self.cohort, self.pause),
            evaluate=lambda params: {"loss": float(params["out"].sum())},
            items_per_round=self.cohort * 2 * 8,
            mesh=self.mesh.make(available_devices()[: self.mesh.size]),
            placement="clients",
        )


def stores() -> Scaffold:
    """SCAFFOLD with 4 of 509 clients a round, over 4 devices."""
    training = TrainingConfig(rounds=16, evaluate_every=16, checkpoint_every=2, keep_checkpoints=2)
    return Scaffold(training=training, mesh=MeshConfig(clients=4))
