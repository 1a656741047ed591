"""`fedpax train --elastic` with real processes: killed, stopped, lost and returned."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from elastic_job import ENDLESS, ROUNDS, Job
from several_processes import environment, finish, start_one, without_gloo
from small_islands import init, make_algorithm, make_rounds
from small_regression import Regression, regression

from fedpax.checkpoints import load_params
from fedpax.elastic.host_copies import list_copies, memory_folder, remove_copies, rounds_of
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.trainer import train

pytestmark = pytest.mark.slow


def without_pause(rounds: int = ROUNDS) -> Regression:
    """Return the run of `SETTINGS`, for one process."""
    base = regression()
    training = dataclasses.replace(
        base.training, rounds=rounds, evaluate_every=0, checkpoint_every=15
    )
    return dataclasses.replace(base, clients=6, mesh=MeshConfig(clients=3), training=training)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run in one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("one")
    train(without_pause(), folder)
    return folder


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Kill what a test has left."""
    made: list[Job] = []
    yield made
    for job in made:
        for process in [*job.processes, *job.ended]:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for number in range(job.count):
            remove_copies(memory_folder(None, job.folder, number))


def check_finished(job: Job, undisturbed: Path) -> str:
    """Check that a job ends by itself with the result of an undisturbed run; return its errors."""
    ends = finish(job.processes)
    status, output, errors = ends[0]
    assert status == 0, errors
    assert f"Finished {ROUNDS} of {ROUNDS} rounds" in output
    chex.assert_trees_all_close(
        load_params(job.folder), load_params(undisturbed), rtol=0, atol=1e-5
    )
    return errors


def test_every_host_but_the_keeper_dies_once_and_returns(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path / "run", 3, "--pause=0.3", f"--training.rounds={ENDLESS}")
    jobs.append(job)
    job.wait_for(4, ENDLESS)
    for number in (1, 2):
        child = job.training_process(number)
        job.processes[number].kill()
        seconds = job.wait_for(3, ENDLESS)
        assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
        print(f"killed host {number}: 3 more rounds after {seconds:.1f} s")
        job.return_of(number)
        job.wait_until_it_trains(number)
        job.wait_for(3, ENDLESS)
    saved, errors = job.end()
    train(without_pause(saved[-1]), tmp_path / "one")
    chex.assert_trees_all_close(
        load_params(job.folder), load_params(tmp_path / "one"), rtol=0, atol=1e-5
    )
    assert errors.count("is gone.") == errors.count("has joined.") == 2
    # The momentum of a lost host's clients is only in its memory: back to the checkpoint.
    assert "2 of 3 processes train from" in errors and "3 of 3 processes train." in errors


def test_all_but_one_die(tmp_path: Path, undisturbed: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, 3, "--pause=0.3")
    jobs.append(job)
    job.wait_for(4)
    job.processes[1].kill()
    job.processes[2].kill()
    job.processes = job.processes[:1]
    errors = check_finished(job, undisturbed)
    assert "1 of 3 processes train" in errors


@pytest.mark.parametrize(
    ("number", "process"),
    [(signal.SIGKILL, 2), (signal.SIGKILL, 0), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0)],
)
def test_a_training_process_is_killed_or_stopped(
    tmp_path: Path, undisturbed: Path, jobs: list[Job], number: signal.Signals, process: int
) -> None:
    job = Job(tmp_path, 3, "--pause=0.3")
    jobs.append(job)
    job.wait_for(4)
    before = job.last_round()
    os.kill(job.training_process(process), number)
    errors = check_finished(job, undisturbed)
    match = re.search(r"start 2: 3 of 3 processes train from the copies of round (\d+)\.", errors)
    assert match and int(match[1]) >= before - 1  # the round is taken back, and none before it
    assert not any(list_copies(memory_folder(None, tmp_path, i)) for i in range(3))


def reference(
    changes: Sequence[tuple[int, list[int], dict[int, int]]], count: int = 3, last: int = ROUNDS
) -> Any:
    """Return the parameters of `small_islands` whose islands change.

    Args:
        changes: for each change the round after which it is made, the islands from then on, and
            for islands that return the round of their state.
        count: number of all islands.
        last: number of rounds.
    """
    undisturbed = [make_algorithm(count).init(init(jax.random.key(0)))]
    rounds, step = make_rounds(count), jax.jit(make_algorithm(count).round)
    for _ in range(max((kept for _, _, own in changes for kept in own.values()), default=0)):
        undisturbed.append(step(undisturbed[-1], next(rounds))[0])
    numbers, state, done = list(range(count)), undisturbed[0], 0
    for until, now, own in [*changes, (last, [], {})]:
        rounds, step = make_rounds(len(numbers)), jax.jit(make_algorithm(len(numbers)).round)
        rounds.round = done
        for _ in range(done, until):
            state, _ = step(state, next(rounds))
        done = until
        if now:
            state = jax.tree.map(partial(rows, numbers, now, own), state, *undisturbed)
            numbers = now
    return state.params


def rows(numbers: list[int], now: list[int], own: dict[int, int], leaf: Any, *saved: Any) -> Any:
    """Return a leaf for other islands; `saved` are the leaves of an undisturbed run."""
    if leaf.shape[:1] != (len(numbers),):
        return leaf
    return jnp.stack(
        [saved[own[i]][i] if i in own else leaf[numbers.index(i)] for i in now],
    )


def test_islands_keep_their_own_state_when_one_is_lost_and_returns(
    tmp_path: Path, jobs: list[Job]
) -> None:
    settings = ("--exp=small_islands:islands", "--pause=0.3", f"--training.rounds={ENDLESS}")
    job = Job(tmp_path, 3, settings=settings)
    jobs.append(job)
    job.wait_for(6, ENDLESS)
    job.processes[1].kill()
    job.processes[1].wait()
    left = list_copies(memory_folder(None, tmp_path, 1))
    own = rounds_of(left, left[0].rpartition("-")[0])[-1]
    job.wait_for(3, ENDLESS)
    job.return_of(1)
    job.wait_until_it_trains(1)
    job.wait_for(3, ENDLESS)
    (returned, last), messages = job.end()
    lost = re.search(r"2 of 3 processes train from the copies of round (\d+)\.", messages)
    assert lost and own - int(lost[1]) in (0, 1)
    assert "start 3: 3 of 3 processes train." in messages
    changes = [(int(lost[1]), [0, 2], {}), (returned, [0, 1, 2], {1: own})]
    expected = reference(changes, last=last)
    chex.assert_trees_all_close(load_params(tmp_path), expected, rtol=0, atol=1e-5)


def test_an_island_of_two_processes_leaves_and_returns(tmp_path: Path, jobs: list[Job]) -> None:
    settings = (
        "--exp=small_islands:islands",
        "--islands=2",
        "--mesh.islands=2",
        "--mesh.fsdp=2",  # the parameters of an island are on both of its processes
        "--pause=0.3",
        f"--training.rounds={ENDLESS}",
    )
    job = Job(tmp_path, 4, settings=settings)
    jobs.append(job)
    job.wait_for(4, ENDLESS)
    job.processes[3].kill()
    job.processes[3].wait()
    left = list_copies(memory_folder(None, tmp_path, 3))
    own = rounds_of(left, left[0].rpartition("-")[0])[-1]
    job.wait_for(3, ENDLESS)
    job.return_of(3)
    job.wait_until_it_trains(3)
    job.wait_for(3, ENDLESS)
    (returned, last), messages = job.end()
    lost = re.search(r"2 of 4 processes train from the copies of round (\d+)\.", messages)
    assert lost and own - int(lost[1]) in (0, 1)
    assert "start 3: 4 of 4 processes train." in messages
    # Process 2 can have missed the last copy of process 3.
    loaded, errors = load_params(tmp_path)["w"], []
    for kept in (own, own - 1):
        changes = [(int(lost[1]), [0], {}), (returned, [0, 1], {1: kept})]
        errors.append(jnp.max(jnp.abs(loaded - reference(changes, count=2, last=last)["w"])))
    assert min(errors) < 1e-5, errors


def test_all_islands_but_one_are_killed(tmp_path: Path, jobs: list[Job]) -> None:
    settings = ("--exp=small_islands:islands", "--pause=0.5")
    job = Job(tmp_path, 3, settings=settings)
    jobs.append(job)
    job.wait_for(6)
    job.processes[1].kill()
    job.processes[2].kill()
    job.processes = job.processes[:1]
    ((status, _, errors),) = finish(job.processes)
    assert status == 0, errors
    result = re.findall(r"(\d) of 3 processes train from the copies of round (\d+)\.", errors)
    assert result[-1][0] == "1"
    numbers = {"1": [0], "2": [0, 2]}  # the keeper may miss process 1 first
    changes = [(int(number), numbers[count], {}) for count, number in result]
    chex.assert_trees_all_close(load_params(tmp_path), reference(changes), rtol=0, atol=1e-5)


def test_a_host_is_frozen(tmp_path: Path, undisturbed: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, 3, "--pause=0.3")
    jobs.append(job)
    job.wait_for(4)
    child = job.training_process(1)
    os.kill(child, signal.SIGSTOP)
    job.processes[1].send_signal(signal.SIGSTOP)
    frozen = job.processes.pop(1)
    errors = check_finished(job, undisturbed)
    assert "is silent." in errors and "2 of 3 processes train from" in errors
    # It thaws after the end: the keeper is gone, and its training process ends with it.
    frozen.send_signal(signal.SIGCONT)
    (status, _, errors) = finish([frozen])[0]
    assert status == 75 and "Start all processes again: the run resumes from round" in errors
    assert not Path(f"/proc/{child}").exists()


def is_running(process: int) -> bool:
    """Return whether a process has not ended; its parent may have yet to wait for it."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())  # empty if it has ended
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_keeper_dies_and_the_same_commands_resume(
    tmp_path: Path, undisturbed: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path, 3, "--pause=0.3", "--training.checkpoint_every=2")
    jobs.append(job)
    job.wait_for(5)
    children = [job.training_process(number) for number in range(3)]
    job.processes[0].kill()
    ends = finish(job.processes)
    assert [status for status, _, _ in ends] == [-signal.SIGKILL, 75, 75]
    for _, _, errors in ends[1:]:
        assert "the keeper at localhost:" in errors
        assert re.search(r"the run resumes from round \d+\.", errors)
    assert not any(is_running(child) for child in children)
    again = Job(tmp_path, 3, "--pause=0.3", "--training.checkpoint_every=2")
    jobs.append(again)
    check_finished(again, undisturbed)


def test_process_0_is_lost_beside_a_keeper_of_its_own(
    tmp_path: Path, undisturbed: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path, 3, "--pause=0.3", "--keeper=elsewhere")
    jobs.append(job)
    arguments = [*job.arguments[:-1], "--keeper=alone"]
    keeper = start_one(arguments, environment(0, 3, job.port))
    job.ended.append(keeper)
    while job.last_round() < 6:
        assert keeper.poll() is None
        time.sleep(0.05)
    job.processes.pop(0).kill()
    ends = finish([keeper, *job.processes])
    assert [status for status, _, _ in ends] == [0, 0, 0], ends[0][2]
    assert "2 of 3 processes train from the copies of round" in ends[0][2]
    assert f"Finished {ROUNDS} of {ROUNDS} rounds" in ends[1][1]
    chex.assert_trees_all_close(load_params(tmp_path), load_params(undisturbed), rtol=0, atol=1e-5)


def test_a_signal_saves_and_ends_all(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, 2, "--clients=4", "--mesh.clients=2", "--pause=0.3")
    jobs.append(job)
    job.wait_for(3)
    job.processes[1].send_signal(signal.SIGTERM)
    ends = finish(job.processes)
    assert [status for status, _, _ in ends] == [143, 143]
    assert re.search(r"SIGTERM: saved \d+ of 60 rounds", without_gloo(ends[0][1]))


def test_one_process_is_restarted_and_a_lasting_failure_ends_the_job(
    tmp_path: Path, undisturbed: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path, 1, "--pause=0.3")
    jobs.append(job)
    job.wait_for(4)
    os.kill(job.training_process(0), signal.SIGKILL)
    errors = check_finished(job, undisturbed)
    assert "start 2: 1 of 1 processes train from the copies of round" in errors
    broken = Job(tmp_path / "other", 1, "--training.rounds=0x")
    jobs.append(broken)
    assert finish(broken.processes)[0][0] == 2
