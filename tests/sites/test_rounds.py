"""Rounds over sites whose sites fail, return, come late or send what cannot be counted."""

import math
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics
from fedpax.sites.coordinator_rounds import FailedRoundError
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.site_files import read_federation
from fedpax.sites.site_table import read_sites
from fedpax.sites.task_exchange import TaskExchange
from fedpax.transport.calls import DisconnectedError, RefusedError
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import small, train_together


def assert_equal(params, expected) -> None:
    for leaf, other in zip(params, jax.tree.leaves(expected), strict=True):
        assert np.all(np.isfinite(other)) and np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def three_sites(name: str, rounds: int = 4):
    sizes = {"a": 2, "b": 1, "c": 3}
    return {
        site: small(name, rounds, clients=count, data_seed=seed)
        for seed, (site, count) in enumerate(sizes.items())
    }


@pytest.mark.parametrize(
    "name", ["scaffold", *(pytest.param(n, marks=pytest.mark.slow) for n in ("median", "fedavg"))]
)
def test_equals_one_program_on_all_clients(tmp_path: Path, name: str) -> None:
    sites = three_sites(name)
    outcome = run(small(name), sites, tmp_path)
    assert_equal(outcome.params, train_together(sites, 4, lambda r: list(sites)).params)
    lines = read_metrics(outcome.folder / "coordinator")
    assert [line["round"] for line in lines if line["kind"] == "training"] == [1, 2, 3, 4]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    last = evaluations[-1]
    mean = np.average([last[f"site/{s}/loss"] for s in sites], weights=[16, 8, 24])
    np.testing.assert_allclose(last["loss"], mean, rtol=1e-6)
    rows = read_sites(outcome.folder / "coordinator")
    assert {row.name: (row.rounds, row.state) for row in rows} == dict.fromkeys(
        sites, (4, "finished")
    )


class Faulty(Line):
    """A line that loses or changes the replies of some rounds."""

    def __init__(self, exchange: TaskExchange, fault: str, rounds: set[int]) -> None:
        super().__init__(exchange)
        self._fault, self._rounds, self._done = fault, rounds, set()
        self.round, self._silent = 0, False

    def call(self, message: Message, timeout: float) -> Message:
        kind = message.header["kind"]
        if self._silent and kind == "heartbeat":
            raise DisconnectedError("the site is silent")
        if kind == "reply" and self.round in self._rounds - self._done:
            self._done.add(self.round)
            if self._fault == "lost":
                raise DisconnectedError("the reply is lost")
            if self._fault == "answer":
                super().call(message, timeout)
                raise DisconnectedError("the answer is lost")
            if self._fault == "nan":
                arrays = {  # integers have no NaN
                    n: x if x.dtype.kind in "iu" else np.full_like(x, np.nan)
                    for n, x in message.arrays.items()
                }
                message = message._replace(arrays=arrays)
            if self._fault == "silent":
                self._silent = True
                site = self._exchange.sites.get(message.header["site"])
                while self._exchange.round == self.round:
                    site.seen = -math.inf  # whatever a heartbeat that was on its way has changed
                    time.sleep(0.05)
                self._silent = False
        answer = super().call(message, timeout)
        if answer.header.get("task") == "round":
            self.round = answer.header["round"]
        return answer


@pytest.mark.parametrize(
    "name", [pytest.param("fedavg", marks=pytest.mark.slow), pytest.param("scaffold")]
)
@pytest.mark.parametrize("fault", ["lost", "answer", "nan", "silent"])
def test_a_fault_of_one_site(tmp_path: Path, fault: str, name: str) -> None:
    sites = three_sites(name)
    rules = RoundRules(2, 600.0, silent_after=600.0)  # a loaded machine makes no site silent
    outcome = run(
        small(name),
        sites,
        tmp_path,
        rules=rules,
        first_round_needs=3,
        lines={"b": lambda exchange: Faulty(exchange, fault, {2})},
    )
    lines = read_metrics(tmp_path / "b")
    trained = {line["round"] - 1 for line in lines if line["kind"] == "training"}
    absent = set(range(4)) - trained
    if fault == "silent":  # later rounds can begin before the site is heard again
        assert 1 in absent
    else:
        assert absent == ({1} if fault == "nan" else set())
    rows = {s.name: s for s in read_sites(outcome.folder / "coordinator")}
    assert rows["b"].rounds == 4 - len(absent)
    assert (rows["b"].dropped, rows["b"].late) == (fault == "nan", fault == "silent")
    expected = train_together(sites, 4, lambda r: ["a", "c"] if r in absent else list(sites))
    assert_equal(outcome.params, expected.params)


def test_a_round_that_no_reply_can_complete_ends_in_words(tmp_path: Path) -> None:
    class Rubbish(Faulty):
        def call(self, message: Message, timeout: float) -> Message:
            self._done.clear()  # in each attempt
            return super().call(message, timeout)

    with pytest.raises(FailedRoundError, match=r"round 2 began 5 times.*b: term 0 has NaN"):
        run(
            small("fedavg"),
            {"a": small("fedavg"), "b": small("fedavg", data_seed=1)},
            tmp_path,
            lines={"b": lambda exchange: Rubbish(exchange, "nan", {2})},
        )


def test_data_never_leave_a_site(tmp_path: Path) -> None:
    sites = three_sites("scaffold")
    outcome = run(small("scaffold"), sites, tmp_path)
    for seed, (name, line) in enumerate(outcome.lines.items()):
        sent = b"".join(line.sent)
        from sites.small_experiment import make_data

        for values in make_data(sites[name].clients, seed).values():
            for number in values.ravel():
                assert number.tobytes() not in sent
    everything = b"".join(
        path.read_bytes() for path in (outcome.folder / "coordinator").rglob("*") if path.is_file()
    )
    assert b"client_controls" not in everything


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    sites = three_sites("fedavg")
    sites["b"] = small("scaffold", clients=1)
    with pytest.raises(RefusedError, match="another configuration: method is scaffold, and fedavg"):
        run(small("fedavg"), sites, tmp_path)


def test_a_coordinator_resumes_after_its_last_round(tmp_path: Path) -> None:
    sites = three_sites("scaffold", rounds=2)
    first = run(small("scaffold", 2), sites, tmp_path)
    saved = read_federation(tmp_path / "coordinator")
    assert saved is not None
    longer = three_sites("scaffold", rounds=4)
    second = run(small("scaffold", 4), longer, tmp_path, done=2)
    assert_equal(second.params, train_together(longer, 4, lambda r: list(longer)).params)
    again = read_federation(tmp_path / "coordinator")
    assert again is not None and again["run"] == saved["run"] == first.run


@pytest.mark.slow
def test_a_late_site_joins_with_new_clients(tmp_path: Path) -> None:
    sites = three_sites("fedavg", rounds=12)
    started = threading.Event()

    class Late(Line):
        def call(self, message: Message, timeout: float) -> Message:
            started.wait(20)
            return super().call(message, timeout)

    class Watching(Line):
        def call(self, message: Message, timeout: float) -> Message:
            answer = super().call(message, timeout)
            if answer.header["round"] >= 3:
                started.set()
                time.sleep(0.05)
            return answer

    outcome = run(
        small("fedavg", rounds=12),
        sites,
        tmp_path,
        rules=RoundRules(2, 60.0),
        lines={"c": Late, "a": Watching},
    )
    rows = {s.name: s for s in read_sites(outcome.folder / "coordinator")}
    assert rows["a"].rounds == rows["b"].rounds == 12
    assert 1 <= rows["c"].rounds <= 10


def test_heartbeats_are_more_frequent_than_silence(tmp_path: Path) -> None:
    rules = RoundRules(silent_after=5.0)
    with pytest.raises(ValueError, match=r"Set for example --heartbeat_seconds=1\.25"):
        run_coordinator(small(), tmp_path / "a", "127.0.0.1:0", rules=rules, heartbeat_seconds=5.0)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_sites": 0}, "min_sites=0"),
        ({"secure_sums": True}, "min_sites=2 with secure_sums"),
        ({"weights": "capped:0"}, "weights='capped:0'"),
    ],
)
def test_rules_are_checked(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoundRules(**fields).check()
