"""Tests of commands on a folder that others made: no code that the folder names is run."""

import contextlib
import dataclasses
import json
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import EXPERIMENTS, NAMED, REGRESSION, Command

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.commands.parts.options import configure
from fedpax.errors import ConfigurationError
from fedpax.experiments.catalog import is_shipped
from fedpax.run_files.configuration import (
    from_json,
    own_classes,
    read_configuration,
    write_configuration,
)
from fedpax.training.trainer import train

PAYLOAD = """
import dataclasses, pathlib
pathlib.Path(__file__).with_name("has_run").touch()

@dataclasses.dataclass(frozen=True)
class Model:
    hidden: int = 1

def run():
    raise SystemExit("run was called")
"""
CALLS = [  # callables that take keyword arguments
    "os:makedirs",
    "fedpax.elastic.supervisor:subprocess.run",
    "fedpax.checkpoints.exports:shutil.rmtree",
    "fedpax.training.trainer:train",
    "fedpax.training.trainer:TrainingConfig",  # imported there, defined elsewhere
    "fedpax:program",
    "small_regression:regression",
]


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a run's folder beside a module that leaves a file when it is imported."""
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"

    def write(exp: str, changed: dict[str, Any]) -> Path:
        shipped = exp.partition(":")[0] in ("diloco_text", "methods_digits")
        write_configuration(folder, configure(exp if shipped else REGRESSION, []), exp)
        path = folder / "config.json"
        content = json.loads(path.read_text())
        for name, value in changed.items():
            *groups, last = name.split(".")
            part = content["configuration"]
            for group in groups:
                part = part[group]
            part[last] = value
        path.write_text(json.dumps(content))
        (folder / "checkpoints").mkdir()
        return folder

    yield write
    assert not (tmp_path / "has_run").exists() and "payload" not in sys.modules


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("exp", "changed"),
    [
        ("untrusted/payload.py:run", {}),
        ("payload:run", {}),
        ("diloco_text", {"class": "payload:Model"}),
        ("diloco_text", {"model.class": "payload:Model"}),
        ("methods_digits:fedavg", {"method.class": "payload:Model"}),
        (REGRESSION, {}),
    ],
)
def test_code_that_a_folder_names_is_not_run(
    command: Command, forge: Callable[..., Path], exp: str, changed: dict[str, Any]
) -> None:
    folder = forge(exp, changed)
    named = "--exp=path/to/file.py:function" if is_shipped(exp) else f"--exp={exp}"
    for words in (["evaluate"], ["export", "--out=new"], ["generate", "--prompt=a b"]):
        status, output, errors = command(*words, f"--job_log_dir={folder}")
        assert (status, output) == (2, "")
        if not {"model.class", "method.class"} & set(changed):
            quoted = [word.replace("--prompt=a b", "'--prompt=a b'") for word in words]
            again = f"run: fedpax {' '.join(quoted)} --job_log_dir={folder} {named}\n"
            assert errors.endswith(again), errors
        else:
            assert "names the class 'payload:Model', expected a dataclass of fedpax" in errors
    assert command("show", f"--job_log_dir={folder}")[0] == 0
    if is_shipped(exp):
        with pytest.raises(ConfigurationError, match="the class 'payload:Model'"):
            read_configuration(folder)
        status, _, errors = command("train", f"--exp={exp}", f"--job_log_dir={folder}")
        assert status == 2 and "payload:Model" in errors


def test_an_experiment_that_exp_names_brings_its_own_classes_alone(
    command: Command, forge: Callable[..., Path]
) -> None:
    folder = forge(REGRESSION, {"model": {"class": "payload:Model", "hidden": 1}})
    status, _, errors = command("evaluate", NAMED, f"--job_log_dir={folder}")
    assert status == 2 and "names the class 'payload:Model'" in errors
    with pytest.raises(ConfigurationError, match="the class 'payload:Model'"):
        train(configure(REGRESSION, []), folder, exp=REGRESSION)


@pytest.mark.usefixtures("command")
def test_a_class_of_fedpax_that_is_no_experiment_is_told(
    command: Command, forge: Callable[..., Path]
) -> None:
    folder = forge("diloco_text", {})
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["configuration"] = {"class": "fedpax.parallel.mesh:MeshConfig"}
    path.write_text(json.dumps(content))
    status, _, errors = command("evaluate", f"--job_log_dir={folder}")
    assert status == 2 and "holds a MeshConfig, expected an experiment" in errors


@pytest.mark.parametrize("name", CALLS)
def test_a_class_that_is_no_dataclass_of_its_module_is_not_called(
    tmp_path: Path, name: str
) -> None:
    target = {"name": str(tmp_path / "made"), "path": str(tmp_path), "rounds": 1}
    sys.path.append(str(EXPERIMENTS))
    try:
        own = own_classes(configure(REGRESSION, []))
    finally:
        sys.path.remove(str(EXPERIMENTS))
    with pytest.raises(ConfigurationError, match=r"names (the class )?'?[a-z_.]+:\w+"):
        from_json({"class": name, **target}, own=own)
    assert tmp_path.exists() and not (tmp_path / "made").exists()


def test_a_host_that_a_folder_names_is_not_called(command: Command, tmp_path: Path) -> None:
    calls: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                caller, _ = listening.accept()
                caller.sendall(b"220 ready\r\n")
                calls.append(caller.recv(100))
                caller.close()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    url = f"ftp://127.0.0.1:{listening.getsockname()[1]}/a/x.csv"
    folder = tmp_path / "theirs"
    exp = "fedavg_table"
    made: Any = configure(exp, ["--data.label=y", f"--data.files={url}"])
    files = dataclasses.replace(made.data, files=(url, "--exp=payload.py:run"))
    made = dataclasses.replace(made, data=files)
    write_configuration(folder, made, exp)
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, {"w": np.zeros(2)}, {}, {})
    for words in (["evaluate"], ["export", "--out=new"], ["evaluate", "--seed=1"]):
        status, output, errors = command(*words, f"--job_log_dir={folder}")
        assert (status, output) == (2, "") and "names files at another host" in errors
        assert f"--job_log_dir={folder} --data.files {url} ./--exp=payload.py:run" in errors
    assert not calls
    # Named in the command, they are read.
    command("evaluate", f"--job_log_dir={folder}", f"--data.files={url}")
    listening.close()
    assert calls
