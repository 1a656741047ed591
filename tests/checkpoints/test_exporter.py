"""Models that a run exports while it trains."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small_regression import regression

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.exports import Exports, write_orbax
from fedpax.checkpoints.orbax_files import Retention
from fedpax.checkpoints.saved_state import load_params
from fedpax.models import huggingface
from fedpax.run_files.paths import complete_rounds
from fedpax.training.trainer import train


def random_state(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"params": {"w": jax.numpy.asarray(random.normal(size=(4, 3)), "f")}, "steps": seed}


def exported(folder: Path) -> set[str]:
    return {path.name for path in (folder / "exports").iterdir()}


def read_exported(folder: Path, number: int) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "exports" / f"{number}" / "params")


def test_a_run_exports_its_models_beside_its_checkpoints(tmp_path: Path) -> None:
    experiment = regression()
    training = dataclasses.replace(
        experiment.training, rounds=5, checkpoint_every=3, keep_checkpoints=1, export_every=2
    )
    experiment = dataclasses.replace(experiment, training=training)
    assert train(experiment, tmp_path, exp="mine.py:regression").finished
    assert exported(tmp_path) == {"2", "4", "5"}
    assert complete_rounds(tmp_path / "checkpoints") == [4, 5]  # the newest, and the one to export
    for number in (4, 5):
        jax.tree.map(
            np.testing.assert_array_equal,
            read_exported(tmp_path, number),
            load_params(tmp_path, number),
        )
        saved = json.loads((tmp_path / "exports" / f"{number}" / "config.json").read_text())
        assert saved["exp"] == "mine.py:regression"

    # A kill between the last checkpoint and its export: the finished run exports it.
    shutil.rmtree(tmp_path / "exports" / "5")
    (tmp_path / "exports" / ".5.draft").mkdir()
    assert train(experiment, tmp_path).rounds_trained == 0
    assert exported(tmp_path) == {"2", "4", "5"}


class Slow:
    """A writer that stops in the middle of its folder until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, folder: Path, params: Any) -> None:
        write_orbax(folder, params)
        rest = folder / "params" / "_METADATA"
        content = rest.read_bytes()
        rest.unlink()
        self.reached.set()
        assert self.released.wait(60)
        rest.write_bytes(content)


@pytest.fixture
def slow() -> Iterator[Slow]:
    writer = Slow()
    yield writer
    writer.released.set()


def exports_of(folder: Path, write: Callable[[Path, Any], None], **changes: Any) -> Exports:
    return Exports(folder, **{"every": 2, "last": 100, "write": write} | changes)


def test_the_training_does_not_wait_and_a_kill_leaves_no_half_folder(
    tmp_path: Path, slow: Slow
) -> None:
    keep = Retention(newest=1, scheduled=(2,))
    killed = tmp_path / "killed"
    with (
        exports_of(tmp_path / "run", slow) as exports,
        Checkpoints(tmp_path / "run", keep=keep, exports=exports) as checkpoints,
    ):
        for number in (2, 3):
            checkpoints.save(number, random_state(number), {}, {})
        assert slow.reached.wait(60)
        checkpoints._wait_until_saved()
        shutil.copytree(tmp_path / "run", killed)  # as a kill would leave it
        assert exported(killed) == {".2.draft"}
        waiting = threading.Thread(target=checkpoints.save, args=(4, random_state(4), {}, {}))
        waiting.start()  # the next export is due: it waits
        waiting.join(0.3)
        assert waiting.is_alive()
        slow.released.set()
        waiting.join(60)
    assert exported(tmp_path / "run") == {"2", "4"}
    with exports_of(killed, lambda folder, params: write_orbax(folder, params)):
        pass
    assert exported(killed) == {"2"}
    np.testing.assert_array_equal(read_exported(killed, 2)["w"], random_state(2)["params"]["w"])


def test_models_are_exported_while_checkpoints_are_saved(tmp_path: Path) -> None:
    saved = threading.Event()

    def export() -> None:
        for number in itertools.count():
            write_orbax(tmp_path / f"{number}", {"w": np.ones(3, "f")})
            if saved.is_set():
                return

    with (
        exports_of(tmp_path / "run", write_orbax, every=100) as exports,
        Checkpoints(tmp_path / "run", keep=8, exports=exports) as checkpoints,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        exporting = pool.submit(export)
        try:
            for number in range(1, 9):
                checkpoints.save(number, random_state(number), {}, {})
        finally:
            saved.set()
        exporting.result(60)
    assert complete_rounds(tmp_path / "run" / "checkpoints") == list(range(1, 9))


def test_a_model_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "exports" / "2").mkdir(parents=True)
    with (
        exports_of(tmp_path, write_orbax) as exports,
        Checkpoints(tmp_path, keep=1, exports=exports) as checkpoints,
    ):
        checkpoints.save(2, random_state(7), {}, {})
    np.testing.assert_array_equal(read_exported(tmp_path, 2)["w"], random_state(7)["params"]["w"])


def test_a_failure_is_printed_and_the_next_model_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(folder: Path, params: Any) -> None:
        write_orbax(folder, params)
        if folder.name == ".2.draft":
            raise OSError("No space left on device")

    with (
        exports_of(tmp_path, write) as exports,
        Checkpoints(tmp_path, keep=3, exports=exports) as checkpoints,
    ):
        for number in (2, 4):
            checkpoints.save(number, random_state(number), {}, {})
    assert exported(tmp_path) == {"4"}
    error = " ".join(capsys.readouterr().err.split())
    assert "The model of round 2 is not exported" in error and "No space left" in error
    assert f"fedpax export --job_log_dir={tmp_path} --round=2" in error


def test_a_checkpoint_that_cannot_be_saved_is_not_waited_for(tmp_path: Path) -> None:
    with exports_of(tmp_path, write_orbax) as exports:
        exports.start(2)
    assert not (tmp_path / "exports").exists()


KILLED = """
import os, runpy, signal
from fedpax.models import huggingface
save = huggingface.save

def save_and_die(folder, *arguments, **options):
    save(folder, *arguments, **options)
    (folder / "config.json").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

huggingface.save = save_and_die
runpy.run_module("fedpax", run_name="__main__")
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_exports_leaves_only_whole_models(tmp_path: Path) -> None:
    fields = (
        "--model.scale_embeddings=False --model.num_layers=1 --model.embed_dim=32 --mesh.fsdp=1 "
        "--model.mlp_dim=64 --data.batch_size=2 --data.local_steps=2 --data.heldout_tokens=1024 "
        "--training.rounds=5 --training.evaluate_every=0 --training.checkpoint_every=3 "
        "--training.keep_checkpoints=1 --training.export_every=2"
    ).split()
    arguments = ["train", "--exp=pretrain_text", f"--job_log_dir={tmp_path}", *fields]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def run(*start: str) -> int:
        return subprocess.run([sys.executable, *start, *arguments], env=environment).returncode

    assert run("-c", KILLED) == -signal.SIGKILL
    assert exported(tmp_path) == {".2.draft"}
    assert 2 in complete_rounds(tmp_path / "checkpoints")
    assert run("-m", "fedpax") == 0
    assert exported(tmp_path) == {"2", "4", "5"}
    for number in (4, 5):  # the checkpoints that are left
        config, params = huggingface.load(tmp_path / "exports" / f"{number}")
        assert config.num_layers == 1
        expected = load_params(tmp_path, number)
        np.testing.assert_array_equal(params["embedding"], expected["embedding"])
