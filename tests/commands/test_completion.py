"""Tests of `fedpax completion`, run in the shells themselves."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Command

from fedpax.commands import COMMANDS
from fedpax.commands.completion import script
from fedpax.commands.options import configure
from fedpax.experiments.catalog import experiments
from fedpax.training.configuration import flatten, to_json

# Bash offers what follows the last "=" or ":", which it takes for the begin of a word.
LINES = {
    "fedpax tr": ["train"],
    "fedpax train --job": ["--job_log_dir="],
    "fedpax train --multi": ["--multihost"],
    "fedpax train --exp=fedavg_d": ["fedavg_digits"],
    "fedpax train --exp=diloco_text --model.dt": ["--model.dtype="],
    "fedpax train --exp=diloco_text --model.dtype=b": ["bfloat16"],
    "fedpax train --exp=diloco_text --training.stop_on_non_finite=": ["True", "False"],
    "fedpax compare --exp=diloco_text,data_parallel_text --islands": ["--islands="],
    "fedpax partition --exp=fedavg_digits --population.a": ["--population.alpha="],
    "fedpax export --format=": ["huggingface", "orbax"],
    "fedpax show --exp": [],
    "fedpax completion z": ["zsh"],
    "fedpax train --job_log_dir=some": ["some file"],
    "fedpax train *": [],
}


def complete(folder: Path, lines: Sequence[str]) -> list[list[str]]:
    """Source the script in bash, and return what it offers for each line."""
    (folder / "some file").touch()
    calls = "".join(
        f"COMP_LINE='{line}'; COMP_POINT={len(line)}; _fedpax 2>/dev/null; "
        'printf "%s\\n" "${COMPREPLY[@]}" END\n'
        for line in lines
    )
    process = subprocess.run(
        ["bash", "-c", script("bash") + calls],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    blocks = process.stdout.split("END\n")[:-1]
    return [[word for word in block.split("\n") if word] for block in blocks]


def test_bash_completes_commands_flags_fields_and_values(tmp_path: Path) -> None:
    assert dict(zip(LINES, complete(tmp_path, list(LINES)), strict=True)) == LINES


def test_every_command_experiment_and_field_is_completed(tmp_path: Path) -> None:
    names = ["diloco_text", "fedavg_digits"]
    lines = ["fedpax ", "fedpax train --exp=", *(f"fedpax train --exp={n} " for n in names)]
    commands, exps, *fields = complete(tmp_path, lines)
    assert set(commands) == {*COMMANDS, "--help", "--version"}
    assert set(exps) == set(experiments())
    for name, words in zip(names, fields, strict=True):
        paths = [path for path, _ in flatten(to_json(configure(name, [])))]
        expected = {f"--{path}=" for path in paths if not path.endswith("class")}
        assert expected <= set(words)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_the_script(tmp_path: Path) -> None:
    call = "compdef() { :; }\n" + script("zsh")
    call += "_fedpax_candidates --model.dtype=b fedpax train --exp=diloco_text --model.dtype=b"
    output = subprocess.run(["zsh", "-fc", call], capture_output=True, text=True, check=True)
    assert (output.stdout, output.stderr) == ("--model.dtype=bfloat16\n", "")


@pytest.mark.parametrize("arguments", [(), ("fish",), ("bash", "zsh")])
def test_other_shells_are_refused(command: Command, arguments: tuple[str, ...]) -> None:
    status, output, errors = command("completion", *arguments)
    assert (status, output) == (2, "") and "expected bash or zsh. Run for example" in errors
