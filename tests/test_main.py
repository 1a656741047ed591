"""The command line itself: help, version, colors and imports."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedpax
import fedpax.data
import fedpax.experiments
from fedpax.commands import COMMANDS
from fedpax.commands.command_table import help_of
from fedpax.commands.parts.options import parse

ROOT = Path(__file__).parent.parent
REGRESSION = "small_regression:regression"

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_is_printed(run: Run, arguments: list[str]) -> None:
    status, output, errors = run(*arguments)
    assert (status, errors) == (0, "")
    for words in (
        "fedpax train --exp=NAME",
        "fedpax compare",
        "fedpax list",
        "--allow_config_change",
    ):
        assert words in output


@pytest.mark.parametrize(
    ("arguments", "own", "flags_of_others"),
    [
        (["compare", "--help"], ["--seeds ", "--metric ", "--target "], ["--multihost", "--hlo"]),
        (["compare", "--exp=a,b", "-h"], ["--seeds ", "--exp ", "--FIELD="], ["--keeper", "INT"]),
        (["train", "--help"], ["--allow_config_change", "--multihost ", "--seed "], ["--target"]),
        (["show", "--help"], ["--picture ", "--metric "], ["--exp ", "--seed "]),
    ],
)
def test_help_of_a_command_is_its_own(
    run: Run, arguments: list[str], own: list[str], flags_of_others: list[str]
) -> None:
    status, output, errors = run(*arguments)
    assert (status, errors) == (0, "")
    commands = [line.split()[1] for line in output.splitlines() if line.startswith("  fedpax ")]
    assert commands == [arguments[0]]
    assert all(words in output for words in own)
    assert not any(words in output for words in flags_of_others)


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version") == (0, f"fedpax {fedpax.__version__}\n", "")


def test_imports_are_light() -> None:
    """Bound the imports of a start: they decide how long `fedpax list` takes."""
    code = """
import sys
import fedpax
for name in fedpax.__all__:
    if name not in ("FederatedAlgorithm", "train"):  # a method names optax, a run needs them all
        getattr(fedpax, name)
heavy = {
    "flax", "grain", "matplotlib", "optax", "orbax.checkpoint", "pandas", "scipy.stats",
    "sklearn", "tensorboardX", "tensorflow_datasets", "tqdm", "tyro",
}
print(sorted(heavy & sys.modules.keys()))
from fedpax.main import main
main(["list"])
print(sorted(heavy & sys.modules.keys() - {"flax", "optax", "tyro"}))
import fedpax.commands.train
used = {"flax", "optax", "tensorboardX", "tqdm", "tyro"}
print(sorted(heavy & sys.modules.keys() - used))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = process.stdout.splitlines()
    assert (lines[0], *lines[-2:], process.stderr) == ("[]", "[]", "[]", "")


@pytest.mark.parametrize(
    ("stderr_is_a_terminal", "no_color", "colors"),
    [(True, "", True), (True, "1", False), (False, "", False)],
)
def test_colors_are_for_terminals(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    stderr_is_a_terminal: bool,
    no_color: str,
    colors: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: stderr_is_a_terminal)
    status, output, errors = run("train", f"--exp={REGRESSION}", "--job_log_dir=x", "--nope=1")
    assert status == 2 and ("\x1b[" in output + errors) == colors
    assert os.environ["TERM"] == "xterm"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_describes_each_flag_of_a_command(command: str) -> None:
    shown = re.findall(r"^  --([\w.]+)", help_of(command), re.MULTILINE)
    assert set(COMMANDS[command].flags) <= set(shown)


def test_the_help_states_defaults() -> None:
    text = help_of("syncer")
    assert "(default 1800)" in text and "(default float32)" in text
    assert "inf)" not in text and "None)" not in text and "False)" not in text


@pytest.mark.parametrize("command", [name for name, entry in COMMANDS.items() if entry.flags])
def test_flags_have_the_defaults_of_the_table(command: str) -> None:
    options, others = parse(command, [], needs_exp=False)
    table = {name: flag.default for name, flag in COMMANDS[command].flags.items()}
    assert {name: options[name].value for name in options} == table
    assert others == []


def test_every_flag_of_a_usage_is_one_of_the_command() -> None:
    for entry in COMMANDS.values():
        named = set(re.findall(r"--(\w+)", entry.usage)) - {"FIELD", "data"}
        assert named <= set(entry.flags)


def test_the_page_of_the_command_line_names_every_command() -> None:
    page = (Path(__file__).parent.parent / "docs" / "command_line.md").read_text("utf-8")
    assert {*re.findall(r"^\| `fedpax (\w[\w-]*)", page, re.MULTILINE)} == {*COMMANDS}
    without_fields = {name for name, entry in COMMANDS.items() if "--FIELD=" not in entry.usage}
    (listed,) = re.findall(r"all but (.*?)\.\n", page, re.DOTALL)
    assert {*re.findall(r"`(\w[\w-]*)`", listed)} == without_fields
    assert without_fields.isdisjoint(n for n, entry in COMMANDS.items() if entry.fields_of)


def test_no_arguments_show_the_help_as_an_error(run: Run) -> None:
    status, output, errors = run()
    assert (status, output) == (2, "") and "fedpax train --exp=NAME" in errors


def test_help_of_an_experiment_shows_every_field(run: Run) -> None:
    status, output, _ = run("train", f"--exp={REGRESSION}", "--help")
    assert status == 0
    for words in (
        "Local SGD on 8 clients",
        "--model.hidden INT",
        "width of the hidden layer",
        "--training.checkpoint_every INT",
        "--mesh.clients {None}|INT",
        "--learning_rate FLOAT",
    ):
        assert words in output


def test_the_package_imports_nothing_slow() -> None:
    """Until `fedpax.__main__` runs, Ctrl-C ends in a traceback."""
    # -S: an editable install imports the three before all else.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fedpax; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"jax", "re", "typing"} & {*completed.stdout.split()}


@pytest.mark.parametrize(("arguments", "number"), [("['export']", "ENOSPC"), ("None", "EFBIG")])
def test_a_full_disk_of_another_file_leaves_the_output_open(arguments: str, number: str) -> None:
    code = f"""
import errno
import fedpax.main
def fail(arguments):
    raise OSError(errno.{number}, "No space left on device", "model.npz")
fedpax.main._run = fail
print("status", fedpax.main.main({arguments}))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "status 1\n" and "model.npz cannot be written" in process.stderr
    remedy = "Make room on the disk" if number == "ENOSPC" else "Raise the limit on the size of"
    assert remedy in process.stderr and process.stderr.count(", or write to another disk.") == 1
