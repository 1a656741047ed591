"""Evaluation by client: metrics of the clients, weighted, give the metrics of the held-out data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.commands.parts.options import configure
from fedpax.data import Source, load
from fedpax.experiments import client_experiment, language_model_experiment
from fedpax.experiments.catalog import find_experiment
from fedpax.experiments.fedavg_characters import FedAvgCharacters
from fedpax.experiments.fedavg_images import FedAvgImages
from fedpax.experiments.parts.client_evaluation import client_name
from fedpax.main import main
from fedpax.models.classifiers import MLPConfig
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.training.experiment import Experiment, Run
from fedpax.training.training_config import TrainingConfig

RNG = np.random.default_rng(0)
TRAINING = TrainingConfig(rounds=1, evaluate_every=0, checkpoint_every=0)


def random_params(run: Run, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype),
        jax.eval_shape(run.init, jax.random.key(0)),
    )


def check_totals(experiment: Experiment, names: list[str], metrics: set[str]) -> None:
    """Clients' metrics, averaged by number of examples, are the mean of all held-out examples."""
    run = experiment.build()
    params = random_params(run)
    with jax.set_mesh(run.mesh):
        together = run.evaluate(params)
        result = run.evaluate_clients(params)
    assert list(result.names) == names and set(result.metrics) >= metrics
    weights = result.num_examples
    for name in metrics & together.keys() - {"perplexity"}:
        mean = np.average(result.metrics[name], weights=weights)
        assert mean == pytest.approx(together[name], rel=1e-4), name
    if "perplexity" in metrics:
        np.testing.assert_allclose(result.metrics["perplexity"], np.exp(result.metrics["loss"]))


def test_synthetic_clients() -> None:
    names = [f"client {k}" for k in range(30)]
    experiment = find_experiment("fedavg_synthetic")()
    check_totals(experiment, names, {"loss", "accuracy", "calibration_error"})


class Listed(Source):
    """Examples in memory."""

    def column(self, field: str) -> Iterator[Any]:
        yield from (example[field] for example in self._records)


def source(examples: list[dict[str, Any]]) -> Any:
    return lambda name, split, data_dir=None: Listed(name, Path(), examples)


def test_images_by_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [
        {
            "image": RNG.integers(0, 256, (4, 4, 1), np.uint8),
            "label": int(RNG.integers(0, 3)),
            "client": client.encode(),
        }
        for client, count in {"Zoë": 5, "Ana": 9, "Bo": 1}.items()
        for _ in range(count)
    ]
    monkeypatch.setattr(client_experiment, "load", source(examples))
    experiment = FedAvgImages(
        dataset="x",
        population=find_experiment("fedadam_emnist")().population,
        model=MLPConfig(layer_sizes=(16, 3)),
        cohort=CohortConfig(size=2, batch_size=4),
        client_learning_rate=0.1,
        heldout_batch_size=4,
        training=TRAINING,
    )
    check_totals(experiment, ["Ana", "Bo", "Zoë"], {"loss", "accuracy", "calibration_error"})


def test_characters_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"Romeo": ["love is a smoke", "but soft"], "Nurse": ["i am the drudge"]}
    examples = [
        {"text": text.encode(), "client": client.encode()}
        for client, own in texts.items()
        for text in own
    ]
    monkeypatch.setattr(client_experiment, "load", source(examples))
    base = find_experiment("fedyogi_shakespeare")()
    fields = {name: getattr(base, name) for name in ("dataset", "population", "cohort")}
    experiment = FedAvgCharacters(
        **{**fields, "cohort": CohortConfig(size=1, batch_size=2)},
        seq_len=6,
        heldout_batch_size=2,
        client_learning_rate=0.1,
        training=TRAINING,
    )
    check_totals(experiment, ["Nurse", "Romeo"], {"loss", "accuracy"})


def test_text_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "model.num_layers": 1, "model.embed_dim": 16, "model.mlp_dim": 32, "model.num_heads": 2,
        "model.num_kv_heads": 1, "data.seq_len": 32, "data.heldout_tokens": None, "lora.rank": 0,
        "cohort.size": 4,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    experiment = configure("fedavg_lora_text", arguments)
    whole = load("stdlib_text", "heldout")
    few = [whole[k] for k in range(0, len(whole), 20)]
    alone = {"client": b"no held-out text", "text": b"a"}
    splits = {"train": source([*few, alone]), "heldout": source(few)}
    monkeypatch.setattr(
        language_model_experiment, "load", lambda name, split, **kw: splits[split](name, split)
    )
    names = sorted({client_name(value["client"]) for value in [*few, alone]})
    run = experiment.build()
    params = random_params(run)
    with jax.set_mesh(run.mesh):
        result, together = run.evaluate_clients(params), run.evaluate(params)
    assert list(result.names) == names and result.unit == "tokens"
    has = np.array(names) != "no held-out text"
    np.testing.assert_array_equal(result.num_examples > 0, has)
    np.testing.assert_array_equal(np.isfinite(result.metrics["loss"]), has)
    np.testing.assert_allclose(result.metrics["perplexity"], np.exp(result.metrics["loss"]))
    # The rows of all documents begin elsewhere than the rows of each client.
    mean = np.average(result.metrics["loss"][has], weights=result.num_examples[has])
    assert mean == pytest.approx(together["loss"], rel=0.05)


def test_shared_images_are_weighted_by_label(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "--exp=methods_digits:fedavg", "--training.rounds=1", "--job_log_dir=run"]
    assert main([*train, "--mesh.clients=1"]) == 0
    evaluate = ["evaluate", "--job_log_dir=run", "--by_client"]
    assert main([*evaluate, "--picture=clients.png", "--json=metrics.json"]) == 0
    out = capsys.readouterr().out
    assert "| accuracy          | " in out and "80 more clients" in out
    assert (tmp_path / "clients.png").stat().st_size > 10_000
    assert main(["evaluate", "--job_log_dir=run", "--picture=clients.png"]) == 2
    assert "--picture without --by_client" in capsys.readouterr().err
