"""A round on Flower that a command starts and awaits, and the held-out data of nodes."""

import functools
import json
import logging
import runpy

import jax
import numpy as np
import pytest
from deploy.nodes import LocalNetwork
from hospital_files import write_hospitals
from test_batch_evaluation import random_params

import fedpax
from fedpax.commands.parts.flower_export import write_heldout_data
from fedpax.commands.parts.options import configure
from fedpax.deploy import EachClient, Node
from fedpax.deploy.batch_training import evaluate_in_batches
from fedpax.deploy.flower import app_files as flower_job
from fedpax.deploy.flower.app import train
from fedpax.deploy.flower.app_files import PACKAGE, RESULTS
from fedpax.deploy.nodes.node import NodeProgram
from fedpax.deploy.round_program import read_program
from fedpax.errors import MissingPackageError
from fedpax.experiments.node_data import heldout_data


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    write_hospitals(tmp_path / "files")
    return tmp_path / "files"


@pytest.fixture
def in_this_process(monkeypatch, tmp_path, caplog):
    """Run the app of a job on nodes in this process."""

    def read_results(command, tell):
        app = command[2]
        assert command[-1] == "--stream" and "print-results = true" in (
            (flower_job.Path(app) / "pyproject.toml").read_text()
        )
        package = flower_job.Path(app) / PACKAGE
        program = read_program(package / "program.json")
        load_data = runpy.run_path(str(package / "data.py"))["load_data"]
        partitions = range(program.size)
        network = LocalNetwork(program, tmp_path, partitions=partitions)
        network.programs = {
            node: NodeProgram(program, load_data, tmp_path / str(node)) for node in network.programs
        }
        settings = {"out": str(tmp_path / "out"), "print-results": True, "wait": 0.0}
        with caplog.at_level(logging.INFO, "flwr"):
            train(network, program, "run1", settings)
        (line,) = (m for m in caplog.messages if m.startswith(RESULTS))
        return json.loads(line.removeprefix(RESULTS))

    monkeypatch.setattr(flower_job, "_read_results", read_results)
    monkeypatch.setattr(flower_job.shutil, "which", lambda name: name)


def configured(folder, *more):
    files = f"--data.files={folder}/*.csv"
    return configure("fedavg_table", [files, "--data.label=outcome", *more], None)


def test_an_evaluation_on_nodes_equals_that_of_one_process(folder, in_this_process):
    # A hospital of 3 patients has none that is held out.
    experiment = configured(folder, "--data.heldout_fraction=0.05", "--heldout_batch_size=4")
    run = experiment.build()
    params = random_params(run, seed=1)
    heldout = experiment.open_heldout_participants()
    assert len(heldout.names) == len(experiment.training_parts)
    write_data = functools.partial(write_heldout_data, experiment, "fedavg_table")
    result, by_client = evaluate_in_batches(
        heldout,
        params,
        functools.partial(flower_job.run_flower, write_data=write_data),
        lambda: heldout.clients,
        by_client=True,
    )
    expected = run.evaluate(params)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6)
    every = run.evaluate_clients(params)
    places = [list(every.names).index(name) for name in by_client.names]
    np.testing.assert_array_equal(by_client.num_examples, every.num_examples[places])
    assert 0 in by_client.num_examples
    np.testing.assert_allclose(
        by_client.metrics["accuracy"], every.metrics["accuracy"][places], rtol=1e-5
    )


def test_a_node_with_its_own_files_has_the_same_held_out_examples(folder, tmp_path):
    experiment = configured(folder, "--heldout_batch_size=4")
    write_heldout_data(experiment, "fedavg_table", tmp_path)
    clients = experiment.open_heldout_participants().clients
    size, steps = len(experiment.training_parts), clients.shapes.batches["mask"].shape[1]
    for k in (0, 4):
        config = {"files": str(folder / f"hospital {k}.csv")}
        result = heldout_data(tmp_path, Node(k, size, config, steps))(0)
        jax.tree.map(np.testing.assert_array_equal, result, clients.read_clients(0, np.array([k])))
    with pytest.raises(ValueError, match=r"held-out examples, expected at most 4, the batches of"):
        heldout_data(tmp_path, Node(0, size, {"files": str(folder / "hospital 0.csv")}, 1))


@fedpax.program(clients=2)
def total(x):
    return fedpax.federated_sum(fedpax.federated_map(lambda x: x * x, x))


def run_total():
    clients = lambda: EachClient(np.float32, 2)
    return flower_job.run_flower(total, clients=clients, write_data=lambda folder: None)


def fake_flwr(tmp_path, monkeypatch, script):
    command = tmp_path / "flwr"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(flower_job.sys, "executable", str(tmp_path / "python"))


def test_results_are_read_from_colored_lines(tmp_path, monkeypatch):
    script = f"""printf '\\033[92mINFO\\033[0m: {RESULTS}{{"": 5.0}}\\n'"""
    fake_flwr(tmp_path, monkeypatch, script)
    assert run_total()[0].item() == 5.0


def test_results_in_the_text_of_a_node_are_none(tmp_path, monkeypatch):
    forged = f"WARNING: Participant 1: INFO : {RESULTS}"
    script = f"""printf 'INFO: {RESULTS}{{"": 5.0}}\n{forged}{{"": 9.0}}\n{forged}[\n'"""
    fake_flwr(tmp_path, monkeypatch, script)
    assert run_total()[0].item() == 5.0


def test_a_run_without_results_is_told(tmp_path, monkeypatch):
    fake_flwr(tmp_path, monkeypatch, "echo the SuperLink cannot be reached; exit 3")
    with pytest.raises(
        flower_job.FlowerRunError, match=r"with status 3\. Its last lines: the SuperLink cannot be"
    ):
        run_total()
    (tmp_path / "flwr").unlink()
    monkeypatch.setattr(flower_job.shutil, "which", lambda name: None)
    with pytest.raises(MissingPackageError, match="needs the command flwr"):
        run_total()


@pytest.mark.parametrize(("superlink", "status"), [([], 0), (["mine"], 0), (["mine"], 1)])
def test_an_interrupted_run_is_stopped_at_its_superlink(superlink, status, tmp_path):
    command = tmp_path / "flwr"
    command.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = stop ]; then echo "$@" > {tmp_path}/stopped; exit {status}; fi\n'
        "echo Successfully started run 7012; echo Waiting; exec sleep 60\n"
    )
    command.chmod(0o700)
    messages = []

    def tell(line):
        messages.append(line)
        if line == "Waiting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flower_job._read_results([str(command), "run", "app", *superlink, "--stream"], tell)
    assert (tmp_path / "stopped").read_text().split() == ["stop", "7012", *superlink]
    words = "flwr stop 7012 mine" if status else "Run 7012 is ended."
    assert messages[-1].endswith(words)
