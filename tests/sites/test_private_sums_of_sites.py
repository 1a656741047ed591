"""Private means over sites: noise of the clients, and no sum of fewer than min_participants."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.aggregators import PrivacyAccountant
from fedpax.errors import FedpaxError
from fedpax.run_files.metrics import read_metrics, select
from fedpax.secure_sums.arithmetic import SecureSumError
from fedpax.settings.client_aggregators import aggregator
from fedpax.sites.participants import OPENED, OpenedSums
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.secret_terms import REPEATED, SecretTerms
from fedpax.sites.site_worker import SiteWorker, UnknownRoundError
from fedpax.sites.stage_calls import StageCalls
from fedpax.sites.tasks import new_token
from fedpax.transport.message import Message
from sites.federation import Line, run, write_hospitals
from sites.test_equals_training import SIZES, experiment

SITES = {**SIZES, "d": (30,)}  # six clients
THREE = {"a": (40, 25), "b": (33, 30), "c": (21, 50)}  # as many
NOISE = 1e-3
RANGES = ("age=number(0..120)", "dose=number(0..1)")


def federate(
    folder: Path,
    where: str,
    rounds: int,
    seconds: float = 60.0,
    needs: int = 4,
    lines: Any = None,
    sizes: Mapping[str, Sequence[int]] = SITES,
    **settings: Any,
) -> Any:
    settings = {"max_norm": 10.0, "noise_multiplier": NOISE, **settings}
    fields = {
        "aggregator": aggregator("private_secure_mean", **settings),
        "rounds": rounds,
        "columns": RANGES,
    }
    if not (folder / "data").exists():
        write_hospitals(folder / "data", sizes)
    sites = {s: experiment(f"{folder}/data/{s}/*.csv", **fields) for s in sizes}
    rules = RoundRules(3, seconds, secure_sums=True)
    outcome = run(
        experiment(**fields),
        sites,
        folder / where,
        rules=rules,
        first_round_needs=needs,
        lines=lines,
    )
    return outcome, select(read_metrics(folder / where / "coordinator"), "training")


def test_clients_draw_new_noise_and_epsilon_is_logged(tmp_path: Path) -> None:
    first, metrics = federate(tmp_path, "first", 1, needs=3, sizes=THREE)
    second, _ = federate(tmp_path, "second", 1, needs=3, sizes=THREE)
    difference = [a - b for a, b in zip(first.params, second.params, strict=True)]
    largest = max(np.abs(x).max() for x in difference)
    # The noise of a coordinate of the mean, and of the mean of the statistics.
    assert 0 < largest < 30 * NOISE * 10.0 / 6
    stated = PrivacyAccountant(NOISE, 1e-6, discrete=True).epsilon(2)  # the statistics, and a round
    assert metrics[-1]["site/a/epsilon"] == pytest.approx(stated, rel=1e-5)
    assert metrics[-1]["epsilon"] == pytest.approx(stated, rel=1e-5)
    assert metrics[-1]["num_present"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(("least", "counted"), [(4, 4), (5, 6)])
def test_a_sum_of_too_few_clients_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, counted: int
) -> None:
    """Site c, with two clients, drops out in round 2: the round begins again if 4 are too few."""
    work, silent = SiteWorker.work, set[str]()

    def once_silent(worker: SiteWorker, header: Any, arrays: Any) -> Any:
        is_mask = (header.get("request") or {}).get("phase") == "mask"
        if is_mask and header["round"] == 2 and "/c/" in worker._experiment.data.files[0]:
            if header["token"] in silent or not silent:
                silent.add(header["token"])
                raise UnknownRoundError
        return work(worker, header, arrays)

    monkeypatch.setattr(SiteWorker, "work", once_silent)
    _, metrics = federate(tmp_path, "runs", 2, 15.0, min_participants=least)
    assert silent and metrics[-1]["num_present"] == counted


def test_the_coordinator_waits_for_min_participants(tmp_path: Path, notes: list[str]) -> None:
    """Three sites with five clients are enough for --min_sites, and too few for the sums."""

    class Last(Line):
        def call(self, message: Message, timeout: float) -> Message:
            told = "waiting for 3 sites with 6 clients, the fewest of --aggregator"
            while len([*self._exchange.sites]) < 3 or told not in notes:
                time.sleep(0.01)
            time.sleep(0.5)
            return super().call(message, timeout)

    lines = {"d": Last}
    _, metrics = federate(tmp_path, "runs", 1, needs=3, lines=lines, min_participants=6)
    assert metrics[-1]["num_present"] == 6


def test_without_secure_sums_the_coordinator_refuses(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    fields = {
        "aggregator": aggregator("secure_mean", max_value=100.0),
        "rounds": 1,
        "columns": RANGES,
    }
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", **fields) for s in SIZES}
    with pytest.raises(FedpaxError, match="Start the syncer with --secure_sums"):
        run(experiment(**fields), sites, tmp_path / "runs", rules=RoundRules(3, 60.0))


def test_a_site_opens_as_many_sums_with_noise_as_epsilon_is_stated_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator asks for each round 25 times, and could average the noise out."""
    ask, sums = StageCalls.ask, list[str]()

    def again(calls: StageCalls, divided: Any, request: Any, token: str, *args: Any) -> Any:
        answer = ask(calls, divided, request, token, *args)
        if args[0]["task"] == "round":
            for _ in range(24):
                if ask(calls, divided, request, new_token(), *args) is not None:
                    sums.append(token)
        return answer

    monkeypatch.setattr(StageCalls, "ask", again)
    monkeypatch.setattr(StageCalls, "_report", lambda *_: None)  # it mutes no site
    federate(tmp_path, "runs", 1, needs=3, sizes=THREE)
    assert len(sums) == REPEATED
    for name in THREE:
        path = tmp_path / "runs" / name / OPENED
        opened = OpenedSums(path)
        assert (opened.get("noise round"), opened.get("noise question")) == (1 + REPEATED, 1)
    # A new process in the same folder has counted them.
    terms = SecretTerms("a", folder=tmp_path / "runs" / "a")
    terms.rounds, terms._masked = 1, ("s", "round 1 0", "", 1)
    with pytest.raises(SecureSumError, match="open 3 sums with noise, expected at most 3"):
        terms._count_noise("another", "round")
