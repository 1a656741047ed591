import signal
import subprocess
import sys
import threading
import time

import pytest

from fedpax.preemption import PreemptionGuard, run_subprocess


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noticed_acknowledged_and_the_handlers_are_restored(
    number: signal.Signals, capsys: pytest.CaptureFixture
) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with PreemptionGuard() as preemption:
        assert not preemption.should_stop(0) and preemption.signal is None
        signal.raise_signal(number)
        assert preemption.should_stop(1) and preemption.signal == number
    assert (
        f"{number.name}: stopping after the current round, then saving." in capsys.readouterr().err
    )
    assert before == {n: signal.getsignal(n) for n in before}


def test_a_second_ctrl_c_raises(capsys: pytest.CaptureFixture) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), PreemptionGuard():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
    assert "SIGINT: stopping without saving." in capsys.readouterr().err.splitlines()[1]


def test_outside_the_main_thread_no_handler_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body() -> None:
        with PreemptionGuard() as preemption:
            seen.append((signal.getsignal(signal.SIGTERM) == before, preemption.should_stop(0)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


def test_the_status_of_a_subprocess() -> None:
    def status(code: str) -> int:
        return run_subprocess([sys.executable, "-c", code])

    assert status("raise SystemExit(7)") == 7
    assert status("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == 128 + 9


@pytest.mark.parametrize(
    ("numbers", "status"),
    [([signal.SIGTERM], 143), ([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130)],
)
def test_signals_to_this_process_alone_reach_the_subprocess_once_as_sigterm(
    numbers: list[signal.Signals], status: int
) -> None:
    child = """
import signal, sys, time
count = 0
def stop(number, frame):
    global count
    count += 1
signal.signal(signal.SIGTERM, stop)
print("ready")
while not count:
    time.sleep(0.01)
time.sleep(0.1)
sys.exit(143 if count == 1 else 1)
"""
    parent = (
        "import sys; from fedpax.preemption import run_subprocess;"
        f"sys.exit(run_subprocess([sys.executable, '-uc', {child!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child is ready
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.02)
        assert process.wait(timeout=30) == status


def test_sigterm_after_ctrl_c_changes_nothing(capsys: pytest.CaptureFixture) -> None:
    """A terminal sends Ctrl-C to `fedpax compare` and its subprocess, and compare forwards it."""
    with PreemptionGuard() as preemption:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.should_stop(1) and preemption.signal == signal.SIGINT
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_acknowledged_while_compiled_code_runs(number: signal.Signals) -> None:
    """Python runs no handler of the main thread until the matrix product is done."""
    child = """
import sys, time
import numpy as np
from fedpax.preemption import exit_on_signals
x = np.ones((3000, 3000))
with exit_on_signals():
    print("ready", flush=True)
    for _ in range(1000):
        x @ x
"""
    command = [sys.executable, "-c", child]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors == f"fedpax: {number.name}: stopped; there was nothing to save.\n"
