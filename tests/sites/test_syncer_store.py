"""The saved state of a syncer: laws of kills, damage and copies at any moment."""

import contextlib
import functools
import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from fedpax.sites import journal as journal_module
from fedpax.sites.merge_log import read_merges
from fedpax.sites.outer_model import FragmentState
from fedpax.sites.syncer_store import KEPT, DamagedStateError, SyncerStore
from fedpax.training.configuration import ConfigurationError

FRAGMENTS = 3


@functools.cache
def state(p: int, version: int) -> FragmentState:
    """Return random arrays of the types of fragment p, a function of its version."""
    rng = np.random.default_rng((p, version))
    params = {"w": rng.normal(size=(4, 1 + p)).astype(np.float32), "b": np.float32(version)}
    momentum = {
        name: rng.normal(size=np.shape(x)).astype(ml_dtypes.bfloat16) for name, x in params.items()
    }
    return FragmentState(
        jax.tree.map(np.asarray, params), (momentum, np.int32(version)), np.zeros((0, 2)), version
    )


def versions_after(merges: int) -> list[int]:
    return [(merges + FRAGMENTS - 1 - p) // FRAGMENTS for p in range(FRAGMENTS)]


def manifest(merges: int) -> dict[str, object]:
    return {"merges": merges, "versions": versions_after(merges), "islands": {"a": [merges]}}


class Model:
    """The fragments that a store reads and replaces."""

    def __init__(self) -> None:
        self.fragments = [state(p, 0) for p in range(FRAGMENTS)]

    def put(self, p: int, new: FragmentState) -> None:
        self.fragments[p] = new


def merge(store: SyncerStore, merges: int) -> None:
    """Save merge number `merges`, from 1."""
    p = (merges - 1) % FRAGMENTS
    store.log({"merge": merges, "fragment": p}, [])
    store.save(p, state(p, versions_after(merges)[p]), manifest(merges))


def begin(folder: Path, merges: int = 0) -> SyncerStore:
    store = SyncerStore(folder)
    store.save_all(Model(), manifest(0))
    for number in range(1, merges + 1):
        merge(store, number)
    return store


def load(folder: Path) -> int:
    """Restore the state, check it, and return the number of its merges."""
    model, store = Model(), SyncerStore(folder)
    found = store.load(model)
    assert found is not None and found == manifest(found["merges"])
    for p, version in enumerate(versions_after(found["merges"])):
        assert model.fragments[p].version == version
        jax.tree.map(np.testing.assert_array_equal, model.fragments[p], state(p, version))
        dtypes = [x.dtype for x in jax.tree.leaves(model.fragments[p][:3])]
        assert dtypes == [x.dtype for x in jax.tree.leaves(state(p, version)[:3])]
    store.close()
    return found["merges"]


@given(merges=st.integers(0, 3 * FRAGMENTS + 1), lost=st.integers(0, 4000))
@settings(max_examples=25, deadline=None)
def test_a_kill_at_any_byte_leaves_the_state_of_the_merge_before(merges: int, lost: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        begin(Path(name), merges).close()
        newest = max(Path(name, "syncer").glob("*.journal"))
        sizes = [end for _, end in journal_module.read_journal(newest)]
        size = newest.stat().st_size
        kept = size - lost % size if merges else size  # the first file is renamed when complete
        os.truncate(newest, kept)
        complete = sum(end <= kept for end in sizes)
        want = merges - (len(sizes) - complete) if merges else 0
        assert load(Path(name)) == want
        store = SyncerStore(Path(name))  # and it continues
        store.load(Model())
        for number in range(want + 1, want + FRAGMENTS + 2):
            merge(store, number)
        store.close()
        assert load(Path(name)) == want + FRAGMENTS + 1


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
                cut = len(content) - data.draw(st.integers(0, 20)) * (file == max(files))
                (copy / "syncer" / file.name).write_bytes(content[:cut])
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


@pytest.mark.parametrize("place", ["length", "header", "array", "file"])
def test_damage_is_named(tmp_path: Path, place: str) -> None:
    begin(tmp_path, merges=2 * FRAGMENTS - 1).close()
    *old, newest = sorted((tmp_path / "syncer").glob("*.journal"))
    if place == "file":
        for path in old:
            path.unlink()
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
