import signal
import subprocess
import sys
import threading
import time

import pytest

from fedpax.training.preemption import Interruption, run_process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noticed_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with Interruption() as interruption:
        assert not interruption.reached(0) and interruption.signal is None
        signal.raise_signal(number)
        assert interruption.reached(1) and interruption.signal == number
    assert before == {n: signal.getsignal(n) for n in before}


def test_a_second_ctrl_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interruption():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body() -> None:
        with Interruption() as interruption:
            seen.append((signal.getsignal(signal.SIGTERM) == before, interruption.reached(0)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


def test_the_status_of_a_process() -> None:
    def status(code: str) -> int:
        return run_process([sys.executable, "-c", code])

    assert status("raise SystemExit(7)") == 7
    assert status("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == 128 + 9


def test_sigterm_is_passed_on_and_ctrl_c_is_not() -> None:
    child = "import signal, time; signal.signal(15, lambda *a: exit(5)); print(1); time.sleep(60)"
    parent = (
        "import sys; from fedpax.training.preemption import run_process;"
        f"sys.exit(run_process([sys.executable, '-uc', {child!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child is ready
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 5
