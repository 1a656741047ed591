"""Runs whose checkpoints have a part of the clients' states end as a run that is not stopped."""

import dataclasses
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_stores
from several_processes import HERE, finish, start
from small_regression import shared_compilation
from small_stores import POPULATION, stores
from tracker_server import Server, use

from fedpax.checkpoints import changed_rows, saved_stores
from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.checkpoints.checkpoint_files import find_damage, lineage
from fedpax.checkpoints.saved_state import load_field, load_params
from fedpax.clients import ClientStore, client_store
from fedpax.run_files.paths import complete_rounds, latest_round
from fedpax.training.resume_checks import describe_state_misfit
from fedpax.training.trainer import train

EXP = "small_stores:stores"


class Store(NamedTuple):
    params: Any
    store: ClientStore[Any]


@pytest.fixture(scope="module", autouse=True)
def compile_once() -> Iterator[None]:
    """Share compiled rounds among the runs, which differ in their length alone."""
    with shared_compilation():
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_stores, "SMALL_STORES", saved_stores.SMALL_STORES)  # `build` changes it
        train(stores(), folder)
    return folder


@pytest.fixture(autouse=True)
def small_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_stores, "SMALL_STORES", 0)


def state_of(folder: Path, number: int = 16) -> Any:
    return load_params(folder, number), load_field(folder, "client_controls", number)


def rounds_with_rows(folder: Path, number: int = 16) -> list[int]:
    return [step for step, _ in lineage(folder / "checkpoints", number)]


def assert_same_bits(one: Path, other: Path) -> None:
    for number in (14, 16):
        states = [state_of(folder, number) for folder in (one, other)]
        bits = [jax.tree.map(lambda x: x.tobytes(), state) for state in states]
        assert bits[0] == bits[1]


def test_the_checkpoints_of_a_run_have_the_rows_of_its_cohorts(unbroken: Path) -> None:
    # Two checkpoints in a row are kept, and the ones whose rows they need.
    assert complete_rounds(unbroken / "checkpoints") == [2, 10, 14, 16]
    assert rounds_with_rows(unbroken) == [2, 10, 14, 16]
    controls = load_field(unbroken, "client_controls")["rows"]["hidden"]
    took_part = np.flatnonzero(controls.any(axis=(1, 2)))
    expected = {
        int(k) for r in range(16) for k in np.random.default_rng(r).permutation(POPULATION)[:4]
    }
    assert {*took_part.tolist()} == expected


def test_a_run_in_pieces_ends_as_one_in_one_piece(unbroken: Path, tmp_path: Path) -> None:
    for rounds in (5, 16):
        train_until(rounds, tmp_path)
    assert_same_bits(tmp_path, unbroken)
    assert rounds_with_rows(tmp_path, 14) == [2, 8, 12, 14]
    # The eighth checkpoint after that of round 2 would have more than an eighth of the rows.
    assert rounds_with_rows(tmp_path) == [16]


def train_until(rounds: int, folder: Path, clients: int = 4, cohort: int = 4) -> None:
    whole = stores()
    training = dataclasses.replace(whole.training, rounds=rounds)
    mesh = dataclasses.replace(whole.mesh, clients=clients)
    run = dataclasses.replace(whole, training=training, mesh=mesh, cohort=cohort)
    train(run, folder, allow_config_change=["mesh"])


def test_a_tracker_gets_the_checkpoints_that_a_sent_one_needs(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole(Server):
        def log_checkpoint(self, folder: Path, round_number: int) -> None:
            assert find_damage(folder / "checkpoints" / str(round_number)) is None
            self.checkpoints.append(round_number)

    server = use(monkeypatch, Whole())
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "16")
    run = stores()
    training = dataclasses.replace(run.training, tracker="wandb", track_checkpoints=True)
    train(dataclasses.replace(run, training=training), tmp_path)
    assert rounds_with_rows(tmp_path) == [2, 10, 14, 16]
    assert server.checkpoints[-1] == 16


def test_a_larger_population_is_told(unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_stores, "POPULATION", 1000)
    monkeypatch.setattr(small_stores.Cohorts, "num_clients", 1000)
    words = r"client_controls has 509 clients, expected 1000 for the experiment's 1000 clients: a "
    longer = dataclasses.replace(stores().training, rounds=18)
    with pytest.raises(ValueError, match=words):
        train(dataclasses.replace(stores(), training=longer), unbroken)
    assert re.search(words, describe_state_misfit(unbroken, stores()) or "")


@pytest.mark.parametrize("cohort", [8, 16])
def test_states_of_all_clients_are_not_averaged_as_those_of_participants(
    tmp_path: Path, cohort: int
) -> None:
    def state(rows: int) -> Any:
        return Store(jnp.ones(2), client_store(jnp.zeros(3), rows))

    def like(rows: int) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(rows)
        )

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(8), {}, {}, num_participants=8)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(ValueError, match="store has 8 clients, expected 16"):
            checkpoints.restore_state(like(16), num_participants=cohort)


@pytest.mark.slow
def test_a_run_resumes_on_any_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "LARGEST_PART", 1)
    alone, resumed = tmp_path / "alone", tmp_path / "resumed"
    train_until(10, alone, clients=8, cohort=24)
    for rounds, devices in ((2, 8), (4, 3), (6, 6), (8, 1), (10, 8)):  # 528 rows on 3 and 6
        train_until(rounds, resumed, clients=devices, cohort=24)
    assert rounds_with_rows(resumed, 10) == [2, 10]
    assert rounds_with_rows(resumed, 8) == [2, 6, 8]
    ends = [state_of(folder, 10) for folder in (alone, resumed)]
    chex.assert_trees_all_close(*ends, rtol=0, atol=1e-5)
    # Of a client that took no part after the first resume, not a bit differs.
    cohorts = [np.random.default_rng(r).permutation(POPULATION)[:24] for r in range(10)]
    ids = np.setdiff1d(np.concatenate(cohorts[:2]), np.concatenate(cohorts[2:]))
    rows = [end[1]["rows"]["hidden"][ids] for end in ends]
    assert len(ids) > 10 and rows[0].any(axis=(1, 2)).all()
    assert rows[0].tobytes() == rows[1].tobytes()


@pytest.mark.slow
def test_two_processes_resume_a_run_of_three_devices(tmp_path: Path) -> None:
    alone, resumed = tmp_path / "alone", tmp_path / "resumed"
    train_until(6, alone, clients=3, cohort=12)
    train_until(4, resumed, clients=3, cohort=12)
    arguments = ["--training.rounds=6", "--cohort=12", "--allow_config_change=mesh"]
    ended = finish(start(2, resumed, *arguments, exp=EXP))
    assert [status for status, _, _ in ended] == [0, 0], ended[0][2]
    assert len(rounds_with_rows(resumed, 6)) > 1
    states = [state_of(folder, 6) for folder in (alone, resumed)]
    chex.assert_trees_all_close(*states, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    unbroken: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "fedpax.main", "train", f"--exp={EXP}"]
    command += [f"--job_log_dir={tmp_path}"]
    checkpoints = tmp_path / "checkpoints"
    kills = 0
    while kills < 4:
        process = subprocess.Popen([*command, "--pause=0.05"], cwd=HERE, stderr=subprocess.PIPE)
        done = latest_round(tmp_path) or 0
        while process.poll() is None:  # until the checkpoint after the next one is half written
            drafts = [*checkpoints.glob("*.orbax-checkpoint-tmp*")] if done else []
            if drafts or (not done and (latest_round(tmp_path) or 0) >= 2):
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()
        kills += 1
    last = subprocess.run([*command, "--allow_config_change=pause"], cwd=HERE, capture_output=True)
    assert last.returncode == 0, last.stderr.decode()
    assert_same_bits(tmp_path, unbroken)


@pytest.mark.slow
def test_two_processes_save_and_resume_as_one(unbroken: Path, tmp_path: Path) -> None:
    for rounds in (6, 16):
        ended = finish(start(2, tmp_path, f"--training.rounds={rounds}", exp=EXP))
        assert [status for status, _, _ in ended] == [0, 0], ended[0][2]
    assert rounds_with_rows(tmp_path) == rounds_with_rows(unbroken)
    chex.assert_trees_all_close(state_of(tmp_path), state_of(unbroken), rtol=0, atol=1e-5)
