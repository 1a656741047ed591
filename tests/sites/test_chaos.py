"""A syncer and three islands as processes, with failures at random moments."""

from pathlib import Path

import numpy as np
import pytest

from fedpax.training.metrics import read_metrics, select

pytest.importorskip("grpc")
from small_sites import STEPS

from fedpax.experiments.benchmarks.chaos_sites import (
    SYNCER,
    Failure,
    Sites,
    draw_failures,
    play,
)

ISLANDS, ROUNDS = 3, 60


def schedule(seed: int) -> list[Failure]:
    """Failures every 3 seconds on average; one island is never killed."""
    failures = draw_failures(seed, ISLANDS, total_seconds=60.0, mean_seconds=3.0)
    return [failure for failure in failures if (failure.kind, failure.island) != ("kill", 0)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_run_survives_random_failures(tmp_path: Path, seed: int) -> None:
    fields = (
        "--exp=small_sites:sites_regression",
        f"--training.rounds={ROUNDS}",
        "--pause=0.3",
    )
    with Sites(
        tmp_path / "sites",
        ISLANDS,
        fields,
        local_steps=STEPS,
        working_directory=Path(__file__).parent,
    ) as sites:
        outcome = play(sites, schedule(seed), limit_seconds=900)
        merges = sites.merges()
        syncer = sites.run_folder(SYNCER)
    assert len(outcome.failures) >= 5
    assert outcome.statuses == [0] * (1 + ISLANDS)  # they end by themselves
    assert [merge["merge"] for merge in merges] == list(range(1, 2 * ROUNDS + 1))
    assert outcome.repeated == 0
    # What a survivor has sent is in a merge, and it has sent what it has trained but for the end.
    assert 0 in outcome.lost_updates
    assert not any(outcome.lost_updates.values()), outcome.lost_updates
    last_steps = outcome.last_steps
    assert all(0 <= steps <= 10 * STEPS for steps in last_steps.values()), last_steps
    losses = [line["loss"] for line in select(read_metrics(syncer), "training")]
    # Updates are stale where the machine is slow, so the loss is noisy; it does not diverge.
    assert len(losses) == ROUNDS and np.all(np.isfinite(losses))
    assert np.median(losses[-20:]) < losses[0]


def test_failures_follow_from_the_seed() -> None:
    assert schedule(3) == schedule(3) != schedule(4)
    failures = draw_failures(3, ISLANDS, total_seconds=300.0, mean_seconds=3.0)
    assert len({failure.kind for failure in failures}) == 5
    assert all(0.5 <= failure.seconds <= 3.0 for failure in failures)
    assert [failure.time for failure in failures] == sorted(failure.time for failure in failures)
    assert all((f.island == SYNCER) == (f.kind == "kill syncer") for f in failures)
