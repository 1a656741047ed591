"""Processes that do not form a job raise in every process, with the missing ones and the remedy."""

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.processes.job_processes import (
    JobProcesses,
    JobProcessesError,
    call_roll,
    find_job_processes,
    wait_for_coordinator,
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def results(clusters: Sequence[JobProcesses], timeout: float = 30.0) -> list[str]:
    """Call the roll in a thread per process; return "" or the message of each."""
    result = ["no result"] * len(clusters)

    def call(i: int, cluster: JobProcesses) -> None:
        try:
            call_roll(cluster, timeout)
            result[i] = ""
        except JobProcessesError as error:
            result[i] = str(error)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(clusters)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return result


def process(port: int, number: int, count: int) -> JobProcesses:
    return JobProcesses(f"localhost:{port}", count, number, "JAX_NUM_PROCESSES")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_all_processes_pass_and_the_port_is_free_again(order: Sequence[int]) -> None:
    port = free_port()
    assert results([process(port, number, 4) for number in order]) == [""] * 4
    with socket.create_server(("localhost", port)):
        pass


def test_after_the_roll_call_processes_wait_for_the_coordinator() -> None:
    port, began = free_port(), time.monotonic()
    seconds = []

    def join() -> None:
        call_roll(process(port, 1, 2), 30.0)
        wait_for_coordinator(process(port, 1, 2), 30.0)
        seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=join)
    thread.start()
    call_roll(process(port, 0, 2), 30.0)
    time.sleep(0.2)
    assert not seconds  # the roll call itself is no coordinator
    listening = time.monotonic() - began
    with socket.create_server(("localhost", port)):
        thread.join()
    assert seconds[0] >= listening
    wait_for_coordinator(process(port, 1, 2), 0.05)  # JAX reports that there is none


def test_a_missing_process_is_named_in_every_process() -> None:
    port = free_port()
    first, other = results([process(port, 0, 4), process(port, 2, 4)], timeout=0.5)
    assert "2 of 4 processes did not come within 0.5 s: 1, 3. Present: 0 on " in first
    assert "raise --join_timeout" in first and "JAX_NUM_PROCESSES" in first
    assert other == f"process 2: {first}"


def test_a_process_with_another_count_is_turned_away() -> None:
    port = free_port()
    first, wrong, right = results([process(port, i, n) for i, n in [(0, 2), (1, 3), (1, 2)]])
    assert (first, right) == ("", "")
    assert "started with 3 processes, process 0 with 2" in wrong
    assert "Set the same JAX_NUM_PROCESSES" in wrong


def test_a_number_given_twice_is_turned_away() -> None:
    port = free_port()
    first, one, twice, last = results([process(port, i, 3) for i in (0, 1, 1, 2)])
    assert (first, one, last) == ("", "", "")
    assert "Give every process its own JAX_PROCESS_ID" in twice


def test_a_process_that_ended_while_it_waited_can_come_again() -> None:
    port = free_port()
    listening = threading.Event()

    def come_and_go() -> None:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                connection = socket.create_connection(("localhost", port))
                break
        text = b'{"greeting": "fedpax roll call 1", "process": 1, "count": 3, "host": "a"}\n'
        connection.sendall(text)
        time.sleep(0.1)
        connection.close()
        listening.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    collected: list[str] = []
    server = threading.Thread(target=lambda: collected.extend(results([process(port, 0, 3)])))
    server.start()
    listening.wait()
    assert results([process(port, 1, 3), process(port, 2, 3)]) == ["", ""]
    thread.join()
    server.join()
    assert collected == [""]


WRONG = b'{"greeting": "fedpax roll call 1", "process": 7, "count": 2, "host": "a"}\n'


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        *(b"", b"[1]\n", b"\xff\n", b"9" * 9000, b"9" * 90_000),
        b"[" * 100_000,
        b"[" * 60_000 + b"\n",
        WRONG,
    ],
)
def test_strangers_at_the_port_are_ignored(text: bytes) -> None:
    port = free_port()
    first: list[str] = []
    listener = threading.Thread(target=lambda: first.extend(results([process(port, 0, 2)])))
    listener.start()
    for _ in range(200):  # until process 0 listens
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("localhost", port))
            break
        time.sleep(0.05)
    with connection:
        connection.sendall(text)
    assert results([process(port, 1, 2)]) == [""]
    listener.join()
    assert first == [""]


def test_slow_strangers_delay_no_process_and_do_not_prolong_the_wait() -> None:
    port, ended = free_port(), threading.Event()

    def send_slowly() -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("localhost", port)) as connection,
            ):
                while not ended.wait(0.1):
                    connection.sendall(b"[")

    strangers = [threading.Thread(target=send_slowly) for _ in range(10)]
    for stranger in strangers:
        stranger.start()
    try:
        began = time.monotonic()
        assert results([process(port, number, 3) for number in (0, 1, 2)]) == [""] * 3
        assert time.monotonic() - began < 1.5  # SECONDS_TO_TALK is 2
        began = time.monotonic()
        (message,) = results([process(port, 0, 2)], timeout=0.6)
        assert "1 of 2 processes did not come within 0.6 s: 1" in message
        assert time.monotonic() - began < 1.5
    finally:
        ended.set()
        for stranger in strangers:
            stranger.join()


def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(
        JobProcessesError, match=rf"found no process 0 at localhost:{port} within 0.3 s"
    ):
        call_roll(process(port, 1, 2), timeout=0.3)
    with pytest.raises(
        JobProcessesError, match=r"Read the log of process 0; check that the address"
    ):
        call_roll(JobProcesses("no-such-host.invalid:80", 2, 1, "SLURM_*"), timeout=0.3)


def test_another_program_listens_there() -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(JobProcessesError, match="another program listens there"):
            call_roll(process(port, 1, 2), timeout=0.5)
        with pytest.raises(
            JobProcessesError, match=rf"cannot listen on port {port}.*choose another port"
        ):
            call_roll(process(port, 0, 2), timeout=0.5)


SLURM = {
    "SLURM_JOB_ID": "81",
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("gpu-a[007-012,20],x", "gpu-a007"),
        ("n[3,5]", "n3"),
        ("a.b.c,d", "a.b.c"),
    ],
)
def test_the_coordinator_of_a_slurm_step_is_its_first_host(nodes: str, host: str) -> None:
    processes = find_job_processes(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert processes == (f"{host}:{61440 + 81}", 4, 3, "SLURM_*")
    assert (processes.host, processes.port) == (host, 61521)


@given(st.integers(1, 10**8))
def test_the_port_of_a_slurm_job_is_a_port(job: int) -> None:
    processes = find_job_processes(SLURM | {"SLURM_JOB_ID": str(job)})
    assert processes is not None and 61440 <= processes.port <= 65535


def test_explicit_variables_take_precedence() -> None:
    assert find_job_processes(EXPLICIT)[:3] == ("10.0.0.1:8476", 2, 1)
    assert find_job_processes(SLURM | EXPLICIT)[:3] == ("10.0.0.1:8476", 2, 1)
    assert find_job_processes(SLURM | {"JAX_COORDINATOR_PORT": "9000"})[:3] == ("node7:9000", 4, 3)
    assert (
        find_job_processes({**EXPLICIT, "JAX_COORDINATOR_ADDRESS": "[fd00::1]:80"}).host
        == "fd00::1"
    )
    assert find_job_processes({}) is None
    # An allocation (salloc, sbatch) without a step has no processes yet.
    assert find_job_processes({"SLURM_JOB_ID": "81", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"JAX_PROCESS_ID": ""}, r"but not JAX_PROCESS_ID, expected all three. Set"),
        ({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}, "is set, but not JAX_NUM_PROCESSES and"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "is not an address, expected HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "http://a:80"}, "is not an address, expected HOST:PORT"),
        ({"JAX_PROCESS_ID": "2"}, "Number the processes from 0"),
        ({"JAX_PROCESS_ID": "-1"}, "Number the processes from 0"),
        ({"JAX_NUM_PROCESSES": "two"}, "0 <= JAX_PROCESS_ID < JAX_NUM_PROCESSES"),
    ],
)
def test_variables_that_do_not_fit_raise_with_a_remedy(changes: dict, remedy: str) -> None:
    with pytest.raises(JobProcessesError, match=remedy):
        find_job_processes(EXPLICIT | changes)
