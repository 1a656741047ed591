"""The worker of a node outlives messages, and its socket is of one user alone."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from deploy import nodes
from hypothesis import given
from hypothesis import strategies as st

from fedpax.deploy.encoded_values import encode_values
from fedpax.deploy.flower import node_worker
from fedpax.deploy.flower.node_worker import WorkerError, forward, socket_folder
from fedpax.deploy.packets import Packet, receive, send
from fedpax.deploy.round_program import read_program

VALUES = st.dictionaries(st.text(), st.integers() | st.text() | st.booleans(), max_size=3)


@given(VALUES, st.lists(st.binary(max_size=99), max_size=3))
def test_packets_survive_a_socket(values, arrays):
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(target=send, args=(left, Packet(values, arrays)))
        thread.start()
        assert receive(right) == Packet(values, arrays)
        thread.join()


def test_a_cut_packet_is_told():
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(b"\0\0\0\0\0\0\0\5{}")
        with pytest.raises(ConnectionError, match="ended 3 bytes early"):
            receive(right)
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"GET / HT")
        with pytest.raises(ConnectionError, match="A header of"):
            receive(right)


@pytest.fixture
def supernode():
    """A process with which the worker ends."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def private(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path is too long for a socket
        monkeypatch.setattr(node_worker.tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_long_temporary_folder_is_not_used(monkeypatch):
    monkeypatch.setattr(node_worker.tempfile, "tempdir", "/tmp/" + "x" * 90)
    assert str(socket_folder()) == f"/tmp/fedpax-{os.getuid()}"


def test_a_worker_outlives_messages_and_ends_with_its_node(private, supernode):
    (private / "program.json").write_text(nodes.pack("scaffold"))
    program = read_program(private / "program.json")
    specification = {
        "program": str(private / "program.json"),
        "load_data": "deploy.nodes:load_data",
        "state_dir": str(private / "state"),
        "supernode": supernode.pid,
    }
    greeting = {"kind": "greeting", "program": program.program, "config": {"partition-id": 2}}
    answer = forward(Packet(greeting), 7, specification)
    assert answer.values["partition"] == 2 and answer.values["program"] == program.program
    (socket_path,) = socket_folder().glob("*.sock")
    assert socket_folder().stat().st_mode & 0o077 == 0
    state = program.initial_server(0)
    request = next(program.artifact.run(state))
    values = {
        **greeting,
        "kind": "train",
        "run": "r",
        "key": "0.0",
        "round": 0,
        "stage": 0,
        "counted": "",
        "participant": 1,
        "index": 1,
        "seed": 0,
    }
    shared = encode_values({str(i): x for i, x in enumerate(request.shared)})
    for _ in range(2):
        answer = forward(Packet(values, [shared, encode_values({})]), 7, specification)
        assert len(answer.arrays) == 2, answer.values
    other = forward(Packet({**greeting, "program": "f00"}), 7, specification)
    assert "This node has program" in other.values["refusal"]
    assert len(list(socket_folder().glob("*.sock"))) == 1  # one process answered all
    os.kill(supernode.pid, signal.SIGKILL)  # it stays a zombie, as in a container without init
    deadline = time.monotonic() + 30
    while socket_path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not socket_path.exists()


def sleep_on(node):
    (Path(node.config["mark"])).touch()
    time.sleep(600)


def test_a_worker_ends_with_its_node_in_the_middle_of_a_message(private, supernode):
    (private / "program.json").write_text(nodes.pack("fedavg"))
    program = read_program(private / "program.json")
    specification = {
        "program": str(private / "program.json"),
        "load_data": "deploy.test_node_worker:sleep_on",
        "state_dir": str(private / "state"),
        "supernode": supernode.pid,
    }
    mark = private / "loading"
    values = {
        "kind": "train",
        "program": program.program,
        "run": "r",
        "key": "0.0",
        "round": 0,
        "stage": 0,
        "counted": "",
        "participant": 1,
        "index": 1,
        "seed": 0,
        "config": {"mark": str(mark)},
    }
    shared = encode_values({"0": np.zeros(nodes.FEATURES, np.float32)})
    packet = Packet(values, [shared, encode_values({})])
    failures = []

    def ask():
        try:
            forward(packet, 7, specification)
        except ConnectionError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    supernode.kill()
    supernode.wait()
    thread.join(30)
    assert len(failures) == 1 and not list(socket_folder().glob("*.sock"))


def test_a_program_that_cannot_be_read_is_told_by_each_worker(private, supernode):
    specification = {
        "program": str(private / "absent.json"),
        "load_data": "deploy.nodes:load_data",
        "state_dir": str(private / "state"),
        "supernode": supernode.pid,
    }
    packet = Packet({"kind": "greeting", "program": "x", "config": {}})
    answer = forward(packet, 7, specification)
    assert "absent.json cannot be read" in answer.values["refusal"]


def test_a_folder_that_others_can_enter_is_refused(private):
    socket_folder().chmod(0o755)
    with pytest.raises(WorkerError, match="is not a private folder of this user"):
        socket_folder()


def test_a_worker_that_does_not_start_names_its_log(private, monkeypatch):
    monkeypatch.setattr(node_worker.sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match=r"did not start: no output\. Its log is .*\.log"):
        forward(Packet({}), 7, {"supernode": os.getpid()})
