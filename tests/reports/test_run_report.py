"""The report of a run from its folder."""

import json
from pathlib import Path

import pytest

from fedpax.reports.run_report import format_privacy, report_run
from fedpax.run_files.paths import METRICS


@pytest.mark.parametrize("aggregator", [None, {"delta": 1e-5}])
def test_an_epsilon_has_its_delta_and_the_reason_why_it_may_not_hold(
    tmp_path: Path, aggregator: dict | None
) -> None:
    line = {"kind": "training", "round": 3, "loss": 0.5, "epsilon": 9.25, "wall_seconds": 1.0}
    (tmp_path / METRICS).write_text(json.dumps(line) + "\n")
    report = report_run(tmp_path)
    report = report._replace(**(aggregator or {}))
    text = format_privacy([report])
    delta = "delta 1e-05" if aggregator else "the aggregator's delta"
    assert f"epsilon 9.25 for {delta} of the model after round 3, without ampli" in text
    assert text.endswith("who knows the seed can subtract it, and no epsilon holds")
