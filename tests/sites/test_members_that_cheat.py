"""Members that cheat within the protocol: what they can change, and what they cannot."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from fedpax.algorithms.mime import mime
from fedpax.run_files.metrics import read_metrics, select
from fedpax.secure_sums import SiteSide
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_table import format_sites, read_sites
from fedpax.sites.site_worker import SiteWorker, UnknownRoundError
from fedpax.transport.calls import RefusedError
from fedpax.transport.message import Message
from sites import small_experiment
from sites.federation import Changed, Line, run
from sites.small_experiment import assert_made_by, loss_fn, small

NAMES = "abcd"


def four_sites(method: str, rounds: int) -> dict[str, Any]:
    return {name: small(method, rounds, data_seed=seed) for seed, name in enumerate(NAMES)}


def evaluate_with(tmp_path: Path, claimed: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the line of metrics and the table of a run whose site "d" claims metrics."""

    def change(header: Any) -> Any:
        if "metrics" in header.get("fields", {}):
            header["fields"] = {**header["fields"], **claimed}
        return header

    lines = {"d": lambda exchange: Changed(exchange, change)}
    sites = four_sites("fedavg", 2)
    found = run(small(rounds=2), sites, tmp_path, lines=lines)
    assert_made_by(found.params, sites, 2, NAMES)
    (line,) = select(read_metrics(tmp_path / "coordinator"), "evaluation")
    return line, format_sites(read_sites(tmp_path / "coordinator"))


def test_metrics_near_the_largest_float_are_a_finite_line(tmp_path: Path) -> None:
    claimed = {"metrics": {"loss": 1.7e308}, "examples": 2**53 - 1}
    line, table = evaluate_with(tmp_path, claimed)
    assert line["site/d/loss"] == 1.7e308 and 0.99 * 1.7e308 < line["loss"] <= 1.7e308
    assert 0 < line["site/a/loss"] < 10
    assert max(map(len, table.splitlines())) < 200  # a terminal shows it


def test_one_site_hides_no_metric_of_the_others_and_adds_none(tmp_path: Path) -> None:
    def add(header: Any) -> Any:
        if "metrics" in (fields := header.get("fields", {})):
            header["fields"] = {**fields, "metrics": fields["metrics"] | {"accuracy": 0.5}}
        return header

    def replace(header: Any) -> Any:
        if "metrics" in (fields := header.get("fields", {})):
            metrics = {"loss": 1.0, "site/a/loss": 9.0, "gain": 7.0}
            header["fields"] = {**fields, "metrics": metrics}
        return header

    lines = {name: lambda exchange: Changed(exchange, add) for name in "abc"}
    lines["d"] = lambda exchange: Changed(exchange, replace)
    run(small(rounds=2), four_sites("fedavg", 2), tmp_path, lines=lines)
    (line,) = select(read_metrics(tmp_path / "coordinator"), "evaluation")
    assert line["accuracy"] == pytest.approx(0.5) and "gain" not in line
    assert line["site/d/gain"] == 7.0 and line["site/a/loss"] < 9.0


def test_the_weight_that_a_site_claims_is_told(tmp_path: Path, notes: list[str]) -> None:
    rounds, sites, claimed = 3, four_sites("fedavg", 3), itertools.count(1)

    class Heavy(Line):
        def call(self, message: Message, timeout: float) -> Message:
            header = message.header
            if header["kind"] == "reply" and message.arrays:
                most = np.float32(2.0**31 - 1) if next(claimed) == 2 else np.float32(11)
                arrays = {
                    n: most if x.shape == () and x == 11 else x for n, x in message.arrays.items()
                }
                message = message._replace(arrays=arrays)
            return super().call(message, timeout)

    run(small(rounds=rounds), sites, tmp_path, lines={"d": Heavy})
    lines = select(read_metrics(tmp_path / "coordinator"), "training")
    shares = [[line[f"site/{name}/weight"] for name in NAMES] for line in lines]
    honest = np.arange(8, 12) / np.arange(8, 12).sum()
    np.testing.assert_allclose(shares[0], honest, rtol=1e-6)
    np.testing.assert_allclose(shares[1], [0, 0, 0, 1], atol=1e-7)
    np.testing.assert_allclose(shares[2], honest, rtol=1e-6)
    told = [text for text in notes if text.startswith("site d claims 100.0% of the weight")]
    assert len(told) == 1 and "--weights=capped:N" in told[0]
    table = format_sites(read_sites(tmp_path / "coordinator")).splitlines()
    assert " weight " in table[0] and " 28.9% " in table[-1]


@pytest.fixture
def mimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experiments run Mime, whose round has two stages."""

    def make(size: int, total: int) -> Any:
        return mime(loss_fn, cohort_size=size, client_optimizer=optax.sgd(0.1))

    monkeypatch.setitem(small_experiment.METHODS, "mime", make)


@pytest.mark.usefixtures("mimes")
def test_a_site_that_always_leaves_between_stages_stops_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, began = SiteWorker.work, itertools.count(1)

    def leave(worker: SiteWorker, header: Any, arrays: Any) -> Any:
        if worker._experiment.data_seed == 3 and header["task"] == "round" and header["stage"]:
            next(began)
            raise UnknownRoundError
        return honest(worker, header, arrays)

    monkeypatch.setattr(SiteWorker, "work", leave)
    sites = four_sites("mime", 3)
    found = run(small("mime", 3), sites, tmp_path, rules=RoundRules(3, 60.0), first_round_needs=4)
    assert_made_by(found.params, sites, 3, "abc")
    assert next(began) == 4  # once in each round


def test_a_site_that_shares_secrets_and_reveals_none_is_in_each_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, held = SiteSide.answer, itertools.count()

    def hold_back(side: SiteSide, request: Any) -> Message:
        if side.name == "d" and request is not None and request.header["phase"] == "reveal":
            next(held)
            raise UnknownRoundError
        return honest(side, request)

    monkeypatch.setattr(SiteSide, "answer", hold_back)
    sites = four_sites("fedavg", 3)
    rules = RoundRules(3, 60.0, secure_sums=True)
    found = run(small(rounds=3), sites, tmp_path, rules=rules, first_round_needs=4)
    assert_made_by(found.params, sites, 3, NAMES)
    assert next(held) == 3


def test_a_site_cannot_take_the_name_of_another_one_nor_its_clients(tmp_path: Path) -> None:
    names: list[str] = []

    class Poses(Line):
        """A line whose certificate says "d", and whose site says "a" in every other message."""

        def call(self, message: Message, timeout: float) -> Message:
            exchange, posed = self._exchange, message.header | {"site": "a"}
            if message.header["kind"] != "heartbeat":
                with pytest.raises(RefusedError, match="calls itself 'a', expected 'd'"):
                    exchange.handle("d", message._replace(header=posed))
                names.append(message.header["kind"])
            return super().call(message, timeout)

    sites = four_sites("fedavg", 1)
    found = run(small(rounds=1), sites, tmp_path, lines={"d": Poses})
    assert_made_by(found.params, sites, 1, NAMES)
    assert {"join", "reply", "work", "ready"} <= set(names)
