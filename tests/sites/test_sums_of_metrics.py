"""Metrics in secure sums: of all sites together, and of no site alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites import site_evaluation
from fedpax.sites.heldout_replies import Measured
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_evaluation import SiteEvaluation
from fedpax.sites.tasks import EVALUATION
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import SmallExperiment, small
from sites.test_heldout_metrics import MORE, Listening, experiment, write_meters

SITES = {name: {"data_seed": seed, "clients": 2} for seed, name in enumerate("abcd")}
RULES = RoundRules(3, 60.0, secure_sums=True)


def federate(folder: Path, **how: Any) -> tuple[Any, list[Any]]:
    """Run two rounds of four sites, and return the outcome and the evaluations."""
    made = {name: small(rounds=2, **own) for name, own in SITES.items()}
    outcome = run(small(rounds=2), made, folder, rules=RULES, first_round_needs=4, **how)
    return outcome, select(read_metrics(folder / "coordinator"), "evaluation")


def own_losses(folder: Path) -> dict[str, float]:
    """Return the loss that each site measured last."""
    return {s: select(read_metrics(folder / s), "evaluation")[-1]["loss"] for s in SITES}


def test_metrics_equal_those_of_plain_rounds(tmp_path: Path, notes: list[str]) -> None:
    write_meters(tmp_path / "data", MORE, 2)
    lines = []
    for where in ("plain", "secret"):
        made = {s: experiment(f"{tmp_path}/data/{s}/*.csv", heldout_clients=0.6) for s in MORE}
        rules = RULES._replace(secure_sums=where == "secret")
        heard = dict.fromkeys(made, Listening)
        alone = experiment(heldout_clients=0.6)
        outcome = run(alone, made, tmp_path / where, rules=rules, lines=heard, personal=True)
        lines += select(read_metrics(tmp_path / where / "coordinator"), "evaluation")
        for line in outcome.lines.values():
            assert {x is None for x in line.means.values()} == {where == "secret"}
        assert [bool(s.heldout) for s in outcome.coordinator.exchange.sites] == 3 * [
            where == "plain"
        ]
    plain, secret = ({n: x for n, x in line.items() if n != "wall_seconds"} for line in lines)
    assert {"rmse", "r2", "fine_tuned_loss", "personal_loss"} <= secret.keys()
    of_all = {name for name in plain if not name.startswith("site/") and "new_clients/" not in name}
    assert secret.keys() == of_all  # one site has few new clients
    assert [note for note in notes if note.startswith("no held-out new_clients/loss: ")]
    for name in secret.keys() - {"kind"}:
        assert secret[name] == pytest.approx(plain[name], rel=1e-5), name


def test_a_site_that_was_sent_another_model_is_in_no_sum(tmp_path: Path) -> None:
    class Deceived(Line):
        """A line of a site that the coordinator sends another model to evaluate."""

        def call(self, message: Message, timeout: float) -> Message:
            answer = super().call(message, timeout)
            if answer.header.get("task") == EVALUATION:
                changed = {name: np.full_like(x, 1e9) for name, x in answer.arrays.items()}
                return answer._replace(arrays=changed)
            return answer

    _, (line,) = federate(tmp_path, lines={"b": Deceived})
    losses = own_losses(tmp_path)
    assert losses["b"] > 1e9
    assert line["loss"] == pytest.approx(sum(losses[name] for name in "acd") / 3)


def test_a_second_sum_of_the_same_metrics_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    add_sum = SiteEvaluation._add_sum

    def ask_twice(
        evaluation: Any, number: int, model: str, measured: dict[str, Any], seconds: float
    ) -> None:
        add_sum(evaluation, number, model, measured, seconds)
        rest = {name: heldout for name, heldout in measured.items() if name != "d"}
        add_sum(evaluation, number, model, rest, seconds)

    monkeypatch.setattr(SiteEvaluation, "_add_sum", ask_twice)
    _, (line,) = federate(tmp_path)
    assert line["loss"] == pytest.approx(np.mean([*own_losses(tmp_path).values()]))
    told = "no reply: this site sends metrics that it has, in one sum alone"
    assert notes.count(told) == 3


def test_a_metric_of_one_site_is_in_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """The other sites would add 0, and the sum would tell it."""
    at_site = SmallExperiment.at_site

    def with_extra(experiment: Any, clients: Any) -> Any:
        made = at_site(experiment, clients)
        extra = {"extra": 3.0} if experiment.data_seed == 3 else {}
        return made._replace(evaluate=lambda _: {"loss": 1.0, **extra})

    monkeypatch.setattr(SmallExperiment, "at_site", with_extra)
    _, (line,) = federate(tmp_path / "honest")
    assert line["loss"] == 1.0 and "extra" not in line
    monkeypatch.setattr(site_evaluation, "_common_names", lambda by_site: ["extra", "loss"])
    _, lines = federate(tmp_path / "lying")
    assert not lines
    assert notes.count("no reply: this site sends metrics that it has, in one sum alone") == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_does_not_tell_its_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str], loss: float
) -> None:
    at_site = SmallExperiment.at_site

    def diverging(experiment: Any, clients: Any) -> Any:
        made = at_site(experiment, clients)
        means = {"loss": loss, "error": 1.0}
        return made._replace(evaluate=lambda _: means) if experiment.data_seed == 1 else made

    monkeypatch.setattr(SmallExperiment, "at_site", diverging)
    outcome, lines = federate(tmp_path)
    assert not lines and not outcome.coordinator.exchange.faults
    assert [note for note in notes if note.startswith("no held-out loss: not finite")]
    assert not [note for note in notes if "not counted" in note or "no reply" in note]


def test_counts_that_hostile_sites_make_zero_or_negative_give_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    terms = Measured.terms

    def lie(measured: Measured, names: list[str]) -> Any:
        (name,), (values,) = zip(*terms(measured, names).items(), strict=True)
        return {name: np.stack([-values[0], values[1]])}

    monkeypatch.setattr(Measured, "terms", lie)
    _, lines = federate(tmp_path)
    assert not lines
    assert [note for note in notes if note.startswith("no held-out loss")]


def test_two_sites_with_metrics_are_too_few(tmp_path: Path, notes: list[str]) -> None:
    _, lines = federate(tmp_path, no_metrics="bd")
    assert not lines
    told = "no held-out metrics: a secure sum of them needs 3 sites with metrics, not only a, c"
    assert notes.count(told) == 1
