"""Gradients that are not finite where the loss is: islands' own models, saved by no checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_regression import shared_compilation

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import eager_diloco, streaming_diloco
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.data import FunctionRounds
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import complete_rounds
from fedpax.training.experiment import Experiment, Run
from fedpax.training.round_logger import NonFiniteError
from fedpax.training.spikes import skip_spikes
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

BAD = 3
"""The round, from 1, whose last step on island 0 has a gradient of NaN and a finite loss."""


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict]:
    mean = jnp.mean(batch)
    root = jnp.sqrt(mean**2 * jnp.sum(params["layers"] ** 2))  # at 0 its derivative is NaN
    return root + jnp.mean((params["layers"] - mean) ** 2) + (params["bias"] - mean) ** 2, {}


def init(key: jax.Array) -> Any:
    return {"layers": jnp.ones((2, 2)), "bias": jax.random.normal(key)}


def cohort(index: int) -> Cohort:
    batches = 2 + np.random.default_rng(index).normal(size=(2, 4, 2)).astype(np.float32)
    if index == BAD - 1:
        batches[0, -1] = 0
    return Cohort(batches)


def make_streaming() -> FederatedAlgorithm:
    inner = optax.sgd(0.01)
    return streaming_diloco(loss_fn, islands=2, inner_optimizer=inner, fragments=2, mixing=0.5)


METHODS = {
    "streaming_diloco": make_streaming,
    "eager_diloco": lambda: eager_diloco(loss_fn, islands=2, inner_optimizer=optax.sgd(0.01)),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_skipped_if_any_part_of_its_state_turns_non_finite(method: str) -> None:
    algorithm = METHODS[method]()
    step = jax.jit(skip_spikes(algorithm.round))
    state, infinity = algorithm.init(init(jax.random.key(0))), jnp.float32(jnp.inf)
    for number in range(1, BAD + 2):
        before = state
        state, metrics = step(before, infinity, cohort(number - 1))
        assert jnp.isfinite(metrics["loss"])
        assert metrics["spikes"] == (number == BAD)
        same = jax.tree.map(np.array_equal, before, state)
        assert all(jax.tree.leaves(same)) == (number == BAD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Experiment):
    """Streaming DiLoCo on two islands, with one round of bad data."""

    def build(self) -> Run:
        return Run(
            algorithm=make_streaming(),
            init=init,
            cohorts=FunctionRounds(cohort),
            evaluate=lambda params: {"loss": float(params["bias"])},
            mesh=self.mesh.make(),
            items_per_round=8,
            placement="islands",
        )


def test_a_state_that_turned_non_finite_is_never_saved_without_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def experiment(**training: Any) -> Streaming:
        every = TrainingConfig(rounds=5, evaluate_every=0, checkpoint_every=1, keep_checkpoints=9)
        return Streaming(training=dataclasses.replace(every, **training))

    with shared_compilation():
        assert train(experiment(on_spike="roll_back"), tmp_path / "back").finished
        with pytest.raises(NonFiniteError, match=r"state\.local_params\['layers'\] is not finite"):
            train(experiment(), tmp_path / "stopped")
        capsys.readouterr()
        assert train(experiment(stop_on_non_finite=False), tmp_path / "ignored").finished
    (spike,) = select(read_metrics(tmp_path / "back"), "spike")
    assert (spike["round"], spike["spike_round"], spike["cohorts_left_out"]) == (BAD - 1, BAD, 1)
    like = jax.eval_shape(lambda: make_streaming().init(init(jax.random.key(0))))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: x.update(sharding=sharding), like)
    with Checkpoints(tmp_path / "back", keep=9) as checkpoints:
        restored = checkpoints.restore_state(like)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(restored))
    assert complete_rounds(tmp_path / "stopped" / "checkpoints") == [1, BAD - 1]
    messages = (
        "state.local_params['layers'] is not finite after round 3; checkpoints from this round"
    )
    assert capsys.readouterr().err.count(messages) == 1
