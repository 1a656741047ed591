"""The metrics of a syncer: a process that is killed before it writes a line leaves none out."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedpax.islands.syncer.logs import RoundLog
from fedpax.islands.syncer.merge_report import Totals, read_report
from fedpax.run_files.metrics import MetricsWriter, read_metrics
from fedpax.training.progress import Progress

PHASES, ROUNDS, SECONDS = 2, 6, 0.5


def draw_merges() -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        {
            **{"merge": number, "fragment": number % PHASES, "time": 100.0 + SECONDS * number},
            **{"loss": rng.uniform(1, 3), "late": int(rng.integers(3)), "staleness": 1},
            **{"metrics": {"sign_agreement": rng.uniform()}},
            "updates": [
                {"island": name, "steps": int(rng.integers(1, 9)), "tokens": rng.uniform(9, 99)}
                for name in rng.permutation(list("abc"))[: rng.integers(1, 4)]
            ],
        }
        for number in range(1, PHASES * ROUNDS + 1)
    ]


def write(folder: Path, merges: list[dict], saved: int, logged: int) -> None:
    """Run a process that resumes after `saved` merges, and is killed after it has logged some."""
    tokens = sum(u["tokens"] for merge in merges[:saved] for u in merge["updates"])
    totals = Totals(tokens=tokens)
    first = saved // PHASES
    with (
        MetricsWriter(folder, after=first) as metrics,
        Progress("", rounds_done=first, rounds=ROUNDS, item_unit="tokens") as progress,
    ):
        log = RoundLog(metrics, progress, PHASES, totals)
        log.restore(json.loads(json.dumps(merges[:saved])), totals)
        for merge in merges[saved:logged]:
            log.add(read_report(merge), totals)


@pytest.mark.parametrize("saved", [0, 1, 2, 4, 5, 6, 7, 12])
@pytest.mark.parametrize("behind", [0, 1, 4])
def test_a_killed_syncer_leaves_no_round_out(tmp_path: Path, saved: int, behind: int) -> None:
    merges = draw_merges()
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        folder.mkdir()
    write(tmp_path / "whole", merges, 0, len(merges))
    write(tmp_path / "killed", merges, 0, max(saved - behind, 0))
    write(tmp_path / "killed", merges, saved, len(merges))
    want, got = (read_metrics(tmp_path / name) for name in ("whole", "killed"))
    assert [line["round"] for line in got] == list(range(1, ROUNDS + 1))
    for before, after in zip(want, got, strict=True):
        assert before.keys() == after.keys()
        for name in ("loss", "participants", "late", "staleness", "sign_agreement", "items"):
            assert after[name] == pytest.approx(before[name]), name
        assert after["items_per_second"] > 0
    walls = [line["wall_seconds"] for line in got]
    assert walls == sorted(walls)
