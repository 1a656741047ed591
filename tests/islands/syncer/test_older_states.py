"""Tests of a syncer's folder that holds an older state than the run, or none."""

import contextlib
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from islands.syncer.stored_merges import FRAGMENTS, Model, begin, load, manifest, merge

from fedpax.errors import ConfigurationError, DamagedStateError
from fedpax.islands.syncer import syncer_store as journal_module
from fedpax.islands.syncer.island_table import IslandReport
from fedpax.islands.syncer.logs import read_merges
from fedpax.islands.syncer.syncer_store import SyncerStore

Files = dict[Path, bytes]


def read_files(folder: Path) -> Files:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def write_files(folder: Path, files: Files) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def table(*names: str) -> bytes:
    """Return the content of `islands.json`."""
    islands = [IslandReport(name, "training", 0, 0, None, 0, 0, 0, 0.0) for name in names]
    return json.dumps([island._asdict() for island in islands]).encode()


@functools.cache
def history() -> tuple[list[Files], list[Files]]:
    """Return the files after each of four rounds of merges, and after a join that follows it."""
    merged, joined = [], []
    with tempfile.TemporaryDirectory() as name:
        store = begin(Path(name), 0)
        for number in range(1, 4 * FRAGMENTS + 1):
            merge(store, number)
            merged.append(read_files(Path(name)))
            store.save_manifest(manifest(number) | {"islands": {"a": [], "b": [number]}})
            joined.append(read_files(Path(name)) | {Path("islands.json"): table("a", "b")})
        store.close()
    return merged, joined


@given(merges=st.integers(1, 4 * FRAGMENTS), joins=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_older_state_is_never_loaded_silently(
    merges: int, joins: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, history()[joins][merges - 1])
        want = SyncerStore(folder).load(Model())
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files))
        action = data.draw(st.sampled_from(["delete", "cut", "rename", "swap", "replace", "old"]))
        if action == "delete":
            path.unlink()
        elif action == "cut":
            ends = (
                [0, 8, *(record.end for record in journal_module.read_journal(path))]
                if (path.suffix == ".journal")
                else [0]
            )
            size = path.stat().st_size
            os.truncate(path, data.draw(st.sampled_from(ends) | st.integers(0, size - 1)))
        elif action == "rename":
            other = data.draw(st.sampled_from(["a", "round_000000000.journal", "merges.jsonl"]))
            path.rename(path.with_name(other))
        elif action in ("swap", "replace"):
            other = data.draw(st.sampled_from([each for each in files if each != path]))
            content = path.read_bytes()
            if action == "swap":
                path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        else:
            joined = joins and data.draw(st.booleans())
            old = history()[joined][data.draw(st.integers(0, merges - 1))]
            path = data.draw(st.sampled_from(sorted(old)))
            write_files(folder, {path: old[path]})
        with contextlib.suppress(DamagedStateError, ConfigurationError):
            loaded = SyncerStore(folder).load(Model())
            assert loaded is not None and loaded["merges"] == merges, (action, path)
            assert loaded == want, (action, path)


def test_a_lost_state_is_named(tmp_path: Path) -> None:
    begin(tmp_path, 2).close()
    copy = tmp_path / "copy"
    shutil.move(tmp_path / "syncer", copy)
    with pytest.raises(DamagedStateError, match=r"holds merge 2 in merges.jsonl, but no state"):
        SyncerStore(tmp_path).load(Model())
    (tmp_path / "merges.jsonl").unlink()
    SyncerStore(tmp_path).check_presence()  # a new folder
    (tmp_path / "islands.json").write_bytes(table("paris"))
    with pytest.raises(DamagedStateError, match=r"holds the islands paris, .* Restore .* or start"):
        SyncerStore(tmp_path).check_presence()
    shutil.move(copy, tmp_path / "syncer")
    with pytest.raises(DamagedStateError, match=r"islands.json names island paris, expected the"):
        load(tmp_path)
    (tmp_path / "islands.json").write_bytes(table("a"))
    assert load(tmp_path) == 2


def test_an_older_state_is_restored_on_request_alone(tmp_path: Path) -> None:
    store = begin(tmp_path, 4)
    shutil.copytree(tmp_path / "syncer", tmp_path / "copy")
    merge(store, 5)
    store.close()
    shutil.copytree(tmp_path / "syncer", tmp_path / "newest")
    shutil.rmtree(tmp_path / "syncer")
    shutil.move(tmp_path / "copy", tmp_path / "syncer")
    with pytest.raises(DamagedStateError, match=r"after merge 4, .* merge 5, .*--allow_older"):
        load(tmp_path)
    store = SyncerStore(tmp_path, allow_older=True)
    assert store.load(Model()) == manifest(4)
    assert [line["merge"] for line in read_merges(tmp_path)] == [1, 2, 3, 4]
    merge(store, 5)  # another one
    store.close()
    assert load(tmp_path) == 5
    shutil.rmtree(tmp_path / "syncer")
    shutil.move(tmp_path / "newest", tmp_path / "syncer")
    with pytest.raises(DamagedStateError, match=r"tells of another merge 5 .* one history"):
        load(tmp_path)
