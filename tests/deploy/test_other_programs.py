"""Programs that are not among fedpax's methods, in stages: one process, batch jobs, and nodes."""

import functools
import json

import jax
import numpy as np
import pytest
from batch_rounds import assert_equal_rounds, by_jit, run_in_a_loop
from deploy import other_programs as others
from deploy.flower_processes import Flower, binaries
from deploy.nodes import LocalNetwork

import fedpax
from fedpax.deploy import Settings, pack_program, run_local, write_app
from fedpax.deploy.flower.app_files import PACKAGE
from fedpax.deploy.nodes.node import NodeProgram
from fedpax.deploy.nodes.round_server import RoundServer, Rules
from fedpax.deploy.round_program import parse_program

ROUNDS = 3
# `run_local` runs each program in the fast tests, and each engine this one, of two stages.
FAST = "standardized"
FEW = [n if n == FAST else pytest.param(n, marks=pytest.mark.slow) for n in others.PROGRAMS]


@functools.cache
def expected_of(name):
    return by_jit(others.PROGRAMS[name].round, others.state_of(name), others.open_clients(), ROUNDS)


def pack(name):
    settings = Settings(rounds=ROUNDS, num_clients=others.N)
    shapes = others.open_clients().shapes
    return pack_program(others.PROGRAMS[name], others.init_params, shapes, settings)


def assert_equals_state(actual, expected):
    """Compare the server's values, by name, with the values of the compiled rounds."""
    compared = 0
    for path, leaf in jax.tree.leaves_with_path(expected):
        name = f"state{jax.tree_util.keystr(path)}"
        if name in actual:
            compared += 1
            np.testing.assert_allclose(actual[name], leaf, rtol=0, atol=1e-6)
    assert compared == len(actual) > 0


@pytest.mark.parametrize("name", others.PROGRAMS)
def test_each_participant_by_itself_equals_the_compiled_rounds(name):
    state, data = others.state_of(name), others.open_clients().read_clients(0, np.arange(others.N))
    stages = fedpax.stages(others.PROGRAMS[name].round, state, data)
    assert len(stages) == others.STAGES[name]
    collected = []
    for _ in range(ROUNDS):
        state, metrics = run_local(stages, state, data)
        collected.append((state, metrics))
    assert_equal_rounds(collected, expected_of(name))


@pytest.mark.parametrize("name", FEW)
def test_a_batch_job_equals_the_compiled_rounds(name):
    program, state = others.PROGRAMS[name].round, others.state_of(name)
    result = run_in_a_loop(program, state, clients=others.open_clients, rounds=ROUNDS)
    assert_equal_rounds(result, expected_of(name))


@pytest.mark.parametrize("name", FEW)
def test_nodes_equal_the_compiled_rounds(name, tmp_path):
    program = parse_program(pack(name))
    network = LocalNetwork(program, tmp_path)
    network.programs = {
        node: NodeProgram(program, others.load_data, tmp_path / str(node))
        for node in network.programs
    }
    server = RoundServer(network, program, run="r", rules=Rules(), sleep=lambda s: None)
    position = server.begin()
    for _, metrics in expected_of(name):
        position, result = server.advance(position)
        for key, value in metrics.items():
            np.testing.assert_allclose(result[f"['{key}']"], value, rtol=0, atol=1e-6)
    assert_equals_state(position.state, expected_of(name)[-1][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", others.PROGRAMS)
def test_apache_beam_equals_the_compiled_rounds(name):
    pytest.importorskip("apache_beam", reason="Apache Beam needs an environment of its own")
    from fedpax.deploy.beam import run_beam

    program, state = others.PROGRAMS[name].round, others.state_of(name)
    result = run_beam(
        program, state, clients=others.open_clients, rounds=ROUNDS, block_size=1,
        flags=["--runner=FnApiRunner", "--direct_running_mode=multi_threading"],
    )  # fmt: skip
    assert_equal_rounds(result, expected_of(name))


@pytest.mark.slow
@pytest.mark.skipif(binaries() is None, reason="flwr is not installed")
@pytest.mark.parametrize("name", others.PROGRAMS)
def test_three_nodes_of_flower_equal_the_compiled_rounds(name, tmp_path):
    app, out = tmp_path / "app", tmp_path / "out"
    settings = Settings(rounds=ROUNDS, num_clients=others.N)
    write_app(
        app, name=name, program=pack(name), settings=settings, size=others.N, participants="clients"
    )
    (app / PACKAGE / "data.py").write_text("from deploy.other_programs import load_data")
    link = ("--insecure", "--disable-runtime-dependency-installation")
    with Flower(tmp_path, link) as flower:
        for k in range(others.N):
            flower.start_node(k)
        flower.finish(flower.start_run(app, out), out)
    assert_equals_state(np.load(out / "state.npz"), expected_of(name)[-1][0])
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    for key, value in expected_of(name)[-1][1].items():
        if np.ndim(value) == 0:
            np.testing.assert_allclose(last[key], value, rtol=0, atol=1e-6)
