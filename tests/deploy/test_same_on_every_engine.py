"""One experiment by jit, out of core, on Apache Beam and on three of Flower's SuperNodes.

FEDPAX_FLWR and FEDPAX_BEAM name virtual environments that have fedpax, and flwr or apache-beam:
`pytest -m slow -s tests/deploy/test_same_on_every_engine.py` prints the largest differences.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from deploy.flower_processes import ENVIRONMENT, Flower, binaries
from hospital_files import write_hospitals

from fedpax.checkpoints import load_params

BEAM = os.environ.get("FEDPAX_BEAM")
needs_beam = pytest.mark.skipif(BEAM is None, reason="FEDPAX_BEAM names no environment with Beam")
needs_flower = pytest.mark.skipif(binaries() is None, reason=f"{ENVIRONMENT} has no flwr")
pytestmark = pytest.mark.slow

NODES, ROUNDS = 3, 3
LINK = ("--insecure", "--disable-runtime-dependency-installation")
PROCESSES = "--direct_running_mode=multi_processing --direct_num_workers=2"
SETTINGS = ["--cohort.size=3", f"--training.rounds={ROUNDS}", "--training.evaluate_every=0"]


def fedpax(python, *arguments):
    """Run a command with the Python of an environment."""
    command = [str(python), "-m", "fedpax", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Case:
    """An experiment: its arguments on files that one process reads, and its arguments at a node."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        if name == "scaffold_digits":
            self.arguments = self.prepared = [
                "--exp=fedavg_digits",
                "--method=scaffold",
                "--population.num_clients=3",
                "--cohort.max_steps=20",
                *SETTINGS,
            ]
            return
        files = folder / "files"
        files.mkdir()
        write_hospitals(files)
        for path in sorted(files.glob("*.csv"))[NODES:]:
            path.unlink()
        fedpax(
            sys.executable, "prepare", f"{files}/*.csv", "--label=outcome", f"--out={folder / 'p'}"
        )
        table = ["--exp=fedavg_table", "--data.label=outcome", *SETTINGS]
        self.arguments = [*table, f"--data.files={files}/*.csv"]
        self.prepared = [*table, f"--data.files={folder / 'p'}"]

    def train(self, python, arguments, *engine):
        out = self.folder / f"run{len(list(self.folder.glob('run*')))}"
        fedpax(python, "train", *arguments, f"--job_log_dir={out}", *engine)
        return load_params(out)

    def node_config(self, k):
        files = self.folder / "files" / f"hospital {k}.csv"
        return f'files="{files}"' if files.exists() else ""


@pytest.fixture(scope="module", params=["fedavg_table", "scaffold_digits"])
def case(request, tmp_path_factory):
    made = Case(tmp_path_factory.mktemp(request.param), request.param)
    made.expected = made.train(sys.executable, made.arguments)
    return made


def compare(case, engine, leaf_of):
    """Print the largest difference from the compiled rounds, after the check that it is small."""
    largest = 0.0
    for path, expected in jax.tree.leaves_with_path(case.expected):
        result = np.asarray(leaf_of(path))
        assert np.isfinite(result).all() and result.shape == expected.shape
        assert np.abs(expected).max() > 1e-3
        largest = max(largest, float(np.abs(result - expected).max()))
    print(f"{case.name}, {engine}: largest difference {largest:.1e}")
    assert largest <= 1e-6


def compare_params(case, engine, params):
    leaves = dict(jax.tree.leaves_with_path(params))
    compare(case, engine, leaves.__getitem__)


def test_out_of_core(case):
    engine = "--engine=out_of_core", "--chunk_size=2"
    compare_params(case, "out of core", case.train(sys.executable, case.prepared, *engine))


@needs_beam
def test_beam(case):
    python = Path(BEAM) / "bin" / "python"
    engine = "--engine=beam", f"--beam_flags={PROCESSES}"
    compare_params(case, "Beam", case.train(python, case.prepared, *engine))


@needs_flower
def test_three_nodes(case, tmp_path):
    app, out = tmp_path / "app", tmp_path / "out"
    fedpax(binaries() / "python", "export", "--flower", *case.arguments, f"--out={app}")
    with Flower(tmp_path, LINK) as flower:
        for k in range(NODES):
            flower.start_node(k, config=case.node_config(k))
        flower.finish(flower.start_run(app, out), out)
    state = np.load(out / "state.npz")
    name = lambda path: f"state.params{jax.tree_util.keystr(path)}"
    compare(case, "three SuperNodes", lambda path: state[name(path)])


@needs_flower
def test_an_evaluation_on_three_nodes(tmp_path):
    case = Case(tmp_path, "fedavg_table")
    case.train(sys.executable, case.arguments)
    evaluate = ["evaluate", f"--job_log_dir={tmp_path / 'run0'}", "--by_client"]
    fedpax(sys.executable, *evaluate, f"--json={tmp_path / 'plain.json'}")
    with Flower(tmp_path, LINK) as flower:
        for k in range(NODES):
            flower.start_node(k, config=case.node_config(k))
        command = [str(binaries() / "python"), "-m", "fedpax", *evaluate, "--engine=flower"]
        more = ["--flower_flags=test", f"--json={tmp_path / 'flower.json'}"]
        done = subprocess.run(
            [*command, *more], env=flower.environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
    plain, result = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "flower")
    )
    assert result["metrics"].keys() == plain["metrics"].keys()
    for name, value in plain["metrics"].items():
        assert abs(result["metrics"][name] - value) <= 1e-6
