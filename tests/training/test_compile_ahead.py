"""The round of fewer processes, compiled while all train."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from small_islands import Islands, islands

from fedpax.elastic.membership import Membership
from fedpax.parallel.mesh import MeshConfig
from fedpax.training import compiled_round
from fedpax.training.compile_ahead import CompileAhead, compile_ahead
from fedpax.training.experiment import Experiment
from fedpax.training.trainer import train


def of_two() -> Islands:
    base = islands()
    training = dataclasses.replace(base.training, rounds=3)
    return dataclasses.replace(base, islands=2, mesh=MeshConfig(islands=2), training=training)


@pytest.fixture
def member(tmp_path: Path) -> Membership:
    return Membership(str(tmp_path / "memory"), "a1", 0, None, None, fewer=1)


def test_a_run_loads_the_round_that_was_compiled_ahead(
    tmp_path: Path, member: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    monkeypatch.setattr(compiled_round, "_check_round", lambda *args: traced.append(args))
    compile_ahead(of_two(), member)
    assert len(traced) == 1
    train(of_two(), tmp_path / "loaded", membership=member)
    compile_ahead(of_two(), member)
    assert len(traced) == 1


def test_a_round_that_cannot_be_compiled_ahead_is_named(
    member: Membership, capsys: pytest.CaptureFixture
) -> None:
    def fail() -> Experiment:
        raise ValueError("islands=3 does not fit")

    with CompileAhead(fail, member, lambda: 2) as ahead:
        ahead._thread.join()
    message = "the round of 1 processes was not compiled ahead (ValueError: islands=3 does not fit)"
    assert message in capsys.readouterr().err


def test_nothing_is_compiled_before_the_first_rounds(member: Membership) -> None:
    asked = threading.Event()

    def rounds_trained() -> int:
        asked.set()
        return 1

    with CompileAhead(of_two, member, rounds_trained) as ahead:
        asked.wait(10)
    assert not ahead._thread.is_alive()
    assert not Path(member.folder).exists()
