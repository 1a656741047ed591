"""A process that is killed at random moments ends with the parameters of an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpax.checkpoints.saved_state import load_params
from fedpax.main import main
from fedpax.run_files.configuration import read_configuration_json
from fedpax.run_files.metrics import TIMINGS, read_metrics
from fedpax.run_files.paths import METRICS, latest_round

HERE = Path(__file__).parent.parent
SETTINGS = [
    "--training.rounds=24",
    "--training.checkpoint_every=2",
    "--training.evaluate_every=3",
    "--pause=0.03",
]


def train_command(folder: Path) -> list[str]:
    return ["train", "--exp=small_regression:regression", f"--job_log_dir={folder}", *SETTINGS]


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fedpax.main", *train_command(folder)],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train_here(folder: Path) -> int:
    """Train in this process, which has imported what a new one would import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        return main(train_command(folder))


def finish(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    status = train_here(folder)
    output, errors = capsys.readouterr()
    assert status == 0, errors
    assert "24 of 24 rounds" in output


def size(folder: Path) -> int:
    path = folder / METRICS
    return path.stat().st_size if path.exists() else 0


def unfinished(folder: Path) -> set[str]:
    checkpoints = folder / "checkpoints"
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    return {name for name in names if not name.isdigit()}


def when_started(rng: random.Random, folder: Path) -> Callable[[], bool]:
    """Wait for a random time, from the first instruction to the first rounds."""
    moment = time.monotonic() + rng.uniform(0.0, 8.0)
    return lambda: time.monotonic() > moment


def when_training(rng: random.Random, folder: Path) -> Callable[[], bool]:
    """Wait until the metrics have grown by some bytes, so between or within rounds."""
    least = size(folder) + rng.randint(1, 2000)
    return lambda: size(folder) > least


def when_saving(rng: random.Random, folder: Path) -> Callable[[], bool]:
    """Wait until a new checkpoint is half written."""
    before, delay = unfinished(folder), rng.uniform(0.0, 0.02)

    def now() -> bool:
        if not unfinished(folder) - before:
            return False
        time.sleep(delay)
        return True

    return now


def stop(folder: Path, moment: Callable[[], bool], number: signal.Signals) -> int:
    """Start the command, send a signal at a given moment, and return the exit status.

    The process may end before the moment, or not handle the signal yet; it must not fail.
    """
    with start(folder) as process:
        while process.poll() is None and not moment():
            time.sleep(0.001)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode in (0, -number, 128 + number), errors
    return process.returncode


def assert_same_run(one: Path, other: Path) -> None:
    assert latest_round(one) == latest_round(other) == 24
    params, expected = load_params(one), load_params(other)
    assert {k: v.tobytes() for k, v in params.items()} == {
        k: v.tobytes() for k, v in expected.items()
    }
    lines = [
        [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(folder)]
        for folder in (one, other)
    ]
    assert lines[0] == lines[1]
    assert read_configuration_json(one) == read_configuration_json(other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train_here(folder) == 0
    return folder


def test_stopped_runs_end_bitwise_as_an_uninterrupted_one(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # pytest shows it if the test fails
    rng = random.Random(seed)
    stop(tmp_path, when_saving(rng, tmp_path), signal.SIGKILL)  # after about two rounds
    finish(tmp_path, capsys)
    assert_same_run(uninterrupted, tmp_path)


@pytest.mark.slow
def test_a_signal_saves_after_the_current_round(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)
    assert stop(tmp_path, when_training(rng, tmp_path), signal.SIGTERM) == 128 + signal.SIGTERM
    saved = latest_round(tmp_path)
    assert saved is not None and saved == read_metrics(tmp_path)[-1]["round"] < 24
    finish(tmp_path, capsys)
    assert_same_run(uninterrupted, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_kills(
    uninterrupted: Path, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        moment = rng.choice([when_started, when_saving, when_training])
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        stop(tmp_path, moment(rng, tmp_path), number)
    finish(tmp_path, capsys)
    assert_same_run(uninterrupted, tmp_path)
