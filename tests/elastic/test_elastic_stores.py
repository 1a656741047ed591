"""`fedpax train --elastic` whose checkpoints have a part of the clients' states."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import chex
import pytest
from elastic_job import ENDLESS, Job
from small_stores import stores

from fedpax.checkpoints import load_params
from fedpax.checkpoints.saved_state import load_field
from fedpax.elastic.host_copies import memory_folder, remove_copies
from fedpax.training.trainer import train

pytestmark = pytest.mark.slow

EXP = "small_stores:stores"
SETTINGS = (f"--training.rounds={ENDLESS}", "--training.evaluate_every=0")


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        for process in [*job.processes, *job.ended]:
            process.kill()
            process.wait()
        for number in range(job.count):
            remove_copies(memory_folder(None, job.folder, number))


def test_states_of_clients_survive_a_killed_process_and_a_lost_host(
    tmp_path: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path / "run", 2, "--pause=0.3", settings=SETTINGS, exp=EXP)
    jobs.append(job)
    job.wait_for(5, ENDLESS)
    os.kill(job.training_process(1), signal.SIGKILL)  # both hosts have copies
    job.wait_for(5, ENDLESS)
    assert list(job.folder.glob("checkpoints/*/parent.json"))
    job.processes[1].kill()  # its rows are lost: the other host starts from a checkpoint
    job.wait_for(5, ENDLESS)
    job.return_of(1)
    job.wait_until_it_trains(1)
    job.wait_for(5, ENDLESS)
    saved, errors = job.end()
    assert "2 of 2 processes train from the copies" in errors
    assert errors.count("is gone.") == errors.count("has joined.") == 1
    training = dataclasses.replace(stores().training, rounds=saved[-1])
    train(dataclasses.replace(stores(), training=training), tmp_path / "one")
    one, other = (
        (load_params(folder, saved[-1]), load_field(folder, "client_controls", saved[-1]))
        for folder in (job.folder, tmp_path / "one")
    )
    chex.assert_trees_all_close(one, other, rtol=0, atol=1e-5)
