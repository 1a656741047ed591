"""A syncer and islands as processes, with failures at given and at random moments."""

from pathlib import Path

import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics, select

pytest.importorskip("grpc")
from islands.small_sites import STEPS

from fedpax.experiments.benchmarks.chaos_sites import (
    SYNCER,
    Failure,
    Outcome,
    Sites,
    draw_failures,
    play,
)
from fedpax.islands.island.link import LONGEST_BACKOFF

ISLANDS, ROUNDS = 3, 60
PAUSE = 0.3  # seconds that a round takes at least
MOST_PHASES_AHEAD = 32  # of `most_phases_ahead` by default


def schedule(seed: int) -> list[Failure]:
    """Draw failures every 3 seconds on average; one island is never killed."""
    failures = draw_failures(seed, ISLANDS, total_seconds=60.0, mean_seconds=3.0)
    return [failure for failure in failures if (failure.kind, failure.island) != ("kill", 0)]


def most_last_steps(outcome: Outcome, island: int) -> float:
    """Return how many steps an island can have trained in no merge when the run ends.

    The syncer does not wait for an island that is cut off. Such an island trains on, as one does
    that cannot learn of the end.
    """
    last_merge = outcome.merges[-1][0]
    starting = {(restart.process, restart.time): restart.seconds for restart in outcome.restarts}
    is_cut_off = any(
        failure.time
        + failure.seconds
        + starting.get((failure.island, failure.time), 0.0)
        + LONGEST_BACKOFF
        > last_merge
        for failure in outcome.failures
        if failure.island in (island, SYNCER)
    )
    return 10 * STEPS + is_cut_off * MOST_PHASES_AHEAD * STEPS / 2  # STEPS / 2 in a phase


def check_run(folder: Path, islands: int, rounds: int, failures: list[Failure]) -> Outcome:
    """Run a syncer and its islands to the end, and check what is promised of them."""
    fields = (
        "--exp=small_sites:sites_regression",
        f"--training.rounds={rounds}",
        f"--pause={PAUSE}",
        "--max_staleness=1000000",  # all steps count
    )
    with Sites(
        folder, islands, fields, local_steps=STEPS, working_directory=Path(__file__).parent
    ) as sites:
        outcome = play(sites, failures, limit_seconds=900)
        merges = sites.merges()
        syncer = sites.run_folder(SYNCER)
    assert outcome.statuses == [0] * (1 + islands)  # they end by themselves
    assert [merge["merge"] for merge in merges] == list(range(1, 2 * rounds + 1))
    assert outcome.repeated == 0
    # What a survivor has sent is in a merge, and it has sent what it has trained but for the end.
    assert 0 in outcome.lost_updates
    assert not any(outcome.lost_updates.values()), outcome.lost_updates
    for island, steps in outcome.last_steps.items():
        assert 0 <= steps <= most_last_steps(outcome, island), outcome
    losses = [line["loss"] for line in select(read_metrics(syncer), "training")]
    # Updates are stale where the machine is slow, so the loss is noisy; it does not diverge.
    assert len(losses) == rounds and np.all(np.isfinite(losses))
    assert np.median(losses[-rounds // 3 :]) < losses[0]
    return outcome


@pytest.mark.slow
def test_a_run_survives_a_failure_of_each_process(tmp_path: Path) -> None:
    failures = [
        Failure(0.0, "kill", 1, 0.2),
        Failure(0.2, "stop", 0, 0.4),
        Failure(1.0, "kill syncer", SYNCER, 0.2),
        Failure(1.5, "cut", 0, 0.5),
    ]
    outcome = check_run(tmp_path / "sites", 2, 20, failures)
    assert {failure.kind for failure in outcome.failures} == {failure.kind for failure in failures}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_survives_random_failures(tmp_path: Path, seed: int) -> None:
    outcome = check_run(tmp_path / "sites", ISLANDS, ROUNDS, schedule(seed))
    assert len(outcome.failures) >= 5


def test_failures_follow_from_the_seed() -> None:
    assert schedule(3) == schedule(3) != schedule(4)
    failures = draw_failures(3, ISLANDS, total_seconds=300.0, mean_seconds=3.0)
    assert len({failure.kind for failure in failures}) == 5
    assert all(0.5 <= failure.seconds <= 3.0 for failure in failures)
    assert [failure.time for failure in failures] == sorted(failure.time for failure in failures)
    assert all((f.island == SYNCER) == (f.kind == "kill syncer") for f in failures)
