"""The training process of a supervisor."""

import signal
import subprocess
import sys
import time

import pytest

from fedpax.elastic.supervisor import TrainingProcess

# A training process that runs until its supervisor ends.
WATCHES = """
import time
from fedpax.elastic.supervisor import end_with_supervisor
end_with_supervisor()
print("watches", flush=True)
time.sleep(600)
"""


def wait(process: TrainingProcess) -> int:
    deadline = time.monotonic() + 60
    while (status := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return status


def test_a_training_process_has_its_arguments_and_variables(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process = TrainingProcess(["--help"], {})
    assert wait(process) == 0 and "fedpax train" in capfd.readouterr().out
    process.signal(signal.SIGTERM)  # it has ended
    process.close()
    process = TrainingProcess(["--help"], {"PYTHONHOME": "/no/such/folder"})
    assert wait(process) == 1  # Python finds no library there
    process.close()


def test_a_signal_ends_a_training_process() -> None:
    process = TrainingProcess(["--exp=fedavg_digits"], {})
    process.signal(signal.SIGKILL)
    assert wait(process) == 128 + signal.SIGKILL
    process.close()


def test_a_training_process_ends_with_its_supervisor() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"watches\n"
        assert process.poll() is None
        process.stdin.close()  # as the system does when the supervisor is killed
        assert process.wait(20) == -signal.SIGKILL
