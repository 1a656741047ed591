"""Tests of `fedpax data` on columns of texts that are numbers or dates but for a few values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.data.tables import survey
from fedpax.main import main
from fedpax.user_files.readers import csv_files


def _write(path: Path, values: Any) -> None:
    path.write_text("x,y\n" + "".join(f"{value},{k}\n" for k, value in enumerate(values)))


@pytest.mark.each_value
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("form", "other", "told"),
    [
        ("{}", "?", r"'x' is text, because it has '?' among 90 numbers. If this value means"),
        ("{}.5", "-", r"'x' is text, because it has '-' among 90 numbers. If this value means"),
        ("{}%", "7%", r"'x' is text, because it has percent signs, such as in "),
        ("2024-01-{}", "03.01.2024", r"dates such as '03.01.2024' are not read. Write all"),
        ("{}", "", None),
        ("n{}", "?", None),
    ],
)
def test_why_a_column_is_text_is_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    large: bool,
    form: str,
    other: str,
    told: str | None,
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 256)
    if large:
        monkeypatch.setattr(survey, "_LARGE", 0)
    rng = np.random.default_rng(len(form))
    values = [form.format(k) for k in rng.integers(10, 29, 90)] + [other] * 10
    _write(tmp_path / "a.csv", rng.permutation(values))
    assert main(["data", str(tmp_path / "a.csv")]) == 0
    printed = capsys.readouterr().out
    assert told in printed if told else "is text, because" not in printed
    if told:
        assert main(["data", str(tmp_path / "a.csv"), "--types=x=string"]) == 0
        assert "is text, because" not in capsys.readouterr().out


def test_categories_with_a_few_numbers_are_plain_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "a.csv", ["A", "B", "A", "1", "C", "2"])
    assert main(["data", str(tmp_path / "a.csv")]) == 0
    assert "is text, because" not in capsys.readouterr().out
