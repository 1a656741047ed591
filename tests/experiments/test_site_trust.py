"""Tests of the benchmarks of sites that cheat, and of secure sums."""

import json
from pathlib import Path

import pytest

from fedpax.experiments.benchmarks import secure_sums, site_trust


def test_guards_drop_the_site_that_cheats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--rounds=3", "--seeds=0", "--attacks=none;scaled by -10", f"--json={path}"]
    assert site_trust.main(arguments) == 0
    rows = {(row["attack"], row["guard"]): row for row in json.loads(path.read_text())["rows"]}
    assert len(rows) == 2 * 5 and not any(row["wrong"] for row in rows.values())
    for guard in ("norm", "accept_if=loss+0.01"):
        assert rows["scaled by -10", guard]["caught"] == 1.0
        assert rows["none", guard]["caught"] == 0.0
        assert rows["scaled by -10", guard]["accuracy"] > 0.5
    assert rows["scaled by -10", "none"]["accuracy"] < 0.3
    assert "| the site that cheats | none" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        site_trust.main(["--attacks=unknown"])


def test_secure_sums_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert secure_sums.main(["--sites=4,5", "--values=100", f"--json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["sites"] for row in rows] == [4, 5] and all(row["met"] for row in rows)
