"""Guards in rounds over sites: a site that cheats is dropped, named and counted."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics, select
from fedpax.sites.merge_guard import MergeGuard
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.run_coordinator import run_coordinator
from fedpax.sites.site_worker import SiteWorker
from sites.federation import Federation, run, write_hospitals
from sites.test_equals_training import SIZES, experiment


@pytest.fixture
def cheat(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Let a site multiply what it sends, but not its weight."""

    def begin(name: str, factor: float) -> None:
        honest = SiteWorker._run_clients

        def run_clients(worker: SiteWorker, *args: Any) -> dict[str, np.ndarray]:
            sent = dict(honest(worker, *args))
            if f"/{name}/" in worker._experiment.data.files[0] and args[1]["task"] == "round":
                sent = {k: x if x.ndim == 0 else factor * x for k, x in sent.items()}
            return sent

        monkeypatch.setattr(SiteWorker, "_run_clients", run_clients)

    return begin


def federate(folder: Path, where: str = "runs", own: str = "", **rules: Any) -> Federation:
    sites = {s: experiment(f"{folder}/data/{s}/*.csv") for s in SIZES}
    files = [f"{folder}/data/{own}/*.csv"] if own else []
    return run(experiment(*files), sites, folder / where, rules=RoundRules(3, 60.0, **rules))


@pytest.mark.parametrize("rules", [{"norm_factor": 3.0}, {"accept_if": "loss+0.01"}])
def test_a_site_that_cheats_is_not_merged(
    tmp_path: Path, cheat: Callable[[str, float], None], rules: dict[str, Any]
) -> None:
    sizes = {**SIZES, "d": (200,)}
    write_hospitals(tmp_path / "data", sizes)
    own = "d" if "accept_if" in rules else ""
    cheat("c", -30.0)
    outcome = federate(tmp_path, own=own, **rules)
    table = {s.name: s for s in outcome.coordinator.exchange.sites}
    assert {name: (s.rounds, s.dropped) for name, s in table.items()} == {
        "a": (2, 0),
        "b": (2, 0),
        "c": (0, 2),
    }
    lines = select(read_metrics(tmp_path / "runs" / "coordinator"), "training")
    assert [line["dropped_sites"] for line in lines] == [1, 1]
    assert [line["sites"] for line in lines] == [2, 2]


def test_honest_sites_are_merged_as_without_guards(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", {**SIZES, "d": (200,)})
    plain = federate(tmp_path)
    guarded = federate(tmp_path, "guarded", own="d", norm_factor=3.0, accept_if="loss+0.5")
    for leaf, other in zip(plain.params, guarded.params, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_the_norms_outlive_the_process() -> None:
    models = {"a": 1.0, "b": 1.1, "c": 9.0, "d": 40.0}

    def model_of(sites: frozenset[str]) -> dict[str, np.ndarray]:
        return {"w": np.float32([sum(models[site] for site in sites), 0.0])}

    guard = MergeGuard(3.0)
    assert list(guard.drop("abc", model_of)) == ["c"]
    saved = json.loads(json.dumps(guard.to_json()))
    np.testing.assert_allclose(saved, [[1.0, 1.1, 9.0]])
    again = MergeGuard(3.0)
    again.restore(saved)
    assert list(again.drop("d", model_of)) == ["d"]
    assert MergeGuard(3.0).drop("d", model_of) == {}  # alone, its norm is the median
    assert not MergeGuard().is_active


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"norm_factor": 0.5}, "expected a number of at least 1"),
        ({"norm_factor": math.inf}, "expected a number of at least 1"),
        ({"accept_if": "loss"}, "is not a rule"),
    ],
)
def test_rules_that_are_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RoundRules(**rules).check()


def test_a_coordinator_without_data_cannot_evaluate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data"):
        run_coordinator(
            experiment(), tmp_path / "a", "127.0.0.1:0", rules=RoundRules(accept_if="loss+0.01")
        )
    assert not (tmp_path / "a").exists()
