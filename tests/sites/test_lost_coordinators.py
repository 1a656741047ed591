"""A coordinator that ends between two writes of its files, and its sites after that."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.sites.coordinator_rounds import Coordinator
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.site_files import read_federation
from fedpax.sites.site_table import read_sites
from fedpax.sites.take_part import Site
from fedpax.transport.calls import DisconnectedError
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import small, train_together


@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_round_whose_state_is_not_saved_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    sites = {name: small("scaffold", 3, data_seed=seed) for seed, name in enumerate("ab")}
    save = Checkpoints.save

    def fail(self: Checkpoints, number: int, *content: Any) -> None:
        if number == lost:
            raise OSError("killed")
        save(self, number, *content)

    monkeypatch.setattr(Checkpoints, "save", fail)
    with pytest.raises(OSError, match="killed"):
        run(small("scaffold", 3), sites, tmp_path)
    monkeypatch.setattr(Checkpoints, "save", save)
    outcome = run(small("scaffold", 3), sites, tmp_path, done=lost - 1)
    wanted = train_together(sites, 3, lambda _: list(sites)).params
    for leaf, other in zip(outcome.params, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "krum"])  # of one stage, and of two
def test_a_site_counts_a_round_that_is_repeated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    run_stages, close = Coordinator._run_stages, Site.close
    rounds, repeated = list[int](), list[int]()

    def lose(self: Coordinator, program: Any, number: int, who: Any) -> Any:
        outcome = run_stages(self, program, number, who)
        if number == 2 and not repeated:  # as of a coordinator that is killed before it saves
            repeated.append(number)
            return None
        return outcome

    def note(self: Site) -> None:
        rounds.append(self.rounds)
        close(self)

    monkeypatch.setattr(Coordinator, "_run_stages", lose)
    monkeypatch.setattr(Site, "close", note)
    names = "abc" if method == "krum" else "ab"
    sites = {s: small(method, 3, clients=2, data_seed=k) for k, s in enumerate(names)}
    run(small(method, 3), sites, tmp_path)
    assert repeated == [2] and rounds == [3] * len(names)


def test_a_site_waits_for_a_coordinator_that_is_lost_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, beat, lost = [0.0], threading.Event(), list[str]()
    monkeypatch.setattr(
        "fedpax.sites.take_part.time",
        SimpleNamespace(
            monotonic=lambda: time.monotonic() + seconds[0],
            perf_counter=time.perf_counter,
            sleep=time.sleep,
        ),
    )

    class Lost(Line):
        def call(self, message: Message, timeout: float) -> Message:
            kind = message.header["kind"]
            if kind == "reply" and not lost:
                seconds[0] = 3600.0  # the site has trained for an hour
                beat.clear()
                assert beat.wait(60)  # and was answered
            if kind == "reply" and len(lost) < 2:
                lost.append(kind)
                raise DisconnectedError("the coordinator starts again")
            answer = super().call(message, timeout)
            if kind == "heartbeat":
                beat.set()
            return answer

    sites = {name: small("fedavg", 2, data_seed=seed) for seed, name in enumerate("ab")}
    rules = RoundRules(1, 600.0, silent_after=600.0)
    outcome = run(
        small("fedavg", 2), sites, tmp_path, rules=rules, first_round_needs=2, lines={"b": Lost}
    )
    rows = {row.name: row.rounds for row in read_sites(outcome.folder / "coordinator")}
    assert len(lost) == 2 and rows == {"a": 2, "b": 2}


def test_a_run_keeps_its_name_before_the_sites_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grpc")
    names = []

    def end(self: Coordinator) -> None:
        names.append(self.exchange.run)
        raise InterruptedError

    monkeypatch.setattr(Coordinator, "run", end)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            run_coordinator(small(), tmp_path, "127.0.0.1:0")
    assert names[0] == names[1]
    saved = read_federation(tmp_path)
    assert saved is not None and saved["run"] == names[0] and saved["inputs"] is None
