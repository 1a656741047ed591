import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.run_files import goodput
from fedpax.run_files.goodput import (
    BUCKETS,
    GoodputClock,
    describe_goodput,
    line_values,
    read_goodput,
)
from fedpax.run_files.paths import GOODPUT, METRICS


class Time:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(clock: GoodputClock, time: Time, bucket: goodput.Bucket, seconds: float) -> None:
    clock.enter(bucket)
    time.now += seconds
    clock.enter("compile")


actions = st.lists(
    st.tuples(st.sampled_from(BUCKETS), st.floats(0, 1e4), st.sampled_from(["", "save", "lose"])),
    max_size=20,
)


@given(processes=st.lists(actions, max_size=4))
def test_buckets_add_up_to_the_wall_time_over_kills_and_roll_backs(
    tmp_path_factory: pytest.TempPathFactory, processes: list
) -> None:
    folder = tmp_path_factory.mktemp("run")
    wall, saved, number = 0.0, 0, 0
    for process in processes:
        time = Time()
        clock = GoodputClock(folder, after=saved, now=time)
        for bucket, seconds, event in process:
            spend(clock, time, bucket, seconds)
            number += 1
            if event == "save":
                saved = number
                clock.mark_checkpoint(saved)
            if event == "lose":
                clock.lose_since(saved)
            assert sum(clock.seconds().values()) == pytest.approx(wall + time.now)
            assert min(clock.seconds().values()) > -1e-6
        clock.write()
        wall += time.now
    content = read_goodput(folder)
    assert sum(content[0].values()) == pytest.approx(wall) if content else wall == 0


def test_a_killed_process_loses_the_time_since_its_checkpoint(tmp_path: Path) -> None:
    time = Time()
    clock = GoodputClock(tmp_path, now=time)
    time.now += 7
    clock.mark_checkpoint(0)
    spend(clock, time, "step", 100)
    spend(clock, time, "save", 2)
    clock.mark_checkpoint(10)
    spend(clock, time, "step", 50)
    spend(clock, time, "input", 5)
    spend(clock, time, "evaluate", 3)
    clock.mark_checkpoint(20)  # a checkpoint whose files the kill leaves unfinished
    clock.write()

    killed_while_compiling = GoodputClock(tmp_path, after=10, now=Time())
    expected = {"compile": 7, "step": 100, "save": 2, "lost": 58, "input": 0, "evaluate": 0}
    assert killed_while_compiling.seconds() == expected
    killed_while_compiling.now.now += 11
    killed_while_compiling.write()

    resumed = GoodputClock(tmp_path, after=10, now=Time())
    assert resumed.seconds() == expected | {"compile": 18}


def test_a_roll_back_loses_its_rounds_and_the_time_to_restore(tmp_path: Path) -> None:
    time = Time()
    clock = GoodputClock(tmp_path, now=time)
    clock.mark_checkpoint(0)
    spend(clock, time, "step", 10)
    clock.mark_checkpoint(5)
    spend(clock, time, "step", 4)
    clock.lose_since(5)
    time.now += 1.5
    clock.enter("step")
    seconds = clock.seconds()
    assert (seconds["step"], seconds["lost"]) == (10, 5.5)


def write_lines(folder: Path, *lines: Any) -> None:
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("content", [None, "", "[]", '{"seconds": {"step": 1}, "checkpoints": {}}'])
def test_without_its_file_the_clock_counts_what_the_metrics_have(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / GOODPUT).write_text(content)
    known = dict(zip(BUCKETS, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], strict=True))
    later = {"kind": "training", "round": 4, "wall_seconds": 99.0}
    write_lines(tmp_path, {"kind": "training", "round": 3, **line_values(known)}, later)
    assert GoodputClock(tmp_path, after=3, now=Time()).seconds() == known
    write_lines(tmp_path, {"kind": "training", "round": 3, "wall_seconds": 9.0}, later)
    earlier_version = GoodputClock(tmp_path, after=3, now=Time())
    assert earlier_version.seconds()["step"] == 9 == sum(earlier_version.seconds().values())


def test_the_file_is_written_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "SECONDS_BETWEEN_WRITES", 0.01)
    time = Time()
    with GoodputClock(tmp_path, now=time) as clock:
        clock.enter("step")
        time.now += 3
        while not (content := read_goodput(tmp_path)) or content[0]["step"] != 3:
            pass
    with GoodputClock(tmp_path / "none", enabled=False):
        pass
    assert not (tmp_path / "none").exists()


def test_a_run_refused_at_its_start_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError), GoodputClock(tmp_path):
        raise ValueError("the mesh does not divide the cohort")
    assert not any(tmp_path.iterdir())


def test_only_the_newest_checkpoints_are_remembered(tmp_path: Path) -> None:
    clock = GoodputClock(tmp_path, now=Time())
    for number in range(100):
        clock.mark_checkpoint(number)
    assert len(json.loads((tmp_path / GOODPUT).read_text())["checkpoints"]) < 20


def test_nothing_is_described_without_time() -> None:
    assert describe_goodput(dict.fromkeys(BUCKETS, 0.0)).startswith("goodput 0.0% of 0 s")
    assert not math.isnan(line_values(dict.fromkeys(BUCKETS, 0.0))["wall_seconds"])
