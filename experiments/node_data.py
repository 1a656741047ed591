"""The data of one participant of an experiment, where each participant has its own machine."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.clients.cohort import Cohort, CohortStream, IslandStream
from fedpax.console import count_of
from fedpax.data import ClientSampler, CohortRounds, cohort_rounds
from fedpax.deploy.nodes.node import Node, OneParticipant
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.run_files.configuration import read_configuration
from fedpax.training.experiment import Experiment, Run
from fedpax.user_files.finding import find_files


def experiment_data(
    folder: str | Path, node: Node, experiment: Experiment | None = None
) -> CohortRounds | Callable[[int], Cohort]:
    """Return the data of a participant of an experiment (`fedpax.deploy.nodes.node.LoadData`)."""
    if experiment is None:
        experiment = _saved_experiment(str(folder))
    else:
        experiment.read_inputs(Path(folder))
    files = node.config.get("files")
    if files is not None:
        return _own_files(experiment, node, str(files))
    stream = _build(experiment).cohorts
    if isinstance(stream, CohortRounds):
        if node.participant >= stream.num_clients:
            raise ArgumentError(
                f"The data have {count_of(stream.num_clients, 'client')}, and this node is "
                f"participant {node.participant}. Start fewer nodes, or give them files: "
                "--node-config 'files=\"/data/*.csv\"'."
            )
        return stream
    return _ParticipantRounds(experiment, node.participant)


def heldout_data(folder: str | Path, node: Node) -> Callable[[int], Cohort]:
    """Return the held-out examples of a participant, of its client or its own `files`."""
    experiment = _saved_experiment(str(folder))
    assert isinstance(experiment, FedAvgFiles)
    files = node.config.get("files")
    if files is None:
        clients: Any = experiment.open_heldout_participants().clients
        return lambda number: clients.read_clients(number, np.array([node.participant]))
    at_node = _with_own_files(experiment, node, str(files))
    opened = at_node.opened
    chosen = np.flatnonzero(opened.heldout | opened.is_new[opened.owners])
    if len(chosen) > (most := node.steps * experiment.heldout_batch_size):
        raise ArgumentError(
            f"{files} has {len(chosen)} held-out examples, expected at most {most}, the batches of "
            "the app. Evaluate with a larger --heldout_batch_size."
        )
    rounds = cohort_rounds(
        at_node.prepared.examples,
        OneParticipant(node.num_participants, node.participant, chosen),
        ClientSampler(node.num_participants, 1),
        batch_size=experiment.heldout_batch_size,
        max_steps=node.steps,
        preprocess=at_node.make_preprocess(),
    )
    return lambda number: rounds.read_clients(number, np.array([node.participant]))


@functools.cache
def _saved_experiment(folder: str) -> Experiment:
    named = read_configuration(folder)
    if named is None:
        raise ArgumentError(f"{folder} has no config.json. Run `fedpax export` again.")
    experiment: Experiment = named[1]
    experiment.read_inputs(Path(folder))
    return experiment


@functools.lru_cache(maxsize=1)
def _build(experiment: Experiment) -> Run:
    return experiment.build()


def _own_files(experiment: Experiment, node: Node, files: str) -> CohortRounds:
    """Return rounds of the files of this node, whose clients are one participant."""
    at_node = _with_own_files(experiment, node, files)
    examples, population = at_node.read_clients()
    together = np.concatenate([np.asarray(part, np.int64) for part in population])
    sampler = ClientSampler(node.num_participants, 1, at_node.cohort.seed)
    population = OneParticipant(node.num_participants, node.participant, together)
    return at_node.cohort.rounds(examples, population, sampler, at_node.make_preprocess())


def _with_own_files(experiment: Experiment, node: Node, files: str) -> FedAvgFiles:
    if not isinstance(experiment, FedAvgFiles):
        raise ArgumentError(
            f"--node-config has files={files!r}, and {type(experiment).__name__} reads no files, "
            "expected an experiment on files, such as fedavg_table. Edit load_data of the app."
        )
    names = tuple(name.strip() for name in files.split(","))
    data = dataclasses.replace(experiment.data, files=names)
    at_node = dataclasses.replace(
        experiment, data=data, cohort=dataclasses.replace(experiment.cohort, max_steps=node.steps)
    )
    at_node.__dict__["_saved_inputs"] = experiment.saved_inputs
    # As among several files, so that the same examples are held out.
    is_folder = len(names) == 1 and Path(names[0]).is_dir()
    one_client = None if is_folder else find_files(names, None)[0].name
    at_node.__dict__["opened"] = data.open(one_client)
    return at_node


class _ParticipantRounds:
    """`round -> cohort` of one participant, from a stream of whole cohorts."""

    def __init__(self, experiment: Experiment, row: int) -> None:
        self._experiment, self._row = experiment, row
        self._open()

    def _open(self) -> None:
        stream: CohortStream = self._experiment.build().cohorts  # each row reads at its own place
        if isinstance(stream, IslandStream):
            stream.keep_island(self._row)
        self._stream, self._next = stream, 0
        self._cohort: Cohort | None = None

    def __call__(self, number: int) -> Cohort:
        if number < self._next - 1:
            self._open()
        while self._next <= number:
            self._cohort = next(self._stream)
            self._next += 1
        rows = slice(self._row, self._row + 1)
        row: Any = jax.tree.map(lambda x: x[rows], self._cohort)
        assert isinstance(row, Cohort)
        return row
