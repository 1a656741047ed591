"""Tests that long metrics are read in one pass, as every line of a short file is."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.run_files import line_files, metrics_log
from fedpax.run_files.metrics import MetricsWriter, describe_damage, read_metrics, select
from fedpax.run_files.metrics_log import (
    LastLines,
    SpreadLines,
    all_lines,
    last_line,
    last_rounds,
    read_log,
    read_sums,
    spread_rounds,
)
from fedpax.run_files.paths import METRICS


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "CHUNK_BYTES", 90)  # about two lines


def write(folder: Path, first: int, last: int, *, after: int = 0, sync_every: int = 3) -> None:
    with MetricsWriter(folder, after=after) as metrics:
        metrics.write_sizes(3, 1, "tokens", 8)
        for number in range(first, last + 1):
            metrics.write("training", number, {"loss": 1 / number})
            if number % 2 == 0:
                metrics.write("evaluation", number, {"loss": 2 / number})
            if number % sync_every == 0:
                metrics.sync()


def slow(folder: Path) -> list[dict[str, Any]]:
    """Read every line, as a reader that trusts no sum."""
    texts = (folder / METRICS).read_bytes().split(b"\n")[:-1]
    return [line for text in texts if (line := metrics_log._parse(text)) is not None]


@pytest.mark.parametrize("rounds", [1, 2, 9, 40])
def test_known_lines_are_those_that_a_slow_reader_finds(tmp_path: Path, rounds: int) -> None:
    write(tmp_path, 1, rounds)
    lines = slow(tmp_path)
    assert read_metrics(tmp_path) == lines
    for count in (1, 3, 100):
        log = read_log(tmp_path, lambda count=count: last_rounds(count))
        others = [line for line in lines if line["kind"] != "training"]
        kept = [*others, *select(lines, "training")[-count:]]
        assert log.lines == [line for line in lines if line in kept]
    assert last_line(tmp_path) == lines[-1]


def test_known_lines_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, 40)
    parsed: list[bytes] = []
    parse = metrics_log._parse
    monkeypatch.setattr(metrics_log, "_parse", lambda text: parsed.append(text) or parse(text))
    log = read_log(tmp_path, lambda: last_rounds(2))
    assert len(log.lines) == 1 + 2 + 20 and len(parsed) == 2  # round 40 was not synced


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_file_that_was_changed_is_read_line_by_line(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, generator = tmp_path_factory.mktemp("changed"), random.Random(seed)
    write(folder, 1, 20)
    content = bytearray((folder / METRICS).read_bytes())
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(content))
        match generator.randrange(3):
            case 0:
                content[at] = generator.randrange(256)
            case 1:
                del content[at : at + generator.randint(1, 80)]
            case _:
                content[at:at] = generator.randbytes(generator.randint(1, 80))
        if not content:
            break
    (folder / METRICS).write_bytes(content)
    assert read_metrics(folder) == slow(folder)


@settings(max_examples=15, deadline=None)
@given(last=st.integers(1, 30), after=st.integers(0, 30), every=st.integers(1, 7))
def test_a_resumed_file_equals_an_uninterrupted_one(
    last: int, after: int, every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    after = min(after, last)
    folder = tmp_path_factory.mktemp("resumed")
    write(folder / "whole", 1, 32, sync_every=every)
    write(folder / "resumed", 1, last, sync_every=every)
    write(folder / "resumed", after + 1, 32, after=after, sync_every=every)
    whole, resumed = ((folder / name / METRICS).read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    known = {(s.bytes, s.crc) for s in read_sums(folder / "whole")}
    assert known & {(s.bytes, s.crc) for s in read_sums(folder / "resumed")}


def test_a_roll_back_stays_when_its_rounds_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, 1, 7)
    with MetricsWriter(tmp_path, after=6) as metrics:
        metrics.write("training", 7, {"loss": 9.0})
        metrics.write("spike", 6, {"loss": 9.0, "cohorts_left_out": 1})
        metrics.sync()
    with MetricsWriter(tmp_path, after=6) as metrics:
        assert [line["kind"] for line in metrics.kept][-1] == "spike"
        metrics.write("training", 7, {"loss": 0.5})
        metrics.sync()
    lines = read_metrics(tmp_path)
    assert [(line["kind"], line["round"]) for line in lines[-3:]] == [
        ("evaluation", 6),
        ("spike", 6),
        ("training", 7),
    ]
    assert lines == slow(tmp_path)


def test_a_run_that_resumes_does_not_rewrite_its_file(tmp_path: Path) -> None:
    write(tmp_path, 1, 8)
    before = (tmp_path / METRICS).stat().st_ino
    with MetricsWriter(tmp_path, after=6):
        assert (tmp_path / METRICS).stat().st_ino == before
    assert read_metrics(tmp_path)[-1]["round"] == 6


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    least=st.integers(1, 20),
)
def test_choices_of_lines(counts: list[int], least: int) -> None:
    last, spread, number = LastLines(least), SpreadLines(least), 0
    for count in counts:
        numbers = list(range(number + 1, number + count + 1))
        for choice in (last, spread):
            choice.add(numbers, lambda i, numbers=numbers: numbers[i])
        number += count
    every = list(range(1, number + 1))
    assert [line for _, line in last.lines()] == every[-least:]
    chosen = list(dict(spread.lines()))
    assert min(least, number) <= len(chosen) <= 2 * least
    assert chosen[0] == 1 and chosen[-1] == number
    distances = {b - a for a, b in itertools.pairwise(chosen[:-1])}
    assert len(distances) <= 1


def test_a_long_run_is_spread_and_names_its_damage(tmp_path: Path) -> None:
    write(tmp_path, 1, 50, sync_every=50)
    with (tmp_path / METRICS).open("a") as file:
        file.write("damaged\n" + json.dumps({"kind": "training", "round": 51, "loss": 1.0}) + "\n")
    log = read_log(tmp_path, lambda: spread_rounds(5))
    training = select(log.lines, "training")
    assert 5 <= len(training) <= 11 and training[-1]["round"] == 51
    assert describe_damage(tmp_path, 51, log) == [
        f"{tmp_path / METRICS}: line 77 cannot be read and is left out."
    ]
    assert read_log(tmp_path, all_lines).damaged == [77]


def test_the_sum_of_a_file_counts_the_bytes_of_its_whole_lines(tmp_path: Path) -> None:
    write(tmp_path, 1, 3)
    path = tmp_path / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"damaged\n" + b"".join(lines[1:]))
    log = read_log(tmp_path, all_lines)
    assert log.damaged == [2]
    assert log.sum.bytes == sum(map(len, lines)) == sum(end - begin for begin, end in log.kept)


def test_damaged_sums_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, 1, 9)
    for text in ("", "[[1]]", '{"a": 1}', "[[100000, 0, 9]]", '[["a", "b", "c"]]'):
        (tmp_path / ".metrics_sums.json").write_text(text)
        assert read_metrics(tmp_path) == slow(tmp_path)
