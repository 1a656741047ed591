"""The saved state of a syncer: laws of kills, damage and copies at any moment."""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given, settings
from islands.syncer.stored_merges import FRAGMENTS, Model, begin, load, manifest, merge, state

from fedpax.errors import ConfigurationError, DamagedStateError
from fedpax.islands.syncer import syncer_store
from fedpax.islands.syncer.logs import read_merges
from fedpax.islands.syncer.syncer_store import KEPT, SyncerStore


class KilledError(BaseException):
    """The end of a process: nothing that follows it is done."""


class Operations:
    """The file operations of a process that is killed after a number of them.

    A write that is the last operation is done in part.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, part: float) -> None:
        self.count, self.most, self.part = 0, most, part
        for name in ("open", "ftruncate", "lseek", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        for name in ("replace", "unlink", "mkdir"):
            monkeypatch.setattr(Path, name, self._counted(getattr(Path, name)))
        monkeypatch.setattr(os, "write", self._in_parts(os.write))
        monkeypatch.setattr(syncer_store, "append_merge", self._append_in_parts)

    def _is_last(self) -> bool:
        self.count += 1
        if self.count > self.most + 1:
            raise KilledError
        return self.count == self.most + 1

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if self._is_last():
                raise KilledError
            return operation(*arguments, **options)

        return run

    def _in_parts(self, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def run(file: int, content: Any) -> int:
            if not self._is_last():
                return write(file, content)
            if len(content) > 8:  # a process is not killed inside of a few bytes
                write(file, content[: int(len(content) * self.part)])
            raise KilledError

        return run

    def _append_in_parts(self, folder: Path, merge: dict[str, Any]) -> None:
        killed, line = self._is_last(), json.dumps(merge) + "\n"
        with (folder / "merges.jsonl").open("a") as file:
            file.write(line[: int(len(line) * self.part)] if killed else line)
        if killed:
            raise KilledError


def work(folder: Path, merges: int, done: list[int]) -> None:
    """Start, and do two merges; `done` gets each number that an island can learn of."""
    store = SyncerStore(folder)
    if store.load(Model()) is None:
        store.save_all(Model(), manifest(0))
    store.save_manifest(manifest(merges))
    for number in range(merges + 1, merges + 3):
        merge(store, number)
        done.append(number)
    store.close()


@pytest.mark.parametrize("merges", [0, 3 * FRAGMENTS - 1])
def test_a_kill_after_any_file_operation_leaves_the_newest_state(
    tmp_path: Path, merges: int
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    if merges:
        begin(begun, merges).close()
    for most in itertools.count():
        folder, done = tmp_path / str(most), [merges]
        shutil.copytree(begun, folder)
        with pytest.MonkeyPatch.context() as monkeypatch:
            Operations(monkeypatch, most, part=0.6 * (most % 2))
            with contextlib.suppress(KilledError):
                work(folder, merges, done)
        ended = done[-1] == merges + 2
        if not merges and SyncerStore(folder).load(Model()) is None:
            assert done == [0]  # it was killed before its first save
            continue
        loaded = load(folder)
        assert done[-1] <= loaded <= done[-1] + 1, most
        store = SyncerStore(folder)  # and it continues
        store.load(Model())
        merge(store, loaded + 1)
        store.close()
        assert load(folder) == loaded + 1
        assert [line["merge"] for line in read_merges(folder)] == list(range(1, loaded + 2))
        if ended:
            break
    assert most > 20


@given(merges=st.integers(2 * FRAGMENTS, 4 * FRAGMENTS), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_copy_made_during_the_run_is_a_state_of_the_run(merges: int, data: st.DataObject) -> None:
    """Files are copied in any order; less than a round is merged meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        store = begin(Path(name), merges)
        files = data.draw(st.permutations(sorted(Path(name, "syncer").iterdir())))
        moments = data.draw(
            st.lists(st.integers(0, len(files) - 1), max_size=FRAGMENTS - 1).map(sorted)
        )
        copy = Path(name, "copy")
        (copy / "syncer").mkdir(parents=True)
        number = merges
        for index, file in enumerate(files):
            for _ in range(moments.count(index)):
                number += 1
                merge(store, number)
            with contextlib.suppress(FileNotFoundError):
                content = file.read_bytes()
                if index == len(files) - 1 and len(moments) < FRAGMENTS - 1:
                    number += 1
                    merge(store, number)  # the file is read while a record is appended to it
                    grown = file.read_bytes()[len(content) :]
                    content += grown[: data.draw(st.integers(0, len(grown)))]
                (copy / "syncer" / file.name).write_bytes(content)
        store.close()
        assert merges - 1 <= load(copy) <= number


def test_a_merge_is_one_flush_and_a_round_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes: list[int] = []
    for name in ("fsync", "fdatasync"):
        flush = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, flush=flush: (flushes.append(file), flush(file)))
    store = begin(tmp_path, merges=FRAGMENTS)
    before, bytes_before = store.flushes, store.written_bytes
    flushes.clear()
    for number in range(FRAGMENTS + 1, 2 * FRAGMENTS + 1):
        merge(store, number)
    assert len(flushes) == store.flushes - before == FRAGMENTS + 1
    arrays = sum(x.nbytes for p in range(FRAGMENTS) for x in jax.tree.leaves(state(p, 2)[:3]))
    headers = 600 * FRAGMENTS
    assert arrays < store.written_bytes - bytes_before < arrays + headers
    assert len(list((tmp_path / "syncer").iterdir())) <= 1 + KEPT
    flushes.clear()
    store.save_manifest(manifest(2 * FRAGMENTS))
    assert len(flushes) == 1


def test_old_journals_are_deleted(tmp_path: Path) -> None:
    store = begin(tmp_path, merges=7 * FRAGMENTS + 1)
    names = sorted(path.name for path in (tmp_path / "syncer").iterdir())
    assert names == [f"round_{number:09}.journal" for number in (6, 7, 8)]
    store.close()
    (tmp_path / "syncer" / names[0]).unlink()  # kept for copies alone
    assert load(tmp_path) == 7 * FRAGMENTS + 1


def test_a_full_disk_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begin(tmp_path, merges=4)
    write = os.write

    def fail(file: int, content: bytes) -> int:
        write(file, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        merge(store, 5)
    monkeypatch.setattr(os, "write", write)
    merge(store, 5)  # there is room again
    merge(store, 6)
    store.close()
    assert load(tmp_path) == 6


@pytest.mark.parametrize("place", ["length", "header", "array", "file", "pipe"])
def test_damage_is_named(tmp_path: Path, place: str) -> None:
    begin(tmp_path, merges=2 * FRAGMENTS - 1).close()
    *old, newest = sorted((tmp_path / "syncer").glob("*.journal"))
    if place == "file":
        for path in old:
            path.unlink()
    elif place == "pipe":  # its reader would wait for ever
        newest.unlink()
        os.mkfifo(newest)
    else:
        content = bytearray(newest.read_bytes())
        content[{"length": 1, "header": 80, "array": len(content) - 5}[place]] ^= 1
        newest.write_bytes(content)
    with pytest.raises(DamagedStateError, match=r"Restore the folder .* from a copy"):
        load(tmp_path)


@pytest.mark.parametrize("damage", [b"\x00\xff\n", b"[1]\n", b"null\n", b'{"loss": 1}\n'])
def test_damaged_lines_of_the_log_are_left_out(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, merges=3).close()
    log = tmp_path / "merges.jsonl"
    first, *others = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([first, damage, *others]))
    assert load(tmp_path) == 3
    assert f"{log}: line 2 cannot be read" in capsys.readouterr().err
    assert [line["merge"] for line in read_merges(tmp_path)] == [1, 2, 3]


def test_a_log_without_older_merges_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, merges=5 * FRAGMENTS).close()
    (tmp_path / "merges.jsonl").unlink()
    assert load(tmp_path) == 5 * FRAGMENTS
    assert "merges.jsonl has 9 of 15 merges, expected all of them" in capsys.readouterr().err
    assert [line["merge"] for line in read_merges(tmp_path)] == list(range(7, 16))


def test_a_log_that_is_a_folder_is_named(tmp_path: Path) -> None:
    begin(tmp_path).close()
    (tmp_path / "merges.jsonl").mkdir()
    with pytest.raises(ConfigurationError, match=r"merges\.jsonl cannot be read .* Move it away"):
        load(tmp_path)


def test_another_model_is_named(tmp_path: Path) -> None:
    begin(tmp_path).close()
    model = Model()
    model.fragments[1] = state(2, 0)
    with pytest.raises(DamagedStateError, match="arrays of another model or outer optimizer"):
        SyncerStore(tmp_path).load(model)
