"""Tests of files of lines that are read in pieces and copied in parts."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedpax.run_files import line_files
from fedpax.run_files.line_files import (
    PARTS_MERGED,
    LineCopy,
    name_lines,
    part_starts,
    read_chunks,
    read_json_lines,
    read_lines,
    read_ranges,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "CHUNK_BYTES", 7)
    monkeypatch.setattr(line_files, "PART_BYTES", 10)


def content(path: Path) -> bytes:
    return b"".join(read_chunks(path))


@given(size=st.integers(0, 10**12))
def test_parts_are_few_and_keep_their_place_as_the_file_grows(size: int) -> None:
    starts = part_starts(size)
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert len(starts) <= PARTS_MERGED * 20
    lengths = [end - start for start, end in pairwise([*starts, size])]
    assert all(length > 0 for length in lengths[1:])
    assert sorted(lengths[:-1], reverse=True) == lengths[:-1]


def test_each_byte_is_written_a_logarithmic_number_of_times() -> None:
    rounds, step, written = 4000, line_files.PART_BYTES // 2, 0
    before: dict[int, int] = {}
    for size in range(0, rounds * step, step):
        starts = part_starts(size)
        parts = dict(zip(starts, [*starts[1:], size], strict=True))
        written += sum(end - start for start, end in parts.items() if before.get(start) != end)
        before = parts
    assert written < 6 * size  # a copy of the whole file each time: 2000 times its size


@settings(max_examples=15, deadline=None)
@example(seed=61)  # the last part had one byte, equal by chance
@given(seed=st.integers(0, 2**32 - 1))
def test_a_copy_equals_the_file_after_growth_cuts_and_restarts(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, generator = tmp_path_factory.mktemp("copy"), random.Random(seed)
    source, target = folder / "a", folder / "there" / "a"
    target.parent.mkdir()
    copy, text = LineCopy(source, target, folder / ".copied"), b""
    for _ in range(20):
        for _ in range(generator.randrange(3)):  # shortened, and grown again to any size
            text = text[: generator.randint(0, len(text))]
            text += generator.randbytes(generator.choice([0, 1, 3, 30, 200]))
        source.write_bytes(text)
        if generator.random() < 0.3:
            copy = LineCopy(source, target, folder / ".copied")  # of another process
        copy.update()
        assert content(target) == content(source) == text
    assert len(list(target.parent.iterdir())) == len(part_starts(len(text)))


def test_unchanged_parts_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, record = tmp_path / "a", tmp_path / "there" / "a", tmp_path / ".copied"
    source.write_bytes(b"0123456789" * 3)
    target.parent.mkdir()
    LineCopy(source, target, record).update()
    written: list[int] = []
    write = LineCopy._write
    monkeypatch.setattr(
        LineCopy,
        "_write",
        lambda self, start, text: (written.append(start), write(self, start, text)),
    )
    copy = LineCopy(source, target, record)  # of the next process
    copy.update()
    assert written == []
    with source.open("ab") as file:
        file.write(b"abc")
    copy.update()
    assert written == [30] and content(target) == source.read_bytes()


def test_parts_that_a_kill_has_left_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2\n3\n")
    (tmp_path / "a.2").write_bytes(b"2\n")  # merged into the part at 0
    (tmp_path / "a.6").write_bytes(b"4\n5")
    (tmp_path / "a.99").write_bytes(b"9\n")
    assert list(read_lines(tmp_path / "a")) == [b"1", b"2", b"3", b"4"]


# Hypothesis draws texts from the code too, such as the beginning of a pointer, which is refused.
TEXTS = st.binary(max_size=60).filter(lambda text: not text.startswith(b"version https://git-lfs"))


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_pieces_and_ranges_of_a_file(
    text: bytes, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "a"
    path.write_bytes(text)
    assert content(path) == text and all(len(chunk) <= 7 for chunk in read_chunks(path))
    assert list(read_lines(path)) == text.split(b"\n")[:-1]
    for start in cuts:
        assert b"".join(read_chunks(path, start)) == text[start:]
    ranges = list(pairwise(sorted(min(cut, len(text)) for cut in cuts)))
    parts = b"".join(text[start:end] for start, end in ranges)
    assert b"".join(read_ranges(path, ranges)) == parts


def test_undamaged_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\nrou\n{"round": 3}\n{"rou')
    lines, damaged = read_json_lines(path, lambda value: isinstance(value, dict), "objects.")
    assert (lines, damaged) == ([{"round": 1}, {"round": 3}], [2])
    assert (name_lines([8]), name_lines([8, 9])) == ("line 8", "lines 8, 9")
