"""How many models a site evaluates for its coordinator, and a site that evaluates none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.heldout_replies import MOST_EVALUATIONS
from fedpax.sites.site_evaluation import SiteEvaluation
from fedpax.sites.site_worker import SiteWorker
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import small

SITES = {name: {"data_seed": seed} for seed, name in enumerate("ab")}


class Counting(Line):
    """A line that keeps the metrics of each evaluation."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.metrics: list[Any] = []

    def call(self, message: Message, timeout: float) -> Message:
        if "metrics" in (fields := message.header.get("fields", {})):
            self.metrics.append(fields["metrics"])
        return super().call(message, timeout)


def test_a_coordinator_that_asks_for_metrics_of_many_models(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, models = SiteEvaluation.evaluate, MOST_EVALUATIONS + 8

    def ask(evaluation: Any, number: int, params: Any, **how: Any) -> None:
        for _ in range(models):
            evaluate(evaluation, number, params, last=False)
        evaluate(evaluation, number, params, **how)

    def federate(rounds: int, done: int = 0) -> Any:
        made = {name: small(rounds=rounds, **own) for name, own in SITES.items()}
        lines = dict.fromkeys(SITES, Counting)
        return run(small(rounds=rounds), made, tmp_path, lines=lines, done=done)

    monkeypatch.setattr(SiteEvaluation, "evaluate", ask)
    outcome = federate(2)
    why = f"of more models: it answers {MOST_EVALUATIONS} evaluations, and one for each round"
    for name, line in outcome.lines.items():
        answered = [metrics for metrics in line.metrics if metrics]
        assert (len(line.metrics), len(answered)) == (models + 1, MOST_EVALUATIONS + 2)
        assert [f"site {name} sends no metrics {why}" in note for note in notes].count(True) == 1
        assert (tmp_path / name / "checkpoints").exists()  # the last model
    # A new process in the same folder: its third round allows one evaluation more.
    models = 1
    outcome = federate(3, done=2)
    for line in outcome.lines.values():
        assert [bool(metrics) for metrics in line.metrics] == [True, False]


def test_a_round_that_is_asked_again_allows_no_more_evaluations(tmp_path: Path) -> None:
    worker = SiteWorker(
        small(clients=2), tmp_path, seed=0, save=lambda *_: None, on_metrics=lambda *_: None
    )
    worker.set_inputs({})
    common = {"stage": 0, "last_stage": 0, "counted": None, "round": 1}
    clients = {"first_client": 0, "num_clients": 2, "clients": [0], "slots": [0]}
    answered = 0
    for number in range(MOST_EVALUATIONS + 5):
        arrays = {"shared 0": np.float32(number), "shared 1": np.zeros(3, np.float32)}
        asked = {"task": "round", "token": f"round {number}", "weights": "examples"}
        worker.work({**common, **clients, **asked}, arrays)
        asked = {"task": "evaluate", "token": f"model {number}", "save": False}
        answered += bool(
            worker.work({**common, **asked, "secure_sums": False}, arrays)[0]["metrics"]
        )
    assert answered == MOST_EVALUATIONS + 1


def test_all_evaluations_of_a_run_are_answered(tmp_path: Path) -> None:
    made = {name: small(rounds=2 + MOST_EVALUATIONS, **own) for name, own in SITES.items()}
    lines = dict.fromkeys(SITES, Counting)
    outcome = run(made["a"], made, tmp_path, lines=lines)
    for line in outcome.lines.values():
        assert len(line.metrics) == 1 + MOST_EVALUATIONS // 2 and all(line.metrics)


def test_a_site_without_metrics(tmp_path: Path, notes: list[str]) -> None:
    made = {name: small(rounds=2, **own) for name, own in SITES.items()}
    outcome = run(
        small(rounds=2), made, tmp_path, lines=dict.fromkeys(SITES, Counting), no_metrics="b"
    )
    assert [line.metrics[0].keys() for line in outcome.lines.values()] == [{"loss"}, set()]
    (line,) = select(read_metrics(tmp_path / "coordinator"), "evaluation")
    (own,) = select(read_metrics(tmp_path / "a"), "evaluation")
    assert line["loss"] == pytest.approx(own["loss"]) and "site/b/loss" not in line
    assert not select(read_metrics(tmp_path / "b"), "evaluation")
    assert (tmp_path / "b" / "checkpoints").exists()
    told = "sends no metrics of its held-out examples: it has --no_metrics"
    assert sorted((note for note in notes if told in note), key=len) == [told, f"site b {told}"]
