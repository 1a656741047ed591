"""A run that resumes from the copies of an elastic job, in one process."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import pytest
from small_islands import Islands, islands

from fedpax.checkpoints import load_params
from fedpax.elastic.host_copies import list_copies
from fedpax.elastic.supervisor import Membership
from fedpax.parallel.mesh import MeshConfig
from fedpax.run_files.metrics import TIMINGS, read_metrics, select
from fedpax.training.round_loop import RoundLoop
from fedpax.training.spikes import Spike, SpikeHistory
from fedpax.training.trainer import train


def member(
    folder: Path,
    round_number: int | None = None,
    *,
    every: int = 1,
    numbers: list[int] | None = None,
) -> Membership:
    text = Membership(str(folder / "memory"), "a1", every, round_number, numbers).to_json()
    return Membership.from_json(text)


def of_rounds(rounds: int, count: int = 3) -> Islands:
    base = islands()
    training = dataclasses.replace(base.training, rounds=rounds, checkpoint_every=4)
    return dataclasses.replace(
        base, islands=count, mesh=MeshConfig(islands=count), training=training
    )


def kill_after(folder: Path, rounds: int, numbers: list[int]) -> None:
    """Train some rounds, and leave the folder as a process does that is killed then."""
    more = of_rounds(rounds)
    train(more, folder, membership=member(folder, numbers=numbers))
    shutil.rmtree(folder / "checkpoints" / str(rounds))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(of_rounds(9), folder)
    return folder


def test_a_killed_run_resumes_from_its_copies(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture
) -> None:
    kill_after(tmp_path, 6, [0, 1, 2])
    assert list_copies(tmp_path / "memory") in (["a1-5", "a1-6"], ["a1-6", "a1-5"])
    result = train(
        of_rounds(9),
        tmp_path,
        allow_config_change=["training"],
        membership=member(tmp_path, 6, numbers=[0, 1, 2]),
    )
    assert result.rounds_trained == 3 and "resuming from round 6" in capsys.readouterr().err
    chex.assert_trees_all_equal(load_params(tmp_path), load_params(undisturbed))
    lines = [
        [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(folder)]
        for folder in (tmp_path, undisturbed)
    ]
    assert select(lines[0], "training") == select(lines[1], "training")


def test_an_island_is_lost_and_returns(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    kill_after(tmp_path, 6, [0, 1, 2])
    result = train(
        of_rounds(8, 2),
        tmp_path,
        allow_config_change=["training", "mesh", "islands"],
        membership=member(tmp_path, 6, numbers=[0, 2]),
    )
    assert result.rounds_trained == 2
    # The checkpoint of round 8 has islands 0 and 2; island 1 has its copy of round 6.
    folder = tmp_path / "checkpoints" / "8" / "progress" / "metadata"
    progress = json.loads(folder.read_text())
    assert (progress["participants"], progress["numbers"]) == (2, [0, 2])
    result = train(
        of_rounds(9),
        tmp_path,
        allow_config_change=["training", "mesh", "islands"],
        membership=member(tmp_path, None, every=0, numbers=[0, 1, 2]),
    )
    assert result.rounds_trained == 1
    assert "3 islands continue from the states of 2" in capsys.readouterr().err


def test_a_copy_that_is_lost_takes_the_run_back_to_the_checkpoint(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture
) -> None:
    kill_after(tmp_path, 6, [0, 1, 2])
    result = train(
        of_rounds(9),
        tmp_path,
        allow_config_change=["training"],
        membership=member(tmp_path, 6, numbers=[0, 1, 3]),  # there is no copy of island 3
    )
    output = capsys.readouterr().err
    assert "a lost process had a part of the state; resuming from round 4" in output
    assert result.rounds == 9
    chex.assert_trees_all_equal(load_params(tmp_path), load_params(undisturbed))


def test_without_copies_the_checkpoint_is_used(tmp_path: Path) -> None:
    kill_after(tmp_path, 6, [0, 1, 2])
    shutil.rmtree(tmp_path / "memory")
    result = train(
        of_rounds(7),
        tmp_path,
        allow_config_change=["training"],
        membership=member(tmp_path, 6, every=2, numbers=[0, 1, 2]),
    )
    assert result.rounds_trained == 3  # from round 4
    assert list_copies(tmp_path / "memory") == ["a1-6"]


def test_memory_without_room_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "memory").write_text("a file")
    result = train(of_rounds(3), tmp_path, membership=member(tmp_path, numbers=[0, 1, 2]))
    errors = capsys.readouterr().err
    assert result.finished and errors.count("no copy of the state fits") == 1
    assert "Set --copy_dir to a folder with room for two copies" in errors


def test_a_roll_back_removes_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = of_rounds(6)
    training = dataclasses.replace(
        base.training, on_spike="roll_back", checkpoint_every=2, spike_limit=1
    )
    left: list[list[str]] = []
    start = RoundLoop.start
    monkeypatch.setattr(
        RoundLoop,
        "start",
        lambda loop: (left.append(list_copies(tmp_path / "memory")), start(loop)),
    )
    check = SpikeHistory.check
    spikes = [4]

    def check_and_spike(history: SpikeHistory, number: int, loss: float, is_spike: bool) -> None:
        if number in spikes:
            raise Spike(spikes.pop(), loss)
        check(history, number, loss, is_spike)

    monkeypatch.setattr(SpikeHistory, "check", check_and_spike)
    train(dataclasses.replace(base, training=training), tmp_path, membership=member(tmp_path))
    assert not spikes and left == [[], []]  # before round 1, and after the roll back
    assert sorted(list_copies(tmp_path / "memory")) == ["a1-5", "a1-6"]
