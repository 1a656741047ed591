"""Tests of the checkpoints that a run keeps and deletes."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from random_states import random_state

from fedpax.checkpoints import checkpoint
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.orbax_files import Retention
from fedpax.checkpoints.saved_state import load_params
from fedpax.run_files.paths import complete_rounds, latest_round


def test_the_newest_checkpoints_are_kept(tmp_path: Path, sharding: NamedSharding) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for number in (2, 5, 11):
            checkpoints.save(number, random_state(number, sharding), {}, {})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"5", "11"}
    assert latest_round(tmp_path) == 11
    assert float(load_params(tmp_path)["layers"][1]) == 11.0
    assert float(load_params(tmp_path, 5)["layers"][1]) == 5.0


@pytest.mark.parametrize("kept_file", ["checksums.json", "_CHECKPOINT_METADATA"])
def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_half_of_it(
    tmp_path: Path, sharding: NamedSharding, monkeypatch: pytest.MonkeyPatch, kept_file: str
) -> None:
    folder = tmp_path / "checkpoints"
    state = random_state(1, sharding)
    with monkeypatch.context() as patch:  # a kill before any file is removed
        patch.setattr(checkpoint, "remove_deleted", lambda folder: None)
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            for number in (2, 5):
                checkpoints.save(number, state, {}, {})
    (deleted,) = (folder / "deleted").iterdir()
    for path in deleted.iterdir():  # and one between two files
        if path.name != kept_file:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert complete_rounds(folder) == [5]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert [path.name for path in folder.iterdir()] == ["5"]
        for _ in range(2):  # the same round is deleted twice
            checkpoints.save(6, state, {}, {})
            checkpoints.wait()
            checkpoints.delete_after(0)
        checkpoints.save(7, state, {}, {})
    assert [path.name for path in folder.iterdir()] == ["7"]
    assert not [path for path in tmp_path.iterdir() if path != folder]


def test_every_nth_checkpoint_is_kept_beside_the_newest_also_after_a_restart(
    tmp_path: Path, sharding: NamedSharding
) -> None:
    state = random_state(1, sharding)
    for rounds in ((3, 4, 5, 8, 9), (10, 11, 12, 13)):
        with Checkpoints(tmp_path, keep=Retention(2, every=4)) as checkpoints:
            for number in rounds:
                checkpoints.save(number, state, {}, {})
    assert complete_rounds(tmp_path / "checkpoints") == [4, 8, 12, 13]


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.integers(1, 5),
    st.integers(0, 7),
    st.lists(st.integers(0, 7), max_size=2),
)
def test_the_checkpoints_that_a_run_needs_are_kept(
    rounds: set[int], newest: int, every: int, scheduled: list[int]
) -> None:
    ordered = sorted(rounds)
    kept = Retention(newest, every, tuple(scheduled)).keeps(ordered, 0, {})
    result = {number for number, keeps in zip(ordered, kept, strict=True) if keeps}
    for period in scheduled:
        assert result >= set([n for n in ordered if period and n % period == 0][-1:])
    assert result >= set(ordered[-newest:])
    assert result >= {number for number in ordered if every and number % every == 0}
    spare = {number for number in result if not (every and number % every == 0)}
    assert len(spare) <= newest + len(scheduled)
