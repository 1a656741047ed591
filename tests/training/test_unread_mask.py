"""A run tells that its loss ignores the mask of its batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax import Cohort
from fedpax.algorithms import fedavg, mime, per_fedavg, scaffold
from fedpax.data import FunctionRounds
from fedpax.training.experiment import Experiment, Run
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

CLIENTS = 2


def plain(w: jax.Array, batch: Any) -> tuple[jax.Array, dict]:
    return jnp.mean((w - batch["x"]) ** 2), {}


def masked(w: jax.Array, batch: Any) -> tuple[jax.Array, dict]:
    return jnp.sum((w - batch["x"]) ** 2 * batch["mask"]) / jnp.sum(batch["mask"]), {}


BUILD = {
    "fedavg": lambda loss, **a: fedavg(loss, **a),
    "chunks": lambda loss, **a: fedavg(loss, chunk_size=1, **a),
    "mime": lambda loss, **a: mime(loss, **a),
    "scaffold": lambda loss, **a: scaffold(loss, num_clients=2, **a),
    "per_fedavg": lambda loss, **a: per_fedavg(loss, adaptation_learning_rate=0.1, **a),
}


@pytest.mark.parametrize(
    ("name", "loss", "has_mask", "told"),
    [
        *((name, plain, True, True) for name in BUILD),
        *((name, masked, True, False) for name in BUILD),
        ("fedavg", plain, False, False),
        ("fedavg", jax.jit(plain), True, True),
        ("fedavg", jax.jit(masked), True, False),
    ],
)
def test_a_loss_that_does_not_read_the_mask_is_told(name, loss, has_mask, told, tmp_path, capsys):
    batches = {"x": np.ones((CLIENTS, 2, 4), np.float32)}
    if has_mask:
        batches["mask"] = np.ones((CLIENTS, 2, 4), bool)
    cohort = Cohort(batches, np.ones(CLIENTS, np.int32), client_ids=np.arange(CLIENTS))

    class Mine(Experiment):
        def build(self) -> Run:
            return Run(
                algorithm=BUILD[name](loss, cohort_size=CLIENTS, client_optimizer=optax.sgd(0.1)),
                init=lambda key: jnp.zeros(()),
                cohorts=FunctionRounds(lambda number: cohort),
                mesh=self.mesh.make(jax.devices()[:1]),
                evaluate=lambda params: {"loss": params},
                items_per_round=8,
                placement="clients",
            )

    train(
        Mine(training=TrainingConfig(rounds=1, evaluate_every=1, checkpoint_every=1)),
        tmp_path / "run",
    )
    output = capsys.readouterr()
    assert ("does not read the mask" in output.out + output.err) == told
