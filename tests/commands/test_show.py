"""Tests of `fedpax show`."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from small_runs import REGRESSION, Command

from fedpax.run_files.goodput import read_goodput
from fedpax.run_files.metrics import read_metrics, select
from fedpax.run_files.paths import METRICS
from fedpax.training.folder_owners import JobDirLock


def cells(output: str) -> list[list[str]]:
    """Return the cells of the first table."""
    rows = [line for line in output.partition("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_a_finished_run_is_shown(command: Command, regression: Path) -> None:
    lines = read_metrics(regression)
    status, output, errors = command("show", f"--job_log_dir={regression}")
    head, _, row = cells(output)
    assert (status, errors) == (0, "")
    assert head == [
        "experiment", "rounds", "training loss", "held-out loss", "trained on", "throughput",
        "communicated", "wall time", "state",
    ]  # fmt: skip
    assert row[:2] == [REGRESSION, "4/4"]
    assert row[2] == f"{select(lines, 'training')[-1]['loss']:.4f}"
    assert row[3] == f"{select(lines, 'evaluation')[-1]['loss']:.4f}"
    assert row[4] == f"{select(lines, 'training')[-1]['items']:,.0f} examples"
    assert row[5].endswith(" examples/s") and row[6].endswith(" kB") and row[7].endswith(" s")
    assert row[8] == "finished"


def test_the_use_of_the_wall_time_is_shown(command: Command, regression: Path) -> None:
    seconds, _ = read_goodput(regression)
    output = command("show", f"--job_log_dir={regression}")[1]
    head, _, row = cells(output.partition("Use of the wall time:\n")[2])
    assert head[:3] == ["experiment", "step (goodput)", "input"]
    assert row[0] == REGRESSION and row[-1] == "0"
    total = sum(seconds.values())
    shares = dict(zip(head[1:-1], row[1:-1], strict=True))
    assert shares.pop("step (goodput)") == f"{seconds['step'] / total:.1%}"
    assert shares == {name: f"{seconds[name] / total:.1%}" for name in shares}
    (regression / "goodput.json").unlink()
    assert "Use of the wall time" not in command("show", f"--job_log_dir={regression}")[1]


def test_a_running_run_is_shown_and_left_alone(command: Command, regression: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in regression.rglob("*")}
    with JobDirLock(regression):
        holder = (regression / ".lock").read_bytes()
        assert cells(command("show", f"--job_log_dir={regression}")[1])[2][-1] == "running"
        assert (regression / ".lock").read_bytes() == holder
    assert before.keys() == {*regression.rglob("*")}
    assert cells(command("show", f"--job_log_dir={regression}")[1])[2][-1] == "finished"


def test_a_run_that_still_compiles_is_shown(command: Command, tmp_path: Path) -> None:
    with JobDirLock(tmp_path / "new"):
        status, output, _ = command("show", f"--job_log_dir={tmp_path}")
    assert status == 0
    assert cells(output)[2] == ["new", "0/?", *6 * ["-"], "running"]


def test_a_stopped_run_is_shown(command: Command, regression: Path) -> None:
    path = regression / "config.json"
    path.write_text(path.read_text().replace('"rounds": 4', '"rounds": 4000'))
    row = cells(command("show", f"--job_log_dir={regression}")[1])[2]
    assert (row[1], row[-1]) == ("4/4,000", "stopped")


def test_damaged_files_are_named_and_the_rest_is_shown(command: Command, regression: Path) -> None:
    lines = (regression / METRICS).read_text().splitlines()
    lines[2] = lines[2][:20]
    lines.append(json.dumps({"kind": "training", "round": 5}))
    lines.append(json.dumps({"kind": "training", "round": 6, "loss": "2.5"}))
    (regression / METRICS).write_text("\n".join(lines) + "\n")
    (regression / "config.json").write_text("{")
    shutil.rmtree(regression / "checkpoints")
    status, output, errors = command("show", f"--job_log_dir={regression}")
    row = cells(output)[2]
    assert status == 0
    assert (row[0], row[1], row[2], row[-1]) == ("regression", "5/?", "-", "stopped")
    assert row[3] != "-" and row[5] != "-"
    assert "config.json cannot be read" in errors
    assert f"{regression / METRICS}: lines 3, 9 cannot be read and are left out." in errors


@pytest.mark.parametrize("kept", [0, 3])
def test_lines_that_are_missing_at_the_end_are_told(
    command: Command, regression: Path, kept: int
) -> None:
    lines = (regression / METRICS).read_text().splitlines(keepends=True)
    (regression / METRICS).write_text("".join(lines[:kept]))
    last = max((line["round"] for line in read_metrics(regression)), default=0)
    status, output, errors = command("show", f"--job_log_dir={regression}")
    assert status == 0 and cells(output)[2][1] == "4/4"
    assert (
        f"{regression / METRICS} ends at round {last}, expected round 4, which is saved" in errors
    )
    with JobDirLock(regression):  # a checkpoint can be newer than the lines that were just read
        assert command("show", f"--job_log_dir={regression}")[2] == ""


def test_a_folder_in_place_of_the_metrics_is_named(command: Command, regression: Path) -> None:
    (regression / METRICS).unlink()
    (regression / METRICS).mkdir()
    status, output, errors = command("show", f"--job_log_dir={regression}")
    assert status == 0 and cells(output)[2][1] == "4/4"
    assert f"{METRICS} cannot be read (Is a directory)" in errors
    status, _, errors = command("show", f"--job_log_dir={regression}", "--metric=accuracy")
    assert status == 2 and "--metric=accuracy: no run has metrics yet" in errors


def test_several_runs_are_shown_in_one_table_and_one_picture(
    command: Command, regression: Path, text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(regression, tmp_path / "copy"))
    picture = tmp_path / "pictures" / "loss.png"
    status, output, _ = command(
        "show",
        f"--job_log_dir={regression},{text}",
        f"--job_log_dir={copy}",
        f"--picture={picture}",
    )
    assert status == 0
    names = [f"{REGRESSION} ({regression})", "diloco_text", f"{REGRESSION} ({copy})"]
    assert [row[0] for row in cells(output)[2:]] == names
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 3 * height  # three panels


def test_a_folder_of_runs_shows_all_of_them(
    command: Command, regression: Path, text: Path, tmp_path: Path
) -> None:
    status, output, _ = command("show", f"--job_log_dir={tmp_path}")
    assert status == 0
    assert [row[0] for row in cells(output)[2:]] == [REGRESSION, "diloco_text"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--job_log_dir is missing, expected the folders of runs"),
        (("--job_log_dir=nowhere",), "--job_log_dir=nowhere does not exist"),
        (("--job_log_dir=.",), "--job_log_dir=. holds no run, expected config.json"),
        (("--job_log_dir=.", "--picture=loss.svg"), "--picture=loss.svg is not a PNG"),
        (("--job_log_dir=.", "--pictur=loss.png"), "got '--pictur=loss.png', expected"),
        (("--job_log_dir=.", "--exp=diloco_text"), "got '--exp=diloco_text', expected"),
        (("runs/diloco",), "got 'runs/diloco', expected --job_log_dir=DIR"),
    ],
)
def test_arguments_that_are_refused(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    status, output, errors = command("show", *arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("fedpax: ") and words in errors


def test_a_picture_without_a_round_is_refused(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    with JobDirLock(tmp_path / "new"):
        status, _, errors = command("show", f"--job_log_dir={tmp_path}", f"--picture={picture}")
    assert status == 2 and "no round is logged yet" in errors and not picture.exists()


def test_help_names_the_command(command: Command) -> None:
    for arguments in (("show", "--help"), ("show", "--job_log_dir=x", "-h")):
        status, output, _ = command(*arguments)
        assert status == 0 and "fedpax show --job_log_dir=DIR" in output


def test_a_folder_with_a_comma_is_itself(
    command: Command, regression: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(regression.parent)
    regression.rename("a,b,")
    shutil.copytree("a,b,", "c")
    for names in ("c,a,b,", "a,b,,c", "./a,b,,,c,"):
        status, output, _ = command("show", f"--job_log_dir={names}")
        assert status == 0 and len(cells(output)) == 4
    status, _, errors = command("show", "--job_log_dir=c,b")
    assert status == 2 and "--job_log_dir=b does not exist" in errors
