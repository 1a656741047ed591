"""FedAvg over sites against Flower's own FedAvg on the same files, as processes.

`FEDPAX_FLWR=ENVIRONMENT pytest -s -m slow tests/sites/test_against_flower.py` prints the
parameters' difference, and seconds and bytes of a round of both. ENVIRONMENT is a virtual
environment with flwr. The app is what a user of Flower writes, with NumPy.
"""

import csv
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from deploy.flower_processes import ENVIRONMENT, Flower, binaries
from site_processes import Processes, free_port

from fedpax.checkpoints import load_params
from fedpax.run_files.metrics import read_metrics, select
from sites.recording_proxy import RecordingProxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        binaries() is None,
        reason=f"flwr is not installed: set {ENVIRONMENT} to a virtual environment that has it",
    ),
]
pytest.importorskip("grpc")

SITES, ROWS, FEATURES, ROUNDS, EPOCHS, RATE = ("oslo", "lyon", "rome"), (60, 90, 40), 20, 3, 2, 0.5

PYPROJECT = """\
[project]
name = "plain"
version = "1.0.0"
description = "FedAvg of a logistic regression"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedpax"

[tool.flwr.app.components]
serverapp = "plain.server:app"
clientapp = "plain.client:app"

[tool.flwr.app.config]
out = ""
wait = 300.0
"""

SERVER = f"""\
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    out = Path(context.run_config["out"])
    out.mkdir(exist_ok=True)
    times = []

    def evaluate(number, arrays):
        times.append(time.time())
        np.savez(out / "params.npz", *arrays.to_numpy_ndarrays())
        np.savetxt(out / "times", times)

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes={len(SITES)}, min_available_nodes={len(SITES)}
    )
    first = [np.zeros(({FEATURES}, 2), np.float32), np.zeros(2, np.float32)]
    strategy.start(grid, ArrayRecord(first), num_rounds={ROUNDS}, evaluate_fn=evaluate)
    (out / "finished").touch()
"""

CLIENT = f"""\
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    table = np.loadtxt(context.node_config["table"], delimiter=",", skiprows=1, dtype=np.float32)
    x, y = table[:, :-1], table[:, -1].astype(int)
    w, b = message.content["arrays"].to_numpy_ndarrays()
    for _ in range({EPOCHS}):
        logits = x @ w + b
        p = np.exp(logits - logits.max(1, keepdims=True))
        gradient = p / p.sum(1, keepdims=True) - np.eye(2, dtype=np.float32)[y]
        w = w - np.float32({RATE}) * x.T @ gradient / np.float32(len(y))
        b = b - np.float32({RATE}) * gradient.mean(0)
    content = RecordDict(
        {{
            "arrays": ArrayRecord([w, b]),
            "metrics": MetricRecord({{"num-examples": len(y)}}),
        }}
    )
    return Message(content=content, reply_to=message)
"""


def write_tables(folder: Path) -> None:
    """Write a table of numbers from -1 to 1 for each site, and a few rows that are held out."""
    random = np.random.default_rng(0)
    direction = random.normal(size=FEATURES)
    for site, rows in zip(SITES, ROWS, strict=True):
        (folder / site).mkdir(parents=True)
        for split, count in (("train", rows), ("test", 10)):
            x = random.uniform(-1, 1, size=(count, FEATURES)).round(6)
            y = (x @ direction + random.normal(size=count) > 0).astype(int)
            with (folder / site / f"{split}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow([*(f"x{i}" for i in range(FEATURES)), "y"])
                table.writerows([*map(str, row), label] for row, label in zip(x, y, strict=True))


def run_sites(folder: Path, data: Path) -> tuple[list[np.ndarray], list[float], int]:
    """Run fedpax's commands; return the parameters, seconds of rounds, and bytes on the wire."""
    folder.mkdir()
    processes, port = Processes(folder, "fedavg_table"), free_port()
    processes.address = f"127.0.0.1:{port}"
    common = (
        "--data.label=y",
        "--data.standardize=range",
        "--data.columns=x*=number(-1..1)",
        "--cohort.batch_size=100",
        f"--cohort.local_epochs={EPOCHS}",
        f"--client_learning_rate={RATE}",
        f"--training.rounds={ROUNDS}",
        "--training.evaluate_every=0",
    )
    started = [processes.start("syncer", "syncer", *common, f"--min_sites={len(SITES)}")]
    with RecordingProxy(port) as wire:
        processes.address = wire.address
        for site in SITES:
            files = f"--data.files={data / site}/{{split}}.csv"
            started.append(processes.start("join", site, *common, files))
        try:
            processes.finish(started)
        finally:
            processes.end()
    lines = select(read_metrics(folder / "syncer"), "training")
    params = [np.asarray(x) for x in jax.tree.leaves(load_params(folder / "syncer"))]
    return params, [line["seconds"] for line in lines], wire.num_bytes


def run_flower(folder: Path, data: Path) -> tuple[list[np.ndarray], list[float], int]:
    """Run Flower's processes; return the same."""
    app, out = folder / "app", folder / "out"
    (app / "plain").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, content in (("__init__", ""), ("server", SERVER), ("client", CLIENT)):
        (app / "plain" / f"{name}.py").write_text(content)
    link = ("--insecure", "--disable-runtime-dependency-installation")
    with Flower(folder, link) as flower, RecordingProxy(flower.port) as wire:
        own, flower.port = flower.port, int(wire.address.rpartition(":")[2])
        for number, site in enumerate(SITES):
            flower.start_node(number, config=f'table="{data / site}/train.csv"')
        flower.port = own
        run = flower.start_run(app, out)
        deadline = time.monotonic() + 300
        while not (out / "finished").exists():
            assert time.monotonic() < deadline and run.poll() in (None, 0), flower.log("run")
            time.sleep(0.2)
    with np.load(out / "params.npz") as result:
        params = [result[name] for name in result.files]
    return params, list(np.diff(np.loadtxt(out / "times"))), wire.num_bytes


def test_the_parameters_are_those_of_flower(tmp_path: Path) -> None:
    write_tables(tmp_path / "data")
    ours, our_seconds, our_bytes = run_sites(tmp_path / "fedpax", tmp_path / "data")
    (tmp_path / "flower").mkdir()
    theirs, their_seconds, their_bytes = run_flower(tmp_path / "flower", tmp_path / "data")
    by_shape = {x.shape: x for x in ours}
    difference = max(float(np.abs(by_shape[x.shape] - x).max()) for x in theirs)
    assert max(np.abs(x).max() for x in theirs) > 0.1
    print(f"\nlargest difference of a parameter: {difference:.1e}")
    print("| | seconds of a round, median | bytes on the wire in the whole run |\n|---|---|---|")
    for name, seconds, sent in (
        ("fedpax", our_seconds, our_bytes),
        ("Flower", their_seconds, their_bytes),
    ):
        print(f"| {name} | {np.median(seconds):.2f} | {sent:,} |")
    assert difference < 1e-5
