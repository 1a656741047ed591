"""The keeper of an elastic job, with supervisors that are sockets of this test."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedpax.elastic import elastic_coordinator as keeper
from fedpax.elastic.elastic_coordinator import ElasticCoordinator
from fedpax.processes.job_processes import JobProcesses, JobProcessesError
from fedpax.processes.json_line_socket import JsonLineSocket

HEARTBEAT = 3.0


class Supervisor:
    """A supervisor of no process: the test says how its training process ends."""

    def __init__(self, port: int, number: int, count: int) -> None:
        self.lines = JsonLineSocket(socket.create_connection(("localhost", port)))
        self.lines.send(process=number, count=count, host=f"host{number}")
        self.lines.connection.settimeout(0.02)
        self.messages: list[dict[str, Any]] = []
        self.generation, self.job = 0, ""

    def expect(self, key: str, *, skip: str = "beat") -> dict[str, Any]:
        """Return the next message with a key; none but beats, and `skip`, may precede it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            while self.messages:
                message = self.messages.pop(0)
                if not {"beat", skip} & message.keys():
                    assert key in message, message
                    self.generation = message.get("start", self.generation)
                    self.job = message.get("job", self.job)
                    return message
            self.read()
        raise AssertionError(f"no message with {key}")

    def read(self) -> None:
        with contextlib.suppress(TimeoutError):
            part = self.lines.connection.recv(65536)
            self.lines._rest += part
            *lines, self.lines._rest = self.lines._rest.split(b"\n")
            self.messages += [json.loads(line) for line in lines]

    def end(self, status: int, round_number: int = 0, copies: tuple[int, ...] = ()) -> None:
        names = [f"{self.job}-{number}" for number in copies] + ["other-99"]
        self.lines.send(ended=status, generation=self.generation, round=round_number, copies=names)

    def leave(self) -> None:
        self.lines.connection.close()


Start = Callable[..., tuple[Supervisor, ...]]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def start(messages: list[str]) -> Iterator[Start]:
    """Start a keeper and its supervisors, all of which train in the first generation."""
    supervisors: list[Supervisor] = []

    def begin(count: int, **settings: Any) -> tuple[Supervisor, ...]:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        cluster = JobProcesses(f"localhost:{port}", count, 0, "JAX_*")
        timeouts = {"join_timeout": 1.0, "heartbeat_timeout": HEARTBEAT}
        ElasticCoordinator(cluster, **timeouts, **settings, tell=messages.append)
        supervisors.extend(Supervisor(port, number, count) for number in range(count))
        for supervisor in supervisors:
            assert supervisor.expect("start")["members"] == list(range(count))
        return tuple(supervisors)

    yield begin
    for supervisor in supervisors:
        supervisor.leave()


def join(supervisors: tuple[Supervisor, ...], number: int) -> Supervisor:
    port = supervisors[0].lines.connection.getpeername()[1]
    return Supervisor(port, number, len(supervisors))


def test_a_job_that_finishes(start: Start) -> None:
    everyone = start(3)
    for supervisor in everyone:
        supervisor.end(0)
    assert [supervisor.expect("stop")["stop"] for supervisor in everyone] == [0, 0, 0]


def test_those_that_are_left_train_and_the_lost_one_rejoins(
    start: Start, messages: list[str]
) -> None:
    everyone = start(3)
    first, lost, last = everyone
    lost.leave()
    for supervisor in (first, last):
        assert supervisor.expect("kill")["kill"] == 1
        supervisor.end(137)
    again = [supervisor.expect("start") for supervisor in (first, last)]
    assert [message["members"] for message in again] == [[0, 2], [0, 2]]
    assert len({message["port"] for message in again}) == 1
    back = join(everyone, 1)
    assert first.expect("save")["save"] == 2  # one saves, and JAX makes the other save too
    for supervisor in (first, last):
        supervisor.end(143, round_number=7)
    for supervisor in (first, last, back):
        assert supervisor.expect("start")["members"] == [0, 1, 2]
    assert messages == [
        "process 1 on host1 is gone",
        "start 2: 2 of 3 processes train",
        "process 1 on host1 has joined",
        "start 3: 3 of 3 processes train",
    ]
    back.leave()


def test_all_but_one_are_lost_at_once(start: Start) -> None:
    first, *others = start(4)
    for supervisor in others:
        supervisor.leave()
    first.expect("kill")
    first.end(137)
    message = first.expect("start")
    while message["members"] != [0]:  # those that the keeper had not missed yet
        first.end(137)
        message = first.expect("start")
    first.end(0)
    assert first.expect("stop")["stop"] == 0


def test_a_training_process_that_dies_starts_again_with_the_others(start: Start) -> None:
    first, other = start(2)
    other.end(137)
    first.expect("kill")
    first.end(137)
    assert first.expect("start")["members"] == other.expect("start")["members"] == [0, 1]


def test_three_failures_without_a_new_round_end_the_job(start: Start) -> None:
    (supervisor,) = start(1)
    for round_number in (3, 3, 6, 6):  # two failures, progress, and two failures
        supervisor.end(1, round_number)
        supervisor.expect("start")
    supervisor.end(1, 6)
    message = supervisor.expect("stop")
    assert message["stop"] == 1
    assert "3 times without a new round. Correct the cause" in message["reason"]


def test_the_newest_copies_that_all_have_are_used(start: Start, messages: list[str]) -> None:
    everyone = start(3)
    everyone[0].end(1, 5, copies=(6, 7))  # its collective failed
    everyone[1].end(137, 5, copies=(7, 8))
    everyone[2].end(137, 5, copies=(6, 7))
    for supervisor in everyone:
        assert supervisor.expect("start", skip="kill")["round"] == 7
    assert messages == ["start 2: 3 of 3 processes train from the copies of round 7"]


def test_copies_that_do_not_help_are_not_used(start: Start) -> None:
    (supervisor,) = start(1)
    supervisor.end(137, 4, copies=(3, 4))  # not newer than the checkpoint
    assert supervisor.expect("start")["round"] is None
    supervisor.end(1, 4, copies=(5, 6))
    assert supervisor.expect("start")["round"] == 6
    supervisor.end(137, 4, copies=(5, 6))  # killed from outside: it can succeed from there
    assert supervisor.expect("start")["round"] == 6
    supervisor.end(1, 4, copies=(6, 7))
    assert supervisor.expect("start")["round"] == 7
    supervisor.end(1, 4, copies=(6, 7))  # the program fails in round 8 again
    assert supervisor.expect("start")["round"] is None


def test_a_process_without_the_copy_joins_after_a_save(start: Start) -> None:
    first, lost, last = everyone = start(3)
    lost.leave()
    first.expect("kill")
    back = join(everyone, 1)  # before the others have ended
    time.sleep(0.3)
    for supervisor in (first, last):
        supervisor.end(137, 0, copies=(3, 4))
    for supervisor in (first, last):
        message = supervisor.expect("start", skip="kill")
        assert (message["members"], message["round"]) == ([0, 2], 4)
    first.expect("save")
    for supervisor in (first, last):
        supervisor.end(143, 5, copies=(4, 5))
    for supervisor in (first, last, back):
        message = supervisor.expect("start", skip="kill")
        assert (message["members"], message["round"]) == ([0, 1, 2], None)
    back.leave()


def test_processes_of_an_island_train_together(start: Start) -> None:
    everyone = start(6, group=2)
    everyone[1].leave()
    rest = [supervisor for supervisor in everyone if supervisor is not everyone[1]]
    for supervisor in rest:
        supervisor.expect("kill")
        supervisor.end(137, 0, copies=(2, 3))
    for supervisor in rest[1:]:
        message = supervisor.expect("start")
        assert message["members"] == [2, 3, 4, 5]
        assert message["address"] == "localhost"  # as in the keeper's own address
    back = join(everyone, 1)
    rest[1].expect("save")
    back.leave()


@pytest.mark.parametrize("wrong", [{"round": "x", "copies": 3}, {"copies": [1, None, "a-b"]}, {}])
def test_messages_with_wrong_fields_do_not_end_the_keeper(
    start: Start, wrong: dict[str, Any]
) -> None:
    first, other = start(2)
    other.lines.send(signal="x")
    other.lines.send(ended="x", generation=1, **wrong)
    first.expect("kill")
    first.end(137)
    assert first.expect("start")["round"] is None


def test_a_failure_that_follows_from_a_lost_host_is_no_wrong_configuration(start: Start) -> None:
    first, second, third = start(3)
    third.leave()
    first.expect("kill")
    first.end(2)  # its roll call failed
    second.end(2)
    assert (
        first.expect("start")["members"] == second.expect("start", skip="kill")["members"] == [0, 1]
    )


def test_a_configuration_that_is_wrong_ends_the_job(start: Start) -> None:
    first, other = start(2)
    first.end(2)
    other.expect("kill")
    other.end(2)
    assert (first.expect("stop")["stop"], other.expect("stop")["stop"]) == (2, 2)


def test_a_mesh_that_does_not_fit_gets_fewer_processes(start: Start, messages: list[str]) -> None:
    *fit, spare, lost = everyone = start(4)
    lost.leave()
    for supervisor in (*fit, spare):
        supervisor.expect("kill")
        supervisor.end(137)
    for supervisor in (*fit, spare):
        assert supervisor.expect("start")["members"] == [0, 1, 2]
    for supervisor in (*fit, spare):
        supervisor.end(2)
    for supervisor in fit:
        assert supervisor.expect("start", skip="kill")["members"] == [0, 1]
    assert "the mesh does not fit 3 processes" in messages
    # The fourth makes the mesh fit again.
    back = join(everyone, 3)
    fit[0].expect("save")
    for supervisor in fit:
        supervisor.end(143, 5)
    for supervisor in (*fit, spare, back):
        assert supervisor.expect("start", skip="kill")["members"] == [0, 1, 2, 3]
    back.leave()


def test_a_signal_stops_all(start: Start) -> None:
    first, other = start(2)
    other.lines.send(signal=143)
    other.end(143, 4)
    first.end(143, 4)
    assert (first.expect("stop")["stop"], other.expect("stop")["stop"]) == (143, 143)


@pytest.mark.slow
def test_a_silent_supervisor_is_lost(start: Start, messages: list[str]) -> None:
    first, _silent = start(2)
    for _ in range(int(HEARTBEAT * 10 + 20)):
        first.lines.send(beat=True)
        first.read()
        if messages:
            break
        time.sleep(0.1)
    assert messages == ["process 1 on host1 is silent"]
    first.expect("kill")


def test_strangers_and_wrong_counts_are_refused(start: Start) -> None:
    first, other = everyone = start(2)
    twice = join(everyone, 1)
    assert "expected one supervisor per number" in twice.expect("stop")["reason"]
    port = first.lines.connection.getpeername()[1]
    wrong = Supervisor(port, 1, 3)
    assert "started with 3 processes, process 0 with 2" in wrong.expect("stop")["reason"]
    for number in (2, -1, [1], True, None):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(json.dumps({"process": number, "count": 2}).encode() + b"\n")
            assert b"expected 0 to 1. Number the processes from 0" in stranger.recv(1000)
    copies = {"process": 5, "count": 2, "copies": ["9" * 5000]}
    texts = [b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n", json.dumps(copies).encode()]
    for text in [*texts, b"[" * 200_000]:
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(text)
    for supervisor in (first, other):
        supervisor.end(0)
    assert first.expect("stop")["stop"] == other.expect("stop")["stop"] == 0
    for supervisor in (twice, wrong):
        supervisor.leave()


def test_slow_and_many_strangers_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SECONDS_TO_GREET", 0.3)
    monkeypatch.setattr(keeper, "MOST_STRANGERS", 3)
    everyone = start(2)
    port = everyone[0].lines.connection.getpeername()[1]
    crowd = [socket.create_connection(("localhost", port)) for _ in range(5)]
    assert [supervisor.recv(1) for supervisor in crowd[:2]] == [b"", b""]  # the oldest make room
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 5:
            crowd[-1].sendall(b"[")  # a byte now and then, never a line
            time.sleep(0.05)
    assert time.monotonic() - began < 2
    for supervisor in everyone:
        supervisor.end(0)
    assert [supervisor.expect("stop")["stop"] for supervisor in everyone] == [0, 0]
    for supervisor in crowd:
        supervisor.close()


def test_the_job_starts_without_those_that_do_not_come(messages: list[str]) -> None:
    with socket.create_server(("localhost", 0)) as used:
        port = used.getsockname()[1]
        cluster = JobProcesses(f"localhost:{port}", 3, 0, "JAX_*")
        with pytest.raises(JobProcessesError, match=f"cannot listen on port {port}"):
            ElasticCoordinator(
                cluster, join_timeout=0.3, heartbeat_timeout=HEARTBEAT, tell=messages.append
            )
    ElasticCoordinator(cluster, join_timeout=0.3, heartbeat_timeout=HEARTBEAT, tell=messages.append)
    present = [Supervisor(port, number, 3) for number in (0, 2)]
    for supervisor in present:
        assert supervisor.expect("start")["members"] == [0, 2]
        supervisor.end(0)
    assert messages == ["start 1: 2 of 3 processes train"]
    for supervisor in present:
        supervisor.expect("stop")
        supervisor.leave()


def test_a_keeper_alone_needs_no_process_0(messages: list[str]) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    cluster = JobProcesses(f"localhost:{port}", 3, 0, "JAX_*")
    timeouts = {"join_timeout": 0.3, "heartbeat_timeout": HEARTBEAT}
    keeper = ElasticCoordinator(cluster, **timeouts, alone=True, tell=messages.append)
    present = [Supervisor(port, number, 3) for number in (1, 2)]
    for supervisor in present:
        assert supervisor.expect("start")["members"] == [1, 2]
    keeper.signal(143)
    assert present[0].expect("save")["save"] == 1
    for supervisor in present:
        supervisor.end(143, 3)
    for supervisor in present:
        assert supervisor.expect("stop")["stop"] == 143
        supervisor.leave()
    keeper.join(5)
    assert keeper.status == 143
