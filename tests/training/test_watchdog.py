import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedpax.errors import ArgumentError
from fedpax.run_files.goodput import GoodputClock
from fedpax.training.diagnostics import (
    HANG_STATUS,
    Profile,
    Watchdog,
    check_profile_at,
    parse_profile_at,
)

SECONDS = 0.2


def reports(folder: Path) -> list[Path]:
    return sorted(folder.glob("hang_round_*.txt"))


def wait_for(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stopped_round(event: threading.Event) -> None:
    event.wait()


def test_a_stopped_round_is_reported_with_the_stacks_of_all_threads(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    event = threading.Event()
    thread = threading.Thread(target=stopped_round, args=[event])
    thread.start()
    clock = GoodputClock(tmp_path, enabled=False)
    with Watchdog(clock, tmp_path, lambda: 7, hang_after=SECONDS):
        clock.enter("step")
        wait_for(lambda: reports(tmp_path))
        wait_for(lambda: "stopped_round" in reports(tmp_path)[0].read_text())
    event.set()
    thread.join()
    (path,) = reports(tmp_path)
    assert path.name == "hang_round_7.txt"
    text = path.read_text()
    assert "in round 7 while waiting for the devices (for the first time)" in text
    assert "test_a_stopped_round" in text and "Thread 0x" in text
    errors = capfd.readouterr().err
    assert errors.startswith("fedpax: hang: no progress for 0.")
    assert "Still waiting." in errors and "stopped_round" in errors


class Time:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("bucket", ["evaluate", "compile", "save"])
def test_a_slow_evaluation_is_no_hang_but_a_hanging_one_is(tmp_path: Path, bucket: str) -> None:
    time_now = Time()
    clock = GoodputClock(tmp_path, enabled=False, now=time_now)
    with Watchdog(clock, tmp_path, lambda: 1, hang_after=0.01):
        clock.enter(bucket)
        time_now.now = 0.099  # nearly ten times the limit of a round
        time.sleep(0.05)
        assert not reports(tmp_path)
        time_now.now = 0.101
        wait_for(lambda: reports(tmp_path))


def test_rounds_that_are_all_slow_are_no_hang(tmp_path: Path) -> None:
    time_now = Time()
    clock = GoodputClock(tmp_path, enabled=False, now=time_now)
    watchdog = Watchdog(clock, tmp_path, lambda: 1, hang_after=0.01)
    assert (watchdog.limit("step"), watchdog.limit("save")) == (0.01, 0.1)
    clock.enter("step")
    time_now.now += 2
    clock.enter("input")
    assert (watchdog.limit("step"), watchdog.limit("input")) == (8, 0.01)
    with watchdog:
        clock.enter("step")
        time_now.now += 7.9
        time.sleep(0.05)
        assert not reports(tmp_path)
        time_now.now += 0.2
        wait_for(lambda: reports(tmp_path))
        assert "(before, at most 2.0 s)" in reports(tmp_path)[0].read_text()


def test_a_hang_is_reported_again_when_twice_the_time_has_passed(tmp_path: Path) -> None:
    time_now = Time()
    clock = GoodputClock(tmp_path, enabled=False, now=time_now)
    with Watchdog(clock, tmp_path, lambda: 1, hang_after=0.01):
        clock.enter("step")
        for count, now in enumerate((0.011, 0.021, 0.041), start=1):
            time_now.now = now
            wait_for(
                lambda count=count: (
                    reports(tmp_path)
                    and reports(tmp_path)[0].read_text().count("no progress") == count
                )
            )


def test_without_a_limit_nothing_is_watched(tmp_path: Path) -> None:
    before = threading.active_count()
    with Watchdog(GoodputClock(tmp_path, enabled=False), tmp_path, lambda: 1, hang_after=None):
        assert threading.active_count() == before


def test_a_hang_ends_the_process_if_it_shall(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from fedpax.run_files.goodput import GoodputClock
from fedpax.training.diagnostics import Watchdog
folder = Path(sys.argv[1])
clock = GoodputClock(folder)
with Watchdog(clock, folder, lambda: 3, hang_after=0.1, on_hang="exit"):
    clock.enter("input")
    time.sleep(600)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == HANG_STATUS
    assert "in round 3 while waiting for its cohort" in done.stderr and "Exiting." in done.stderr
    assert (tmp_path / "goodput.json").exists() and len(reports(tmp_path)) == 1


def test_rounds_are_profiled(tmp_path: Path) -> None:
    lines: list[str] = []
    with Profile("2:1", tmp_path, lines.append) as profile:
        for number in (1, 2, 3):
            profile.before(number, wait=lambda: None)
            profile.after(number, wait=lambda: None)
    assert lines[-1].startswith("profile of rounds 2 to 2 in ")
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


def test_rounds_to_profile_are_read_and_checked() -> None:
    assert (parse_profile_at("50"), parse_profile_at("50:3")) == ((50, 1), (50, 3))
    check_profile_at("50:3", rounds=50)
    with pytest.raises(ArgumentError, match=r"='50:3' begins at round 50, but .*_at=12, or more"):
        check_profile_at("50:3", rounds=12)
