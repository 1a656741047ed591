"""The control channel: threads that stand for processes, over real sockets."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fedpax.processes import communication
from fedpax.processes.communication import ControlChannel
from fedpax.processes.job_processes import JobProcessesError

Program = Callable[[ControlChannel, int], Any]


class Job:
    """Processes of a job as threads: `jax.process_index` is the thread's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.offer, self.ends = count, {}, []
        self._own, self._barrier = threading.local(), threading.Barrier(count)
        jax = SimpleNamespace(process_count=lambda: count, process_index=lambda: self._own.number)
        monkeypatch.setattr(communication, "jax", jax)
        monkeypatch.setattr(communication, "gather_json", self._gather)
        monkeypatch.setattr(communication, "SECONDS_TO_FAIL", 0.2)
        monkeypatch.setattr(communication, "SECONDS_TO_RELAY", 0.1)

    def _gather(self, value: Any) -> list[Any]:
        if self._own.number == 0:
            self.offer = value
        self._barrier.wait(10)
        return [self.offer]

    def run(self, program: Program, silence: float = 80.0) -> list[Any]:
        """Run a program in all processes; return their results, or the errors they raised."""

        def process(number: int) -> Any:
            self._own.number = number
            try:
                on_end = lambda text: self.ends.append((number, text))
                with ControlChannel(on_end, silence) as channel:
                    return program(channel, number)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(process, range(self.count)))


def test_all_processes_get_the_values_of_process_0_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 4)
    values = [{"round": i, "text": "x" * 10_000 * i} for i in range(20)]
    program = lambda channel, number: [
        channel.broadcast(value if number == 0 else None) for value in values
    ]
    assert job.run(program) == [values] * 4
    time.sleep(0.3)
    assert job.ends == []  # closed in order, although not at the same time


def test_a_process_that_ends_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 3)

    def program(channel: ControlChannel, number: int) -> str:
        if number == 2:  # as the operating system does when it kills a process
            for connection in channel._connections.values():
                connection.shutdown(socket.SHUT_RDWR)
            channel._connections.clear()
            return "killed"
        deadline = time.monotonic() + 5
        while {0, 1} - {end[0] for end in job.ends} and time.monotonic() < deadline:
            time.sleep(0.01)
        return "told"

    assert job.run(program) == ["told", "told", "killed"]
    ends = dict(job.ends)
    assert ends.keys() >= {0, 1}
    for number in (0, 1):  # process 0 tells the other ones
        assert ends[number].startswith("process 2 on ") and ends[number].endswith("has ended")


def test_a_process_that_fails_is_given_time_to_fail_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(channel: ControlChannel, number: int) -> None:
        if number == 1 or alike:
            raise ValueError("not finite")
        time.sleep(0.5)

    for alike in (True, False):
        job = Job(monkeypatch, 2)
        result = job.run(program)
        assert str(result[1]) == "not finite"
        if alike:
            assert str(result[0]) == "not finite" and job.ends == []
        else:
            ((number, text),) = job.ends
            assert number == 0 and text.endswith("has failed: ValueError: not finite")


def test_a_silent_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 3)

    def program(channel: ControlChannel, number: int) -> None:
        if number == 1:
            channel._send = lambda message: None  # such as a process that is stopped
        deadline = time.monotonic() + 5
        while 0 not in dict(job.ends) and time.monotonic() < deadline:
            time.sleep(0.01)

    job.run(program, silence=0.4)
    text = dict(job.ends)[0]
    assert text.startswith("process 1 on ") and text.endswith("has sent nothing for 0.4 s")


@pytest.mark.parametrize("line", [b"[" * 100_000 + b"\n", b"\xff\n", b"[1]\n"])
def test_a_line_that_is_no_message_is_named(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    job = Job(monkeypatch, 2)

    def program(channel: ControlChannel, number: int) -> None:
        if number == 0:
            channel._connections[1].sendall(line)
        deadline = time.monotonic() + 5
        while not job.ends and time.monotonic() < deadline:
            time.sleep(0.01)

    job.run(program)
    assert any(number == 1 and "has sent no JSON object" in text for number, text in job.ends)


def test_strangers_are_ignored_and_missing_processes_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 2)
    monkeypatch.setattr(communication, "SECONDS_TO_GREET", 0.5)
    connect = communication._connect
    silent = []

    def strangers(offer: dict[str, Any]) -> Any:
        address = ("localhost", offer["port"])
        silent.extend(socket.create_connection(address) for _ in range(20))  # 0.5 s each
        texts = (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", json.dumps([]).encode() + b"\n", b"")
        for text in (*texts, b"[" * 100_000, b"[" * 50_000 + b"\n"):
            with socket.create_connection(("localhost", offer["port"])) as stranger:
                stranger.sendall(text)
        return connect(offer)

    monkeypatch.setattr(communication, "_connect", strangers)
    began = time.monotonic()
    assert job.run(lambda channel, number: channel.broadcast(number)) == [0, 0]
    assert time.monotonic() - began < 5
    for stranger in silent:
        stranger.close()
    monkeypatch.setattr(communication, "SECONDS_TO_CONNECT", 0.5)
    wrong = lambda offer: connect({**offer, "token": "another job's"})
    monkeypatch.setattr(communication, "_connect", wrong)
    first, second = job.run(lambda channel, number: None)
    assert isinstance(first, JobProcessesError) and "processes [1] did not connect" in str(first)
    assert "Let the hosts of the job connect to each other on any port" in str(first)
    assert isinstance(second, JobProcessesError) and "cannot connect to process 0 on" in str(second)
