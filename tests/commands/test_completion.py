"""Tests of `fedpax completion`, run in the shells themselves."""

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import Command

from fedpax.commands import COMMANDS
from fedpax.commands.completion import script
from fedpax.commands.parts.options import configure
from fedpax.experiments.catalog import experiments
from fedpax.run_files.configuration import flatten, to_json

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
    "fedpax compare --exp=diloco_text,data_p": ["diloco_text,data_parallel_text"],
    "fedpax join --exp=decoupled_diloco_text --decoupled.qu": ["--decoupled.quorum="],
    "fedpax train --model.weights=some": ["some file"],
    "fedpax train --exp=fedavg_digits --method=scaf": ["scaffold"],
    "fedpax partition --exp=fedavg_digits --population.a": ["--population.alpha="],
    "fedpax export --format=": ["huggingface", "orbax", "npz", "safetensors"],
    "fedpax show --exp": [],
    "fedpax completion z": ["zsh"],
    "fedpax sites e": ["expel"],
    "fedpax sites --exp": [],
    "fedpax train --job_log_dir=some": ["some file"],
    "fedpax show --job_log_dir=": ["some file"],
    "fedpax train *": [],
}


def complete(folder: Path, lines: Sequence[str]) -> list[list[str]]:
    """Source the script in bash, and return what it offers for each line."""
    (folder / "some file").touch()
    calls = "".join(
        f"COMP_LINE='{line}'; COMP_POINT={len(line)}; _fedpax 2>/dev/null; "
        'for word in "${COMPREPLY[@]}" END; do echo "$word"; done\n'
        for line in lines
    )
    process = subprocess.run(
        ["bash", "-c", script("bash") + calls],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [block.split("\n")[:-1] for block in process.stdout.split("END\n")[:-1]]


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


TYPED = {
    "fedpax tr": "fedpax train ",
    "fedpax train --exp=diloco_text --model.dty": "fedpax train --exp=diloco_text --model.dtype=",
    "fedpax plan --exp=fedavg_digits,diloco_t": "fedpax plan --exp=fedavg_digits,diloco_text ",
    "fedpax export --format=h": "fedpax export --format=huggingface ",
    "fedpax train --job_log_dir=so": r"fedpax train --job_log_dir=some\ file ",
    "fedpax show --exp": "fedpax show --exp",
}
# The key Ctrl-X prints the line and clears it.
START = {
    "bash": (
        ["bash", "--noprofile", "--norc", "-i"],
        "show() {{ printf 'LINE<%s>' \"$READLINE_LINE\"; READLINE_LINE=; }}; "
        "bind -x '\"\\C-x\": show'; source {script}; echo REA''DY\n",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "autoload -Uz compinit; compinit -u -D; source {script}; "
        "show() {{ print -rn -- \"LINE<$BUFFER>\"; BUFFER= }}; zle -N show; bindkey '^X' show; "
        "echo REA''DY\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", START)
def test_a_tab_completes_in_a_terminal(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "some file").touch()
    (tmp_path / "script").write_text(script(shell))
    command, start = START[shell]
    process, terminal = pty.fork()
    if not process:
        os.chdir(tmp_path)
        os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "PS1": "> "})
    try:
        os.write(terminal, start.format(script="./script").encode())
        read_until(terminal, "READY")
        for typed, completed in TYPED.items():
            os.write(terminal, typed.encode() + b"\t\x18")
            assert read_until(terminal, ">", after="LINE<") == completed
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def read_until(terminal: int, end: str, after: str = "") -> str:
    """Read what a terminal prints until `end`, which follows `after`; return what is between."""
    text, deadline = "", time.monotonic() + 60
    while end not in text[text.find(after) + len(after) :] or after not in text:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], text
        text += os.read(terminal, 4096).decode()
    return text[text.find(after) + len(after) :].partition(end)[0]


@pytest.mark.parametrize("arguments", [(), ("fish",), ("bash", "zsh")])
def test_other_shells_are_refused(command: Command, arguments: tuple[str, ...]) -> None:
    status, output, errors = command("completion", *arguments)
    assert (status, output) == (2, "") and "expected bash or zsh. Run for example" in errors
