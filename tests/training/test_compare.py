import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from fedpax.training.compare import Measured, measure, picture, table, write_comparison
from fedpax.training.metrics import MetricsWriter


def record(folder: Path, losses: list[float], bytes_a_round: float, seconds: float) -> Path:
    """Writes what the loop writes, evaluating every second round."""
    with MetricsWriter(folder) as metrics:
        metrics.write("run", 0, {"parameters": 1234567, "participants": 4})
        for number, loss in enumerate(losses, start=1):
            so_far = {
                "loss": loss,
                "tokens": 1000 * number,
                "bytes_across_placement": bytes_a_round * number,
                "wall_seconds": 2 * seconds * number,
            }
            rates = {"seconds": seconds, "tokens_per_second": 1000 / seconds}
            metrics.write("training", number, so_far | rates)
            if number % 2 == 0:
                metrics.write("evaluation", number, so_far | {"loss": loss + 0.5})
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    losses = list(2.0 + 3.0 * np.exp(-np.linspace(0, 3, 10)))
    return {
        "diloco": record(tmp_path / "diloco", losses, 5e6, 0.5),
        "data_parallel": record(tmp_path / "data_parallel", losses[:8], 1.6e8, 0.25),
        "single": record(tmp_path / "single", [x + 0.2 for x in losses], 0.0, 1.0),
        "unknown": record(tmp_path / "unknown", losses, math.nan, 1.0),
    }


def test_a_run_is_summed_up_from_its_lines(folders: dict[str, Path]) -> None:
    last = 2.0 + 3.0 * math.exp(-3) + 0.5
    assert measure("x", folders["diloco"]) == Measured(
        "x", pytest.approx(last), 5e7, 10_000, pytest.approx(2000.0), 1234567, 10.0
    )
    assert math.isnan(measure("x", folders["unknown"]).bytes_across_placement)


def test_a_run_without_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train x there first"):
        measure("x", record(tmp_path, [1.0], 1.0, 1.0))


def test_the_table_is_aligned_and_readable(folders: dict[str, Path]) -> None:
    lines = table([measure(name, folder) for name, folder in folders.items()]).splitlines()
    assert len(lines) == 6 and len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "experiment", "held-out loss", "bytes between", "tokens/s", "parameters", "wall time",
    ]  # fmt: skip
    assert cells[2] == ["diloco", "2.6494", "50.0 MB", "2,000", "1,234,567", "10 s"]
    assert [row[2] for row in cells[3:]] == ["1.3 GB", "0 B", "unknown"]


def test_the_files(folders: dict[str, Path], tmp_path: Path) -> None:
    text = write_comparison(folders, tmp_path)
    assert text == table([measure(name, folder) for name, folder in folders.items()])
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["name"] for run in content] == list(folders)
    assert (
        content[0]["bytes_across_placement"] == 5e7 and content[3]["bytes_across_placement"] is None
    )
    header = (tmp_path / "comparison.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 1.5 * height > 900


def test_a_picture_of_runs_that_send_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    picture({"single": folders["single"]}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
