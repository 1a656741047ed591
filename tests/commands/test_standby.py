"""A training process that is prepared before it is needed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedpax.commands.standby import READY, Standby


def test_a_standby_waits_trains_and_ends(tmp_path: Path) -> None:
    arguments = ["--exp=fedavg_digits", f"--job_log_dir={tmp_path}", "--noelastic"]
    standby = Standby(arguments)
    assert not standby.is_ready(0.0)  # imports take longer
    assert standby.is_ready(120.0) and standby.is_ready(0.0)
    assert standby.process.poll() is None
    child = standby.train(["--training.rounds=0"], {"JAX_PLATFORMS": "cpu"})
    assert child.wait(60) == 2  # the experiment refuses the argument
    ended = Standby(arguments)
    os.kill(ended.process.pid, signal.SIGKILL)
    assert ended.is_ready(20.0)  # an end is not waited for
    assert ended.train([], {}).wait(20) == -signal.SIGKILL
    ended.close()


@pytest.mark.slow
def test_a_standby_ends_with_its_supervisor(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fedpax",
            "train",
            "--exp=fedavg_digits",
            f"--job_log_dir={tmp_path}",
        ],
        stdin=subprocess.PIPE,
        env=os.environ | {READY: str(writer)},
        pass_fds=(writer,),
    )
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
