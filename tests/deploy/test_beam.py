"""Rounds on Apache Beam equal the compiled rounds, also with several bundles and processes."""

import doctest
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_rounds import CASES, assert_equal_rounds, by_jit, open_vectors, three_stages
from hospital_files import write_hospitals

import fedpax
from fedpax.checkpoints import load_params
from fedpax.deploy import Artifact, EachClient
from fedpax.main import main

beam = pytest.importorskip("apache_beam", reason="Apache Beam needs an environment of its own")
pytestmark = pytest.mark.slow

from fedpax.deploy.beam import run_beam  # noqa: E402

THREADS = ["--runner=FnApiRunner", "--direct_running_mode=multi_threading"]
PROCESSES = ["--runner=FnApiRunner", "--direct_running_mode=multi_processing"]


@pytest.fixture
def merges(monkeypatch):
    """Count the merges of terms."""
    counts, merge = [], Artifact.merge

    def counted(artifact, stage):
        function = merge(artifact, stage)

        def run(some, others):
            counts.append(stage)
            return function(some, others)

        return run

    monkeypatch.setattr(Artifact, "merge", counted)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_compiled_rounds(name, merges):
    program, state, open_clients = CASES[name]()
    flags = [*THREADS, "--direct_num_workers=3"]
    result = run_beam(program, state, clients=open_clients, rounds=3, flags=flags, block_size=1)
    assert len(merges) >= 3
    assert_equal_rounds(result, by_jit(program, state, open_clients(), 3))


def test_rounds_in_several_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # open_rounds is pickled by name
    program, state, open_clients = CASES["scaffold"]()
    flags = [*PROCESSES, "--direct_num_workers=2"]
    result = run_beam(program, state, clients=open_clients, rounds=2, flags=flags, block_size=2)
    assert_equal_rounds(result, by_jit(program, state, open_clients(), 2))


def test_states_continue_in_a_second_job(tmp_path):
    program, state, open_clients = CASES["three stages"]()
    expected = by_jit(program, state, open_clients(), 2)
    ((state, _),) = run_beam(program, state, clients=open_clients, folder=str(tmp_path))
    result = run_beam(program, state, clients=open_clients, folder=str(tmp_path))
    assert_equal_rounds(result, expected[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_fails_leaves_no_files(tmp_path):
    @fedpax.program(clients=2)
    def total(x):
        return fedpax.federated_sum(fedpax.federated_map(jnp.sin, x))

    def draw(client):
        if client:
            raise RuntimeError("a damaged file")
        return np.float32(1)

    with pytest.raises(Exception, match="a damaged file"):
        run_beam(total, clients=lambda: EachClient(draw, 2), folder=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_analytics_have_data_alone():
    @fedpax.program(clients=50)
    def histogram(x):
        return fedpax.federated_sum(
            fedpax.federated_map(lambda x: jnp.histogram(x, 4, (-2.0, 2.0))[0], x)
        )

    def draw(client):
        return np.random.default_rng(client).normal(size=7).astype(np.float32)

    (result,) = run_beam(histogram, clients=lambda: EachClient(draw, 50), block_size=7)
    expected, _ = np.histogram(np.stack([draw(k) for k in range(50)]), 4, (-2, 2))
    np.testing.assert_array_equal(result, expected)


def test_a_pipeline_is_small_whatever_a_job_holds(monkeypatch):
    """Its steps are pickled one by one: they name the file of the job's work."""
    data, sizes, run = np.random.default_rng(6).normal(size=(5, 50_000)), [], beam.Pipeline.run

    def measured(pipeline, *args, **settings):
        sizes.append(len(pipeline.to_runner_api().SerializeToString()))
        return run(pipeline, *args, **settings)

    @fedpax.program(clients=5)
    def keep_sums(state, x):
        own = fedpax.federated_map(jnp.add, state["own"], x)
        return {"own": own, "mean": fedpax.federated_mean(own)}, {}

    monkeypatch.setattr(beam.Pipeline, "run", measured)
    state = {"own": jnp.float32(data), "mean": jnp.zeros(50_000)}
    clients = EachClient(lambda client: np.float32(data[client]), 5)
    result, _ = run_beam(keep_sums, state, clients=lambda: clients, rounds=3)[-1]
    np.testing.assert_allclose(result["own"], 4 * data, rtol=1e-5)
    assert sizes[0] < 300_000 < data.nbytes / 5


def test_a_server_that_reads_data_is_told():
    @fedpax.program(clients=5)
    def reads(w, data):
        return (
            w
            + fedpax.federated_sum(fedpax.federated_map(lambda x: x.sum(), data["x"]))
            * jnp.sort(data["scale"])[0]
        )

    with pytest.raises(ValueError, match=r"server reads data\['scale'\].*Return from a fed"):
        run_beam(reads, 1.0, clients=open_vectors)


def test_workers_elsewhere_need_a_folder():
    run = functools.partial(run_beam, three_stages, 0, clients=open_vectors)
    with pytest.raises(ValueError, match=r"--runner=FlinkRunner may be on other.*--temp_location"):
        run(flags=["--runner=FlinkRunner"])


def test_rounds_that_carry_nothing_are_told():
    @fedpax.program(clients=5)
    def total(data):
        return fedpax.federated_sum(fedpax.federated_map(lambda x: x.sum(), data["x"]))

    with pytest.raises(ValueError, match="no result of the program takes the place"):
        run_beam(total, clients=open_vectors, rounds=2)


def test_the_example_of_the_docstring_runs():
    text = run_beam.__doc__.replace("# doctest: +SKIP", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "run_beam", None, 0)
    assert doctest.DocTestRunner().run(test).attempted > 4
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(
    "arguments",
    [
        "table",
        ["--exp=methods_digits:scaffold", "--training.rounds=2", "--training.evaluate_every=0"],
    ],
    ids=["fedavg_table", "scaffold_digits"],
)
def test_the_command_trains_as_without_an_engine(arguments, tmp_path, capsys):
    if arguments == "table":
        (tmp_path / "files").mkdir()
        arguments = [*write_hospitals(tmp_path / "files"), "--data.label=outcome"]
    flags = "--direct_running_mode=multi_processing --direct_num_workers=2"
    beam_run, plain = f"--job_log_dir={tmp_path / 'beam'}", f"--job_log_dir={tmp_path / 'plain'}"
    assert main(["train", *arguments, beam_run, "--engine=beam", f"--beam_flags={flags}"]) == 0
    assert main(["train", *arguments, plain]) == 0
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6),
        load_params(tmp_path / "beam"),
        load_params(tmp_path / "plain"),
    )


def test_the_command_evaluates_as_without_an_engine(tmp_path, capsys):
    (tmp_path / "files").mkdir()
    arguments = [*write_hospitals(tmp_path / "files"), "--data.label=outcome"]
    folder = f"--job_log_dir={tmp_path / 'run'}"
    assert main(["train", *arguments, folder]) == 0
    collected = []
    for name, flags in {"plain": [], "beam": ["--engine=beam"]}.items():
        path = tmp_path / f"{name}.json"
        assert main(["evaluate", folder, "--by_client", f"--json={path}", *flags]) == 0
        collected.append(json.loads(path.read_text())["metrics"])
    plain, by_beam = collected
    assert plain.keys() == by_beam.keys()
    for name, value in plain.items():
        assert abs(by_beam[name] - value) <= 1e-6


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/deploy_beam.md").read_text()
    namespace = {"__name__": "__main__"}
    for code in re.findall(r"^```py(?:thon)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(code, namespace)
    assert len(namespace["losses"]) == 3
    values = namespace["table"]["x"]
    assert namespace["counts"].sum() == np.sum(np.abs(values) <= 2)
