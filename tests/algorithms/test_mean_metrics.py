"""Metrics beside aggregators that leave out participants whose values are not finite."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_any_aggregator import METHODS, STEPS, N

from fedpax import Cohort
from fedpax.aggregators import Aggregator, chain, clip_by_norm, coordinate_median, krum, mean
from fedpax.algorithms import (
    async_diloco,
    decoupled_diloco,
    fedavg,
    fedbuff,
    halos,
    participant_weights,
)
from fedpax.data import FunctionRounds
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.experiment import Experiment, Run
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

CLIENTS, BAD = 5, 2
SGD = optax.sgd(0.1)
ASYNCHRONOUS = {
    "async_diloco": lambda loss_fn, **a: async_diloco(loss_fn, islands=N, inner_optimizer=SGD, **a),
    "decoupled_diloco": lambda loss_fn, **a: decoupled_diloco(
        loss_fn, islands=N, inner_optimizer=SGD, fragments=lambda path, leaf: 0, **a
    ),
    "fedbuff": lambda loss_fn, **a: fedbuff(
        loss_fn, buffer_size=N, max_staleness=1, client_optimizer=SGD, **a
    ),
    "halos": lambda loss_fn, **a: halos(loss_fn, regions=(0,) * N, inner_optimizer=SGD, **a),
}


def loss_fn(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict]:
    return jnp.mean((w - x) ** 2), {"distance": jnp.mean(jnp.abs(w - x))}


def cohort(value: float = np.nan, num_bad: int = 1, **fields: Any) -> Cohort:
    batches = np.random.default_rng(0).normal(size=(CLIENTS, 2, 3)).astype(np.float32)
    batches[BAD : BAD + num_bad, 1, 0] = value
    return Cohort(batches, **fields)


def one_round(aggregator: Aggregator | None, cohort: Cohort) -> tuple[Any, dict[str, jax.Array]]:
    method = fedavg(
        loss_fn, cohort_size=CLIENTS, client_optimizer=SGD, aggregator=aggregator, chunk_size=1
    )
    return jax.jit(method.round)(method.init(jnp.float32(0.0)), cohort)


def without(cohort: Cohort) -> Cohort:
    weights = np.float32([1, 1, 0, 1, 1])
    return cohort._replace(batches=np.nan_to_num(cohort.batches, posinf=0), num_examples=weights)


@pytest.mark.each_value
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "aggregator", [coordinate_median(), krum(1), chain(clip_by_norm(1.0), mean())]
)
def test_metrics_leave_out_a_participant_that_is_not_finite(aggregator, value):
    state, metrics = one_round(aggregator, cohort(value))
    _, expected = one_round(aggregator, without(cohort(value)))
    assert jnp.isfinite(state.params)
    assert metrics["non_finite_participants"] == 1
    assert expected["non_finite_participants"] == 0
    for name in ("loss", "distance"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6)
    if "participant_norm" in metrics:
        np.testing.assert_allclose(
            metrics["participant_norm"], expected["participant_norm"], rtol=1e-6
        )
        assert metrics["non_finite_updates"] == 1


def test_the_loss_is_nan_where_the_model_is_or_no_participant_is_finite():
    state, metrics = one_round(None, cohort())
    assert jnp.isnan(state.params)
    assert jnp.isnan(metrics["loss"])
    _, metrics = one_round(
        coordinate_median(),
        cohort(num_bad=CLIENTS)._replace(batches=np.full((CLIENTS, 2, 3), np.nan, np.float32)),
    )
    assert jnp.isnan(metrics["loss"])
    assert metrics["non_finite_participants"] == CLIENTS


def test_an_absent_participant_is_neither_averaged_nor_counted():
    absent = np.float32([2, 1, 0, 1, 3])
    _, metrics = one_round(coordinate_median(), cohort(num_examples=absent))
    assert metrics["non_finite_participants"] == 0
    _, metrics = one_round(coordinate_median(), cohort(num_examples=0 * absent))
    assert metrics["loss"] == 0
    assert metrics["non_finite_participants"] == 0


@pytest.mark.parametrize("name", [*METHODS, *ASYNCHRONOUS])
def test_every_method_counts_participants_that_are_not_finite(name):
    """Abstractly, with an aggregator that keeps the model finite."""
    aggregator = chain(clip_by_norm(1.0), mean())
    params = {"kernel": jnp.ones((5, 2)), "bias": jnp.zeros(2)}
    if name == "hypcluster":
        params = jax.tree.map(lambda p: jnp.stack([p, -p]), params)
    batches = {"x": jnp.ones((N, STEPS, 4, 5)), "y": jnp.ones((N, STEPS, 4, 2))}

    def regression(params: Any, batch: Any) -> tuple[jax.Array, None]:
        return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2), None

    if name in METHODS:
        method = METHODS[name](aggregator=aggregator)
    else:
        method = ASYNCHRONOUS[name](regression, aggregator=aggregator)
    state = jax.eval_shape(method.init, params)
    cohort = Cohort(batches, client_ids=np.arange(N))
    _, metrics = jax.eval_shape(method.round, state, cohort)
    assert {"loss", "non_finite_participants", "non_finite_updates"} <= metrics.keys()


def test_a_loss_may_not_have_a_metric_of_this_name():
    named = lambda w, x: (jnp.mean((w - x) ** 2), {"non_finite_participants": 1.0})
    method = fedavg(
        named, cohort_size=CLIENTS, client_optimizer=SGD, aggregator=coordinate_median()
    )
    with pytest.raises(ValueError, match="non_finite_participants"):
        method.round(method.init(jnp.float32(0.0)), cohort())


class Robust(Experiment):
    """Five clients, one of which sends NaN in every round."""

    def build(self) -> Run:
        return Run(
            algorithm=fedavg(
                loss_fn,
                cohort_size=CLIENTS,
                client_optimizer=SGD,
                aggregator=coordinate_median(),
            ),
            init=lambda key: jnp.float32(0.0),
            cohorts=FunctionRounds(lambda index: cohort()),
            evaluate=lambda params: {"loss": 0.0},
            mesh=self.mesh.make(jax.devices()[:1]),
            items_per_round=CLIENTS,
            placement="clients",
        )


def test_a_run_trains_on_and_tells_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = TrainingConfig(rounds=2, evaluate_every=0, checkpoint_every=2, on_spike="skip")
    assert train(Robust(training=training), tmp_path).finished
    for line in select(read_metrics(tmp_path), "training"):
        assert line["loss"] > 0
        assert (line["non_finite_participants"], line["spikes"]) == (1, 0)
    assert capsys.readouterr().err.count("of 1 of 5 participants are not finite") == 1


def test_participant_weights_outside_a_program_names_itself():
    with pytest.raises(RuntimeError, match=r"^participant_weights\(\) was called outside a fedpax"):
        participant_weights(Cohort(np.ones((2, 1, 3)), np.array([1, 2])))
