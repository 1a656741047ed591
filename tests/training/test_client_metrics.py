"""Metrics with a value for each participant: quantiles, histograms, evaluation by client."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import fedpax
from fedpax.algorithm import FederatedAlgorithm
from fedpax.data import FunctionRounds
from fedpax.run_files.metrics import read_metrics, select
from fedpax.training.evaluation import evaluate_by_client
from fedpax.training.experiment import Experiment, Run
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

CLIENTS = 5


class State(NamedTuple):
    params: jax.Array


def loss_fn(w: jax.Array, batch: Any) -> tuple[jax.Array, dict]:
    error = w - batch["x"]
    return jnp.mean(error**2), {"positive": jnp.mean(error > 0)}


def clients(sizes: list[int]) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"x": random.normal(size=n).astype(np.float32)} for n in sizes]


def round(state: State, cohort: fedpax.Cohort) -> tuple[State, dict[str, jax.Array]]:
    losses = jnp.mean((state.params - cohort.batches) ** 2, axis=(1, 2))
    return State(state.params + 1), {"loss": losses.mean(), "client_loss": losses}


class ByClient(Experiment):
    def build(self) -> Run:
        by_client = evaluate_by_client(loss_fn, clients([3, 1, 4]))

        def evaluate(params: jax.Array) -> dict[str, Any]:
            metrics = by_client(params)
            return {"loss": metrics["loss"].mean(keepdims=True), "client": metrics["loss"]}

        def cohort(index: int) -> fedpax.Cohort:
            batches = np.arange(CLIENTS, dtype=np.float32).reshape(CLIENTS, 1, 1)
            batches[-1] = np.nan if index else 4
            return fedpax.Cohort(batches)

        return Run(
            algorithm=FederatedAlgorithm(State, round),
            init=lambda key: jnp.float32(0.0),
            cohorts=FunctionRounds(cohort),
            evaluate=evaluate,
            mesh=self.mesh.make(jax.devices()[:1]),
            items_per_round=CLIENTS,
            placement="clients",
        )


def test_a_vector_is_logged_as_quantiles_and_a_histogram(tmp_path: Path) -> None:
    training = TrainingConfig(
        rounds=2, evaluate_every=2, checkpoint_every=2, stop_on_non_finite=False
    )
    result = train(ByClient(training=training), tmp_path)
    first, second = select(read_metrics(tmp_path), "training")
    squares = np.arange(CLIENTS) ** 2
    for line, values in ((first, squares), (second, (1 - np.arange(CLIENTS - 1)) ** 2)):
        for end, quantile in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
            assert line[f"client_loss/{end}"] == pytest.approx(np.quantile(values, quantile))
        assert "client_loss" not in line
    (line,) = select(read_metrics(tmp_path), "evaluation")
    expected = [np.mean((2 - c["x"]) ** 2) for c in clients([3, 1, 4])]
    assert line["client/p50"] == pytest.approx(np.median(expected), rel=1e-5)
    assert result.evaluation == {name: line[name] for name in result.evaluation}

    (file,) = (tmp_path / "tensorboard").iterdir()
    histograms = {
        (event.step, value.tag): value.histo
        for event in read_events(file)
        for value in event.summary.value
        if value.HasField("histo")
    }
    histogram = histograms[1, "training/client_loss"]
    assert (histogram.min, histogram.max, histogram.num) == (0, 16, CLIENTS)
    assert sum(histogram.bucket) == CLIENTS
    assert histograms[2, "training/client_loss"].num == CLIENTS - 1
    assert (2, "evaluation/client") in histograms


def read_events(path: Path) -> list[Event]:
    data, result = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        result.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return result


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_clients_of_all_sizes_share_one_compilation(
    batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    traces = []

    def counted(w: jax.Array, batch: Any) -> tuple[jax.Array, dict]:
        traces.append(batch["x"].shape)
        return loss_fn(w, batch)

    held_out = clients([3, 0, 1, 7, 12])
    evaluate = evaluate_by_client(counted, held_out, batch_size=batch_size)
    for w in map(jnp.float32, (0.0, 0.5)):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
            metrics = evaluate(w)
        compiled = [text for text in caplog.messages if text.startswith("Finished XLA compilation")]
        assert len(compiled) == (w == 0), compiled
        for i, client in enumerate(held_out):
            if not len(client["x"]):
                assert np.isnan(metrics["loss"][i])
                continue
            loss, aux = loss_fn(w, client)
            np.testing.assert_allclose(metrics["loss"][i], loss, rtol=1e-5)
            np.testing.assert_allclose(metrics["positive"][i], aux["positive"], rtol=1e-6)
    assert traces == [(1,)]


def test_a_mask_weighs_examples() -> None:
    masked = [{"x": np.float32([1, 5, np.nan]), "mask": np.float32([1, 3, 0])}]
    metrics = evaluate_by_client(loss_fn, masked)(jnp.float32(1.0))
    assert metrics["loss"].tolist() == [12.0]


def test_no_example_raises() -> None:
    with pytest.raises(ValueError, match="got 0 examples of 1 clients"):
        evaluate_by_client(loss_fn, clients([0]))
