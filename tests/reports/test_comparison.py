import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from fedpax.reports.comparison import (
    RunSummary,
    format_table,
    summarize_run,
    write_comparison,
)
from fedpax.run_files.metrics import MetricsWriter, read_metrics
from fedpax.run_files.paths import METRICS


def record(
    folder: Path,
    losses: list[float],
    bytes_per_round: float,
    seconds: float,
    item_unit: str = "tokens",
) -> Path:
    """Write the lines of a run that evaluates every second round."""
    sizes = {"num_parameters": 1234567, "num_participants": 4, "item_unit": item_unit}
    with MetricsWriter(folder) as metrics:
        metrics.write("run", 0, sizes)
        for number, loss in enumerate(losses, start=1):
            so_far = {
                "loss": loss,
                "items": 1000 * number,
                "bytes_across_placement": bytes_per_round * number,
                "wall_seconds": 2 * seconds * number,
            }
            rates = {"seconds": seconds, "items_per_second": 1000 / seconds}
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


def summarize(name: str, folder: Path) -> RunSummary:
    return summarize_run(name, read_metrics(folder), folder)


def test_a_run_is_summarized_from_its_metrics(folders: dict[str, Path]) -> None:
    last = 2.0 + 3.0 * math.exp(-3) + 0.5
    assert summarize("x", folders["diloco"]) == RunSummary(
        "x", pytest.approx(last), 5e7, 10_000, pytest.approx(2000.0), "tokens", 1234567, 10.0
    )
    assert math.isnan(summarize("x", folders["unknown"]).bytes_across_placement)


def test_a_run_without_evaluation_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Train it there first"):
        summarize("x", record(tmp_path, [1.0], 1.0, 1.0))


def test_a_run_without_its_line_of_sizes_is_compared(tmp_path: Path) -> None:
    path = record(tmp_path, [3.0, 2.0], 1e3, 0.5) / METRICS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    row = write_comparison({"lost": tmp_path}, tmp_path).splitlines()[-1]
    assert row.split("|")[2:6:2] == ["        2.5000 ", "   2,000 "]
    assert row.split("|")[5].strip() == "-"
    (content,) = json.loads((tmp_path / "comparison.json").read_text())
    assert content["num_parameters"] is None and content["item_unit"] == "items"


def test_the_table_is_aligned(folders: dict[str, Path]) -> None:
    lines = format_table([summarize(name, folder) for name, folder in folders.items()]).splitlines()
    assert len(lines) == 6 and len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "experiment", "held-out loss", "communicated", "tokens/s", "parameters", "wall time",
    ]  # fmt: skip
    assert cells[2] == ["diloco", "2.6494", "50.0 MB", "2,000", "1,234,567", "10 s"]
    assert [row[2] for row in cells[3:]] == ["1.3 GB", "0 B", "unknown"]


def test_a_loss_that_diverged_is_short(tmp_path: Path) -> None:
    run = summarize("fedavg", record(tmp_path / "a", [1.0, 2.5e30], 1.0, 1.0, "examples"))
    row = format_table([run._replace(loss_deviation=1.5e29)]).splitlines()[-1]
    assert "| 2.5e+30 ± 1.5e+29 |" in row


def test_image_runs_count_examples(tmp_path: Path) -> None:
    images = summarize("fedavg", record(tmp_path / "a", [1.0, 0.5], 1.0, 1.0, "examples"))
    header = format_table([images]).splitlines()[0]
    assert "examples/s" in header and "tokens" not in header


def test_runs_with_different_units_say_the_unit_in_each_cell(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folders["images"] = record(tmp_path / "images", [1.0, 0.5], 1.0, 1.0, "examples")
    lines = write_comparison(folders, tmp_path).splitlines()
    assert "| throughput " in lines[0]
    assert "2,000 tokens/s" in lines[2] and "1,000 examples/s" in lines[-1]


def test_the_picture_and_the_json_file_are_written(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    text = write_comparison(folders, tmp_path)
    assert text == format_table([summarize(name, folder) for name, folder in folders.items()])
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["name"] for run in content] == list(folders)
    assert (
        content[0]["bytes_across_placement"] == 5e7 and content[3]["bytes_across_placement"] is None
    )
    header = (tmp_path / "comparison.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 1.5 * height > 900


def test_runs_without_communication_can_be_plotted(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    write_comparison({"single": folders["single"]}, tmp_path)
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_runs_in_virtual_time_have_a_column_and_a_panel(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with MetricsWriter(tmp_path / "async") as metrics:
        metrics.write("run", 0, {"num_parameters": 1234567, "item_unit": "tokens"})
        so_far = {"items": 1000, "bytes_across_placement": math.nan, "wall_seconds": 3.0}
        for number in (1, 2):
            line = {"loss": 2.0 / number, "virtual_seconds": 80.0 * number}
            metrics.write("training", number, so_far | line)
            metrics.write("evaluation", number, so_far | {"loss": 2.5 / number})
    widths = []
    alone = {"async": tmp_path / "async"}  # its bytes are unknown: a panel less
    write_comparison(alone, tmp_path)
    picture_of_two = struct.unpack(">II", (tmp_path / "comparison.png").read_bytes()[16:24])
    for runs in (folders, folders | alone):
        cells = [row.split("|")[-2].strip() for row in write_comparison(runs, tmp_path).split("\n")]
        header = (tmp_path / "comparison.png").read_bytes()[:24]
        widths.append(struct.unpack(">II", header[16:])[0])
    assert [cells[0], *cells[2:]] == ["virtual time", "-", "-", "-", "-", "160 s"]
    assert widths[1] == pytest.approx(1.5 * widths[0], rel=0.02)
    assert picture_of_two[0] == widths[0]
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["virtual_seconds"] for run in content] == [None] * 4 + [160.0]


def test_a_metric_called_deviation_is_a_metric(tmp_path: Path) -> None:
    repeats = {"mine": []}
    for seed in range(3):
        folder = tmp_path / f"mine_{seed}"
        record(folder, [2.0, 1.0 + seed], 0.0, 1.0)
        lines = (folder / "metrics.jsonl").read_text().replace('"kind"', '"deviation": 5.0, "kind"')
        (folder / "metrics.jsonl").write_text(lines)
        repeats["mine"].append(folder)
    for folders in ({"one": repeats["mine"][0]}, repeats):
        text = write_comparison(folders, tmp_path)
        assert "held-out deviation" in text and "5.0000" in text
    (run,) = json.loads((tmp_path / "comparison.json").read_text())
    assert run["metrics"]["evaluation"]["deviation"] == 5.0
    assert run["loss_deviation"] == pytest.approx(1.0)
