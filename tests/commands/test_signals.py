"""Signals and closed streams: no traceback."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fedpax.__main__ import main as program
from fedpax.commands import COMMANDS, Command
from fedpax.main import main

REGRESSION = "small_regression:regression"


def test_ctrl_c_before_the_training_gives_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpax.commands.train.parse_run", interrupted)
    command = ("train", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}")
    monkeypatch.setattr(sys, "argv", ["fedpax", *command])
    assert program() == 130
    assert capsys.readouterr() == ("", "fedpax: SIGINT: stopped without saving.\n")
    with pytest.raises(KeyboardInterrupt):
        main(command)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handled_before_jax_is_imported(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "jax.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "fedpax.main", "doctor"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors == f"fedpax: {number.name}: stopped; there was nothing to save.\n"


def test_ctrl_c_in_python_raises_while_a_command_imports(tmp_path: Path) -> None:
    """A notebook's kernel runs on, and a second command can follow."""
    (tmp_path / "slow.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    code = f"""
from fedpax.commands import COMMANDS
from fedpax.main import main
try:
    main(["train", "--exp={tmp_path}/slow.py:x", "--job_log_dir=x"])
except KeyboardInterrupt:
    print(main(["--version"]))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output[-2:], errors) == (0, "0\n", "")


def test_ctrl_c_in_python_leaves_no_module_half_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX cannot be imported again in a process that has interrupted its import."""
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nrun = lambda rest: 0\n"
    (tmp_path / "slow_command.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "slow", Command("slow_command:run", usage=""))
    with pytest.raises(KeyboardInterrupt):
        main(["slow"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main(["slow"]) == 0 and hasattr(sys.modules.pop("slow_command"), "run")
    (tmp_path / "slow_command.py").write_text(code.replace("\nos.kill", "\nwhile True: os.kill"))
    with pytest.raises(KeyboardInterrupt):  # the second one is not delayed
        main(["slow"])


def test_a_closed_pipe_gives_no_traceback() -> None:
    """Close the pipe early, as `fedpax --help | head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "fedpax.main", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


def test_closed_streams_give_no_traceback(tmp_path: Path) -> None:
    """Close both streams, as `fedpax --help >&- 2>&-` does; `fedpax` alone prints on stderr."""
    program = f"{sys.executable} -m fedpax"
    opened = (
        "from fedpax.console import open_closed_streams; open_closed_streams(); "
        "print(open('x', 'w').fileno())"
    )
    script = f"""
        {program} --help >&-; echo $?
        {program} 2>&-; echo $?
        {program} --help <&- >&- 2>&-; echo $?
        {program} --help >/dev/full; echo $?
        {sys.executable} -c "{opened}" <&- 2>&-
    """
    process = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert process.stdout.split() == ["0", "2", "0", "1", "3"]
    assert process.stderr.splitlines() == [
        "fedpax: the output cannot be written: No space left on device. Make room on the disk, or "
        "write to another disk."
    ]


@pytest.mark.parametrize("where", ["__getattr__", "program"])
def test_ctrl_c_before_it_is_handled_gives_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupt(*arguments: str) -> None:
        raise KeyboardInterrupt

    module = types.ModuleType("fedpax.main")
    setattr(module, where, interrupt)
    monkeypatch.setitem(sys.modules, "fedpax.main", module)
    assert program() == 130
    assert capsys.readouterr().err == "fedpax: SIGINT: stopped; there was nothing to save.\n"
