"""Tests of the files that commands write: one that cannot be written is refused before any work."""

from pathlib import Path

import pytest
from small_runs import NAMED, REGRESSION, Command

COMMANDS = [
    ("evaluate", NAMED, "--job_log_dir={run}", "--json={}.json"),
    ("show", "--job_log_dir={run}", "--picture={}.png"),
    ("partition", "--exp=fedavg_digits", "--picture={}.png"),
    ("plan", f"--exp={REGRESSION}", "--topology=cpu:1", "--picture={}.png"),
    ("plan", f"--exp={REGRESSION}", "--topology=cpu:1", "--json={}.json"),
    ("plan", f"--exp={REGRESSION}", "--topology=cpu:1", "--hlo={}.hlo"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0] + words[-1][:6])
def test_a_folder_in_place_of_the_file_and_a_file_in_place_of_its_folder_are_refused(
    command: Command, trained_regression: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    flag, _, suffix = arguments[-1].partition("={}")
    (tmp_path / f"folder{suffix}").mkdir()
    for name, reason in (("folder", "it is a folder"), ("file/x", "File exists")):
        words = [word.format(tmp_path / name, run=trained_regression) for word in arguments]
        status, output, errors = command(*words)
        assert (status, output) == (2, "")
        assert f"{flag}={tmp_path / name}{suffix} cannot be written ({reason}" in errors


def test_a_file_in_place_of_the_folder_of_an_export_is_refused(
    command: Command, trained_regression: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "model"
    status, output, errors = command(
        "export", NAMED, f"--job_log_dir={trained_regression}", f"--out={out}", "--format=orbax"
    )
    assert (status, output) == (2, "")
    assert f"--out={out} cannot be made (File exists" in errors


@pytest.mark.parametrize(
    "flags", [(), ("--format=npz", "--dtype=no_dtype"), ("--stages", "--dtype=x")]
)
def test_an_export_that_is_refused_leaves_no_folders(
    command: Command, trained_regression: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out = f"--out={tmp_path}/new/folder/model"
    run = f"--job_log_dir={trained_regression}"
    assert command("export", NAMED, run, out, *flags)[0] != 0
    assert not (tmp_path / "new").exists()
    assert command("export", NAMED, run, out, "--format=npz")[0] == 0
    assert (tmp_path / "new" / "folder" / "model" / "params.npz").exists()
