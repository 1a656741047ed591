"""The metrics of all held-out examples together: as if they were in one place."""

import csv
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.experiments.fedavg_table import FedAvgTable
from fedpax.experiments.fedavg_words import fedadam_stackoverflow
from fedpax.experiments.parts.client_evaluation import finish_perplexity, finish_regression
from fedpax.run_files.metrics import read_metrics, select
from fedpax.settings.client_aggregators import aggregator
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.table_data import TableConfig
from fedpax.sites.heldout_replies import LEAST_LABELS, Heldout, measure
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_evaluation import _weighted_mean
from fedpax.sites.site_experiment import ClientRange
from fedpax.sites.site_worker import SiteWorker
from fedpax.sites.tasks import EVALUATION, SHARED, numbered
from fedpax.training.training_config import TrainingConfig
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import small

SITES = {"a": (60, 45), "c": (25, 50, 30)}
MORE = {"a": (60, 45), "b": (90,), "c": (25, 50, 30)}  # no client of b is new


def write_meters(folder: Path, sizes: Mapping[str, Sequence[int]] = SITES, times: int = 1) -> None:
    """Write consumptions, whose level and spread differ between sites."""
    random, number = np.random.default_rng(0), 0
    for place, (site, counts) in enumerate(sizes.items()):
        (folder / site).mkdir(parents=True)
        for count in counts:
            number += 1
            with (folder / site / f"{site}_{number}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["temperature", "consumption"])
                for _ in range(count * times):
                    temperature = random.normal(10 + place, 5)
                    noise = random.normal(0, 1 + 3 * place)
                    used = 40 + 25 * place - 0.7 * temperature + noise
                    table.writerow([f"{temperature:.2f}", f"{used:.3f}"])


def experiment(*files: str, heldout_clients: float = 0.0) -> FedAvgTable:
    return FedAvgTable(
        data=TableConfig(files=files, label="consumption", heldout_clients=heldout_clients),
        cohort=CohortConfig(size=10, batch_size=16),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=2, evaluate_every=2, checkpoint_every=0),
    )


@pytest.mark.parametrize("heldout_clients", [0.0, 0.6])
def test_rmse_and_r2_equal_those_of_all_files(tmp_path: Path, heldout_clients: float) -> None:
    # Each part of a site has enough held-out examples that its labels' means are sent.
    sizes, times = (MORE, 3) if heldout_clients else (SITES, 1)
    write_meters(tmp_path / "data", sizes, times)

    def make(*files: str) -> FedAvgTable:
        return experiment(*files, heldout_clients=heldout_clients)

    sites = {s: make(f"{tmp_path}/data/{s}/*.csv") for s in sizes}
    outcome = run(make(), sites, tmp_path / "runs", personal=True)
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "evaluation")
    whole = make(f"{tmp_path}/data/*/*.csv").build()
    tree = jax.tree.structure(jax.eval_shape(whole.init, jax.random.key(0)))
    with jax.set_mesh(whole.mesh):
        wanted = whole.evaluate(jax.tree.unflatten(tree, outcome.params))
    assert ("new_clients/r2" in wanted) == (heldout_clients > 0)
    assert {"loss", "rmse", "r2"} <= wanted.keys() <= line.keys()
    for name, value in wanted.items():
        assert line[name] == pytest.approx(value, rel=1e-5), name
    # A site's own metrics are those that it prints, and no moment of its labels is shown.
    for site in sizes:
        (own,) = select(read_metrics(tmp_path / "runs" / site), "evaluation")
        assert {"r2", "fine_tuned_rmse", "fine_tuned_r2", "personal_loss"} <= own.keys()
        for name in own.keys() - {"kind", "round"}:
            assert line[f"site/{site}/{name}"] == pytest.approx(own[name]), name
    assert not [name for name in line if "label" in name]
    mean = np.mean([line[f"site/{site}/r2"] for site in sizes])
    assert abs(line["r2"] - mean) > 0.05


def no_effect(*_: Any) -> None:
    """Take a value."""


class Listening(Line):
    """A line that keeps the means that a site sends."""

    means: dict[str, float]

    def call(self, message: Message, timeout: float) -> Message:
        if "metrics" in message.header.get("fields", {}):
            self.means = message.header["fields"]["metrics"]
        return super().call(message, timeout)


def test_few_labels_stay_at_the_site(tmp_path: Path) -> None:
    write_meters(tmp_path / "data")
    (few := tmp_path / "data" / "few").mkdir()
    lines = (tmp_path / "data" / "a" / "a_1.csv").read_text().splitlines()
    (few / "few_1.csv").write_text("\n".join(lines[:15]) + "\n")
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv") for s in (*SITES, "few")}
    outcome = run(experiment(), sites, tmp_path / "runs", lines=dict.fromkeys(sites, Listening))
    counts = {s: int(sites[s].opened.heldout.sum()) for s in sites}
    assert 0 < counts["few"] < LEAST_LABELS
    for site, line in outcome.lines.items():
        labels = {"label", "label_squared", "label_error"}
        assert labels & line.means.keys() == (set() if site == "few" else labels), site
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "evaluation")
    (own,) = select(read_metrics(tmp_path / "runs" / "few"), "evaluation")
    assert "r2" in own and "site/few/r2" not in line
    assert line["site/few/rmse"] == pytest.approx(own["rmse"])
    # The loss is of all sites, and r2 of those that send means of labels.
    means = {s: x.means for s, x in outcome.lines.items()}
    assert line["loss"] == pytest.approx(
        sum(counts[s] * means[s]["loss"] for s in sites) / sum(counts.values())
    )
    total = sum(counts[s] for s in SITES)
    label, squared, loss = (
        sum(counts[s] * means[s][name] for s in SITES) / total
        for name in ("label", "label_squared", "loss")
    )
    assert line["r2"] == pytest.approx(1 - loss / (squared - label**2))


def test_metrics_of_few_rows_stay_at_a_site_whose_values_are_hidden(
    tmp_path: Path, notes: list[str]
) -> None:
    write_meters(tmp_path / "data", {**MORE, "few": (15,)})
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv") for s in (*MORE, "few")}
    rules = RoundRules(4, 60.0, secure_sums=True)
    lines = dict.fromkeys(sites, Listening)
    outcome = run(experiment(), sites, tmp_path / "runs", rules=rules, lines=lines)
    counts = {s: int(sites[s].opened.heldout.sum()) for s in sites}
    assert 0 < counts["few"] < LEAST_LABELS <= min(counts[s] for s in MORE)
    assert outcome.lines["few"].means == {}
    # The site measures the model for itself, and the coordinator goes on with the other sites.
    own = {s: select(read_metrics(tmp_path / "runs" / s), "evaluation")[0]["loss"] for s in sites}
    (line,) = select(read_metrics(tmp_path / "runs" / "coordinator"), "evaluation")
    loss = sum(counts[s] * own[s] for s in MORE) / sum(counts[s] for s in MORE)
    assert line["loss"] == pytest.approx(loss) and not any("few" in name for name in line)
    why = f"of {counts['few']} held-out examples, expected at least 10: fewer tell single rows"
    told = [note for note in notes if "held-out" in note]
    assert sorted(told) == [f"sends no metrics {why}", f"site few sends no metrics {why}"]


@pytest.mark.parametrize("hidden_by", ["nothing", "only_sums_of", "secure_sums", "private_mean"])
def test_labels_stay_at_a_site_whose_values_are_hidden(tmp_path: Path, hidden_by: str) -> None:
    write_meters(tmp_path / "data")
    made = experiment(f"{tmp_path}/data/a/*.csv")
    if hidden_by == "private_mean":
        private = aggregator("private_mean", max_norm=1.0, noise_multiplier=1.0)
        data = dataclasses.replace(
            made.data, columns=("temperature=number(-50..50)", "consumption=number(0..150)")
        )
        made = dataclasses.replace(made, aggregator=private, data=data)
    sums = SecretTerms("a", 3 if hidden_by == "only_sums_of" else 0)
    worker = SiteWorker(made, tmp_path, seed=0, save=no_effect, on_metrics=no_effect, sums=sums)
    worker.set_inputs(made.inputs)
    run_of_site = worker._whole_run
    assert run_of_site is not None
    leaves = jax.tree.leaves(run_of_site.init(jax.random.key(0)))
    header = {"task": EVALUATION, "counted": None, "token": "t", "round": 1, "save": False}
    header |= {"secure_sums": hidden_by == "secure_sums"}
    fields, _ = worker.work(header, numbered(SHARED, [np.asarray(x) for x in leaves]))
    sent = {name for name, mean in fields["metrics"].items() if mean is not None}
    assert ("loss" in sent) == (hidden_by in ("nothing", "private_mean"))
    assert ("label" in sent) == (hidden_by == "nothing")
    assert ("label" in fields["metrics"]) == (hidden_by != "private_mean")  # in a sum


@pytest.mark.parametrize(("per_example", "is_sent"), [(1, True), (2, False)])
def test_a_document_counts_by_whole_rows_of_tokens(per_example: int, is_sent: bool) -> None:
    run_of_site = small(clients=2).at_site(ClientRange(0, 2, 2))
    assert run_of_site.num_heldout == 16
    measured = measure(run_of_site, "", {"loss": 2.0}, is_summed=True, per_example=per_example)
    assert measured.reply(is_summed=True)["metrics"] == ({"loss": None} if is_sent else {})


def together(finish: Any, *sites: tuple[int, dict[str, float]]) -> dict[str, float]:
    return finish(_weighted_mean([Heldout(n, {}, means) for n, means in sites]))


def test_perplexity_and_accuracy_are_of_all_tokens_together() -> None:
    metrics = together(
        finish_perplexity,
        (3, {"loss": 1.0, "perplexity": math.e, "fine_tuned_loss": 0.5}),
        (1, {"loss": 3.0, "perplexity": math.e**3, "fine_tuned_loss": 0.5}),
    )
    assert metrics == {"loss": 1.5, "perplexity": math.exp(1.5), "fine_tuned_loss": 0.5}
    words = fedadam_stackoverflow().finish_metrics
    counts: Any = [
        (10, {"loss": 1.0, "known": 0.5, "known_correct": 0.5}),
        (10, {"loss": 1.0, "known": 1.0, "known_correct": 0.1}),
    ]
    assert together(words, *counts)["accuracy"] == pytest.approx(6 / 15)


def test_parts_count_by_their_own_examples() -> None:
    sites = [
        Heldout(9, {"new_clients/": 1}, {"loss": 0.0, "new_clients/loss": 0.0}),
        Heldout(1, {"new_clients/": 3}, {"loss": 1.0, "new_clients/loss": 1.0}),
    ]
    assert _weighted_mean(sites) == {"loss": 0.1, "new_clients/loss": 0.75}


def test_labels_that_are_equal_have_no_r2() -> None:
    means = {"loss": 4.0, "label": 0.1, "label_squared": 0.1**2}
    metrics = finish_regression(3.0, means)
    assert metrics["rmse"] == 6.0 and math.isnan(metrics["r2"])
    assert finish_regression(3.0, {"loss": 4.0}) == {"loss": 4.0, "rmse": 6.0}
