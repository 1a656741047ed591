"""Tests of commands on a folder whose files would block, hang, or write to the terminal."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_runs import Command

from fedpax import deploy
from fedpax.checkpoints.checkpoint_files import find_damage, write_checksums
from fedpax.commands.parts.options import configure
from fedpax.data import load, prepare
from fedpax.deploy.nodes.kept_state import KeptState, read_position
from fedpax.deploy.round_program import read_program
from fedpax.errors import ConfigurationError
from fedpax.files import parse_json
from fedpax.models.huggingface import load_config
from fedpax.run_files.configuration import read_configuration, write_configuration
from fedpax.run_files.metrics import read_metrics
from fedpax.run_files.paths import METRICS, complete_rounds, rounds_without_checksums
from fedpax.sites.site_files import read_federation, read_run
from fedpax.text.tokenizer_json import named_end

EVIL = "\x1b]0;title\x07\x1b[2J\r\n\u202e\x9b31m"
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def folder(command: Command, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_configuration(folder, configure("diloco_text", []), "diloco_text")
    sizes = {"kind": "run", "round": 0, "item_unit": "tokens"}
    training = {"kind": "training", "round": 1, "loss": 2.0, "items": 8, "wall_seconds": 1.0}
    lines = (sizes, {**training, "seconds": 1.0, "items_per_second": 8.0, "spikes": 0})
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def nested(path: Path) -> None:
    path.write_text(NESTED + "\n")


SHOWN = ("config.json", METRICS, "goodput.json", "islands.json", "owner.json", ".lock")


@pytest.mark.each_value
@pytest.mark.parametrize("make", [pipe, device, sparse, nested])
@pytest.mark.parametrize("name", SHOWN)
def test_a_file_that_is_no_regular_json_is_told_or_left_out(
    command: Command, folder: Path, make: Callable[[Path], None], name: str
) -> None:
    make(folder / name)
    status, output, errors = command("show", f"--job_log_dir={folder}")
    assert status == 0 and "stopped" in output
    if name in ("config.json", METRICS):
        assert f"{folder / name}" in errors and "cannot be read" in errors
    if name == "config.json":
        status, _, errors = command("evaluate", f"--job_log_dir={folder}")
        assert status == 2 and "config.json cannot be read" in errors
        assert any(word in errors for word in ("a pipe", "a device", "at most", "100 levels"))
        with pytest.raises(ConfigurationError):
            read_configuration(folder)


def test_control_characters_of_stored_names_are_escaped(command: Command, folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["configuration"]["data"]["tokenizer"] = f"bytes{EVIL}"
    path.write_text(json.dumps(content))
    island = {"name": EVIL, "state": EVIL, "shard": 0, "steps": 1, "loss": 2.0, "contributed": 1}
    island |= {"late": 0, "dropped": 0, "seconds_since_message": 1.0}
    (folder / "islands.json").write_text(json.dumps([island]))
    outputs = [command("evaluate", f"--job_log_dir={folder}", word) for word in ("--help", "--x=1")]
    path.write_text(json.dumps(content | {"exp": f"./a.py:{EVIL}"}))
    outputs += [
        command("show", f"--job_log_dir={folder}"),
        command("evaluate", f"--job_log_dir={folder}"),
        command("train", "--exp=diloco_text", f"--job_log_dir={folder}"),
    ]
    content["configuration"]["class"] = f"os:{EVIL}"
    path.write_text(json.dumps(content))
    outputs.append(command("evaluate", f"--job_log_dir={folder}"))
    evil = folder.rename(folder.with_name("run\x1b[2J"))
    outputs.append(command("show", f"--job_log_dir={evil.parent}"))
    for _, output, errors in outputs:
        text = output + errors
        assert not set(text) & set("\x1b\x07\r\u202e\x9b")
        assert "x1b" in text or "Unrecognized options" in text


def test_numbers_that_arithmetic_cannot_take_are_damage(command: Command, folder: Path) -> None:
    huge = "9" * 400
    damage = ['"spikes": Infinity', '"loss": NaN', f'"items": {huge}', '"seconds": [1]']
    with (folder / METRICS).open("a") as file:
        for text in damage:
            file.write(f'{{"kind": "training", "round": 2, "loss": 1, {text}}}\n')
    (folder / "islands.json").write_text('[{"name": 1}]')
    (folder / "owner.json").write_text('{"id": 1, "holder": 2, "free": 0, "time": "x"}')
    status, output, errors = command("show", f"--job_log_dir={folder}")
    assert status == 0 and "lines 3, 4, 5, 6 cannot be read and are left out" in errors
    assert "2.0000" in output


def test_json_is_bounded() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    for depth in (101, 900, 5000, 200_000):
        for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            with pytest.raises(ValueError, match="deeper than 100 levels"):
                parse_json(text)


def test_a_pipe_in_a_checkpoint_is_damage(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    write_checksums(tmp_path)
    assert find_damage(tmp_path) is None
    pipe(tmp_path / "_METADATA")
    assert find_damage(tmp_path) == "_METADATA is not a regular file"


def test_a_file_of_another_size_is_damage_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"parameters")
    write_checksums(tmp_path)
    sparse(tmp_path / "data")
    assert find_damage(tmp_path) == f"data has {1 << 40} bytes instead of 10"


def test_a_link_to_itself_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "5").symlink_to("5")
    assert complete_rounds(tmp_path) == [] and rounds_without_checksums(tmp_path) == []


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Give up the permissions of root, if the tests have them."""
    if os.getuid():
        yield
        return
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def errors_of(readers: Iterable[Callable[[], object]]) -> list[str]:
    """Call functions; return the errors that they raise."""
    lines = []
    for read in readers:
        try:
            read()
        except Exception as error:
            lines.append(f"{type(error).__name__}: {error}")
    return lines


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_a_missing_permission_is_no_damage(folder: Path) -> None:
    """Another user reads the folder: nothing advises to delete files."""
    checkpoint = folder / "checkpoints" / "1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "data").write_bytes(b"x")
    write_checksums(checkpoint)
    assert complete_rounds(folder / "checkpoints") == [1]
    for path in (checkpoint / "data", folder / "config.json", folder / METRICS):
        path.chmod(0)
    (folder / "closed").mkdir(mode=0o600)
    for path in [folder.parent, *folder.parent.parents]:
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    readers = [lambda: find_damage(checkpoint)]
    for run in (folder, folder / "closed"):
        readers += [functools.partial(read, run) for read in (read_configuration, read_metrics)]
    with another_user():
        lines = errors_of(readers)
    assert lines[0].startswith("PermissionError: [Errno 13] Permission denied")
    for line in lines[1:]:
        assert re.search("permission denied \\((it belongs to|its owner is unknown)", line)
        assert "chmod -R u+rwX" in line
        assert "delete" not in line and "Nothing is damaged" in line
    assert len(lines) == 5


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_other_files_without_permission_are_no_damage(tmp_path: Path) -> None:
    """No message tells another user that a file is damaged, or to delete or restore it."""
    (tmp_path / "a.csv").write_text("x,y\n1,0\n")
    prepare(str(tmp_path / "a.csv"), tmp_path / "prepared")
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "a.png")
    names = "config.json", "tokenizer_config.json", "site.json", "federation.json"
    for name in (*names, "manifest.json", "program.json", "1.0.state", "position"):
        (tmp_path / name).write_text("{}")
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0)
    for path in [tmp_path, *tmp_path.parents]:
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    readers = (
        lambda: load(str(tmp_path / "a.csv")),
        lambda: load(str(tmp_path / "prepared")),
        lambda: load(str(tmp_path / "a.png")),
        lambda: deploy.load(tmp_path),
        lambda: KeptState(tmp_path).read("1.0"),
        lambda: read_position(tmp_path / "position", ""),
        lambda: read_program(tmp_path / "program.json"),
        lambda: load_config(tmp_path),
        lambda: read_federation(tmp_path),
        lambda: read_run(tmp_path),
        lambda: named_end(tmp_path / "tokenizer.json"),
    )
    errors_of(readers)  # imports what another user may not be able to import
    with another_user():
        lines = errors_of(readers)
    assert len(lines) == 11
    for line in lines:
        assert line.startswith("PermissionError: [Errno 13]") and str(tmp_path) in line, line


@pytest.mark.slow
def test_what_libraries_log_of_a_folder_is_escaped_and_short(text: Path) -> None:
    """Orbax logs the content of a metadata file that is not JSON."""
    for path in text.glob("checkpoints/*/_CHECKPOINT_METADATA"):
        path.write_text(EVIL + "%s" + "x" * 10_000)
        write_checksums(path.parent)
    script = f"""
import sys
sys.argv = ["fedpax", "export", "--job_log_dir={text}", "--out={text}.npz"]
from fedpax.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "Metadata file" in done.stderr and "\\x1b]0;title" in done.stderr
    assert not set(EVIL) & set(done.stderr) - {*"]0;title[2J31m\r\n"}
    assert max(map(len, done.stderr.splitlines())) < 2500
