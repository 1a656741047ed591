"""A file of a user: an experiment that trains one number, and groups of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax.algorithms import fedavg
from fedpax.data import FunctionRounds
from fedpax.experiments.catalog import ExperimentGroup
from fedpax.training.experiment import Experiment, Run
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Data:
    seed: int = 5
    shuffle_seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Experiment):
    rate: float
    data: Data = Data()

    def build(self):
        def loss_fn(w, x):
            return jnp.mean((w - x) ** 2), {"width": jnp.max(x) - jnp.min(x)}

        random = np.random.default_rng(self.data.seed)
        x = random.normal(size=(2, 1, 4)).astype(np.float32)
        return Run(
            algorithm=fedavg(loss_fn, cohort_size=2, client_optimizer=optax.sgd(self.rate)),
            init=lambda key: jnp.float32(self.training.seed),
            cohorts=FunctionRounds(lambda number: fedpax.Cohort(x)),
            evaluate=lambda w: {"loss": loss_fn(w, x)[0], "accuracy": 1 / (1 + abs(w))},
            mesh=self.mesh.make(jax.devices()[:1]),
            items_per_round=8,
            placement="clients",
        )


def line(rate=0.1):
    return Line(rate=rate, training=TrainingConfig(rounds=2, evaluate_every=1, checkpoint_every=2))


def three():
    """Three rates."""
    return ExperimentGroup({f"rate_{rate}": line(rate) for rate in (0.1, 0.2, 0.3)}, "accuracy=0.1")


def two():
    return ExperimentGroup({"slow": line(0.1), "fast": line(0.3)})


def wrong():
    return ExperimentGroup({"a/b": line()})


def functions():
    return ExperimentGroup({"a": line})


def numbers():
    return ExperimentGroup({1: line()})


def listed():
    return ExperimentGroup([line()])
