"""Rounds on Flower's own processes: a simulation, three SuperNodes, a lost node, TLS with keys.

Runs where flwr is installed, or with FEDPAX_FLWR=ENVIRONMENT, a virtual environment that has flwr
and fedpax: `pytest -m slow tests/deploy/test_flower_nodes.py`.
"""

import json
import subprocess
import time

import jax
import numpy as np
import pytest
from deploy import nodes
from deploy.flower_processes import ENVIRONMENT, Flower, binaries
from deploy.nodes import SETTINGS, N

from fedpax.aggregators import PrivacyAccountant
from fedpax.deploy.flower.app_files import PACKAGE, write_app
from fedpax.deploy.nodes.kept_state import KeptState
from fedpax.deploy.round_program import parse_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        binaries() is None,
        reason=f"flwr is not installed: set {ENVIRONMENT} to a virtual environment that has it",
    ),
]

LINK = ("--insecure", "--disable-runtime-dependency-installation")


def make_app(folder, method, data="from deploy.nodes import load_data"):
    text = nodes.pack(method)
    write_app(
        folder,
        name=method,
        program=text,
        settings=nodes.SETTINGS,
        size=nodes.N,
        participants="clients",
    )
    (folder / PACKAGE / "data.py").write_text(data)
    return parse_program(text)


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_equals(out, expected):
    state = np.load(out / "state.npz")
    for name in ("params", "control"):
        for path, leaf in jax.tree.leaves_with_path(getattr(expected, name, {})):
            result = state[f"state.{name}{jax.tree_util.keystr(path)}"]
            assert np.isfinite(result).all()
            np.testing.assert_allclose(result, leaf, rtol=0, atol=1e-6)


def assert_kept(flower, program, expected, counted):
    """Each node has the row of its participant, as the round that last counted it made it."""
    for k in range(N):
        (folder,) = flower.disk(k).glob(f"*/{program.program[:16]}/{k}")
        (kept,) = KeptState(folder).read(counted).values()
        want = expected.client_controls.rows["w"][k]
        np.testing.assert_allclose(kept, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", nodes.METHODS)
def test_three_nodes_equal_the_compiled_rounds(method, tmp_path):
    app, out = tmp_path / "app", tmp_path / "out"
    program = make_app(app, method)
    with Flower(tmp_path, LINK) as flower:
        for k in range(N):
            flower.start_node(k)
        flower.finish(flower.start_run(app, out), out)
        expected = nodes.by_jit(method)[-1]
        assert_equals(out, expected)
        assert [m["participants"] for m in metrics_of(out)] == [N] * SETTINGS.rounds
        if method == "scaffold":
            assert_kept(flower, program, expected, f"{SETTINGS.rounds - 1}.0")


SLOW_DATA = """
import os, time
from pathlib import Path
import numpy as np
from deploy import nodes

def load_data(node):
    rounds = nodes.rounds_of()
    marks = Path(os.environ["FEDPAX_TEST_MARKS"])

    def cohort(number):
        if node.participant == 1 and number == 1 and not (marks / "killed").exists():
            (marks / "working").touch()
            time.sleep(600)
        return rounds.read_clients(number, np.array([node.participant]))

    return cohort
"""


def test_a_node_that_is_killed_in_a_round_returns_with_its_state(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPAX_TEST_MARKS", str(tmp_path))
    app, out = tmp_path / "app", tmp_path / "out"
    make_app(app, "scaffold", SLOW_DATA)
    with Flower(tmp_path, LINK) as flower:
        for k in range(N):
            flower.start_node(k)
        run = flower.start_run(app, out, quorum=2, deadline=60.0, rounds=8)
        deadline = time.monotonic() + 240
        while not (tmp_path / "working").exists():
            assert time.monotonic() < deadline, flower.log("run")
            time.sleep(0.2)
        flower.kill_node(1)
        (tmp_path / "killed").touch()
        flower.start_node(1)
        log = flower.finish(run, out)
    counts = [m["participants"] for m in metrics_of(out)]
    assert counts[:2] == [3, 2] and counts[-1] == 3, log
    rounds = SETTINGS._replace(rounds=8)
    monkeypatch.setattr(nodes, "SETTINGS", rounds)
    expected = nodes.by_jit("scaffold", lambda number: [1] if counts[number] == 2 else [])
    assert_equals(out, expected[-1])


def test_tls_and_the_keys_of_nodes(tmp_path):
    make_certificates(tmp_path)
    app, out = tmp_path / "app", tmp_path / "out"
    make_app(app, "fedavg")
    link = (
        "--ssl-ca-certfile",
        str(tmp_path / "ca.crt"),
        "--ssl-certfile",
        str(tmp_path / "link.crt"),
        "--ssl-keyfile",
        str(tmp_path / "link.key"),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    )
    node = ("--root-certificates", str(tmp_path / "ca.crt"))
    connection = f'root-certificates = "{tmp_path / "ca.crt"}"'
    with Flower(tmp_path, link, node, connection) as flower:
        for k in range(N):
            key = tmp_path / f"node{k}_key"
            make_key(key)
            flower.flwr("supernode", "register", f"{key}.pub", "test")
            flower.start_node(k, "--auth-supernode-private-key", str(key))
        flower.finish(flower.start_run(app, out), out)
        stranger = tmp_path / "stranger_key"
        make_key(stranger)
        flower.start_node(3, "--auth-supernode-private-key", str(stranger))
        deadline = time.monotonic() + 60
        while flower.nodes[3].poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "SuperNode ID" not in flower.log("node3")
    assert_equals(out, nodes.by_jit("fedavg")[-1])


def make_key(path):
    """An elliptic-curve key as Flower's documentation makes it, in OpenSSH's format."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path), "-C", ""],
        check=True,
    )


def make_certificates(folder):
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
    )
    openssl(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-keyout",
        "link.key",
        "-out",
        "link.csr",
    )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        "x509",
        "-req",
        "-in",
        "link.csr",
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
        "-out",
        "link.crt",
    )


def test_a_simulation_equals_the_compiled_rounds(tmp_path):
    app, out = tmp_path / "app", tmp_path / "out"
    make_app(app, "scaffold")
    link = ("--insecure", "--simulation")
    connection = f"insecure = true\noptions.num-supernodes = {N}"
    with Flower(tmp_path, link, connection=connection) as flower:
        flower.environment["FEDPAX_STATE_DIR"] = str(tmp_path / "states")
        flower.finish(flower.start_run(app, out), out)
    assert_equals(out, nodes.by_jit("scaffold")[-1])


@pytest.mark.parametrize(("protocol", "number"), [("fedpax", 4), ("secagg+", 3)])
def test_secure_sums_equal_the_compiled_rounds_also_without_a_node(
    protocol, number, tmp_path, monkeypatch
):
    nodes.use_nodes(monkeypatch, number)
    monkeypatch.setenv("FEDPAX_TEST_MARKS", str(tmp_path))
    app, out = tmp_path / "app", tmp_path / "out"
    make_app(app, "scaffold", SLOW_DATA)
    settings = {"secure-protocol": f'"{protocol}"', "quorum": number - 1, "deadline": 90.0}
    with Flower(tmp_path, LINK) as flower:
        for k in range(number):
            flower.start_node(k)
        run = flower.start_run(app, out, secure="true", **settings)
        deadline = time.monotonic() + 400
        while not (tmp_path / "working").exists():
            assert time.monotonic() < deadline, flower.log("run")
            time.sleep(0.2)
        flower.kill_node(1)
        (tmp_path / "killed").touch()
        log = flower.finish(run, out)
    counts = [m["participants"] for m in metrics_of(out)]
    assert counts == [number, number - 1, number - 1], log
    assert_equals(out, nodes.by_jit("scaffold", lambda number: [1] if number else [])[-1])


@pytest.mark.parametrize("protocol", ["fedpax", "secagg+"])
def test_private_means_are_within_the_noise(protocol, tmp_path, monkeypatch):
    nodes.use_nodes(monkeypatch, 4)
    app, out = tmp_path / "app", tmp_path / "out"
    make_app(app, "private")
    settings = {"secure-protocol": f'"{protocol}"', "quorum": 3}
    with Flower(tmp_path, LINK) as flower:
        for k in range(4):
            flower.start_node(k)
        flower.finish(flower.start_run(app, out, secure="true", **settings), out)
    loaded = np.load(out / "state.npz")["state.params['w']"]
    difference = np.abs(loaded - nodes.by_jit("private")[-1].params["w"]).max()
    assert 0 < difference < 3 * 15 * nodes.PRIVATE_NOISE / 4
    accountant = PrivacyAccountant(nodes.PRIVATE_NOISE, 1e-6, discrete=True)
    stated = [accountant.epsilon(r) for r in range(1, SETTINGS.rounds + 1)]
    np.testing.assert_allclose([m["epsilon"] for m in metrics_of(out)], stated, rtol=1e-5)


EMPTY_SERVER = """
import json, time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    out.mkdir(parents=True)
    with (out / "metrics.jsonl").open("a") as file:
        for number in range(context.run_config["rounds"]):
            first = time.monotonic()
            messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
            sent, got = list(grid.push_messages(messages)), 0
            while got < len(sent):
                got += len(list(grid.pull_messages(sent)))
                time.sleep(0.25)
            seconds = time.monotonic() - first
            file.write(json.dumps({"seconds": seconds}) + "\\n")
    (out / "finished").touch()
"""

EMPTY_CLIENT = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""


def seconds_of_a_round(runs, folder):
    """Return the median seconds of a round of each run; the runs alternate."""
    seconds = {name: [] for name in runs}
    with Flower(folder, LINK) as flower:
        for k in range(N):
            flower.start_node(k)
        for pair in range(3):
            for name, (app, settings) in runs.items():
                out = folder / f"{name}{pair}"
                flower.finish(flower.start_run(app, out, rounds=4, **settings), out, 900)
                # The first round waits for nodes, and compiles.
                seconds[name] += [m["seconds"] for m in metrics_of(out)[1:]]
    print({name: np.round(values, 1).tolist() for name, values in seconds.items()})
    return [float(np.median(values)) for values in seconds.values()]


def test_a_round_takes_about_as_long_as_one_of_an_empty_app(tmp_path):
    app, empty = tmp_path / "app", tmp_path / "empty"
    for folder in (app, empty):
        make_app(folder, "scaffold")
    (empty / PACKAGE / "server_app.py").write_text(EMPTY_SERVER)
    (empty / PACKAGE / "client_app.py").write_text(EMPTY_CLIENT)
    ours, floor = seconds_of_a_round({"run": (app, {}), "floor": (empty, {})}, tmp_path)
    print(f"{N} nodes: {ours:.1f} s a round, {floor:.1f} s for an empty app, {ours / floor:.2f}")
    assert ours <= 1.3 * floor


def test_a_round_of_secure_sums_takes_about_as_long_as_four_rounds(tmp_path):
    app = tmp_path / "app"
    make_app(app, "fedavg")
    runs = {"plain": (app, {}), "secure": (app, {"secure": "true"})}
    plain, secure = seconds_of_a_round(runs, tmp_path)
    print(f"{N} nodes: {secure:.1f} s a secure round, {plain:.1f} s else, {secure / plain:.2f}")
    assert secure <= 1.3 * 4 * plain  # it has four exchanges
