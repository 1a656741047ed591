"""Strangers at a syncer's port: silent, half-open and very many calls keep no island from it."""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from test_transport import LIMIT, METHOD, answer, assert_answers, raw_connection

from fedpax.transport.call_limits import CallPool
from fedpax.transport.calls import RefusedError, connect, serve
from fedpax.transport.message import Message, encode

MAX_CALLS = 4


@contextlib.contextmanager
def calls(port: int, chunks: list[bytes], *, count: int, end: bool) -> Iterator[None]:
    """Open calls that send chunks and read no answer; those without an end are silent then."""
    released = threading.Event()

    def stream() -> Iterator[bytes]:
        yield from chunks
        if not end:
            released.wait(60)

    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"localhost:{port}", options) as channel:
        opened = [channel.stream_stream(METHOD)(stream()) for _ in range(count)]
        time.sleep(0.3)  # they take all places
        yield
        released.set()
        for call in opened:
            call.cancel()


X = np.random.default_rng(0).integers(0, 256, LIMIT // 2, np.uint8)
PUSH = list(encode(Message({}, {"x": X}), LIMIT))


@pytest.mark.parametrize(
    ("chunks", "end"),
    [([], False), (PUSH[:1], False), (PUSH[:2], False), (PUSH, True)],
    ids=["nothing", "a header", "a part", "unread answers"],
)
def test_silent_calls_keep_no_island_from_the_server(chunks: list[bytes], end: bool) -> None:
    with serve(answer, "localhost:0", max_message_bytes=LIMIT, max_calls=MAX_CALLS) as server:
        with connect(f"localhost:{server.port}", max_message_bytes=LIMIT) as connection:
            with calls(server.port, chunks, count=3 * MAX_CALLS, end=end):
                for seed in range(5):
                    assert_answers(connection, seed, seconds=5.0)


def test_a_call_that_is_handled_is_not_ended() -> None:
    with serve(answer, "localhost:0", max_calls=2) as server, ThreadPoolExecutor() as threads:
        with connect(f"localhost:{server.port}") as connection:
            sleep = Message({"kind": "sleep", "seconds": 1.0})
            slow = threads.submit(connection.call, sleep, 10)
            time.sleep(0.1)
            with calls(server.port, [], count=5, end=False):
                assert_answers(connection)
            assert slow.result().header["kind"] == "sleep"


def test_the_longest_silence_ends_first_and_none_without_need() -> None:
    pool, ended = CallPool(2), []
    released, third = threading.Event(), threading.Event()

    def silent(name: str) -> None:
        over = threading.Event()

        def end() -> None:
            ended.append(name)
            over.set()

        with pool.waits_for_peer(end):
            while not over.is_set() and not released.wait(0.01):
                pass

    waiting = [pool.submit(silent, name) for name in "ab"]
    time.sleep(0.1)
    assert ended == []
    assert pool.submit(lambda: third.set() or "c").result(5) == "c"
    waiting[0].result(5)
    assert ended == ["a"] and not waiting[1].done()
    assert pool.submit(lambda: "d").result(5) == "d" and ended == ["a"]
    released.set()


def test_words_of_strangers_are_logged_without_control_characters_and_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(peer: str, message: Message) -> Message:
        raise RefusedError(f"no {message.header['x']}\nor {message.header['x']}")

    with serve(refuse, "localhost:0") as server, caplog.at_level(logging.WARNING):
        with connect(f"localhost:{server.port}") as connection:
            for number in range(50):
                with pytest.raises(RefusedError, match=rf"no {number}\\x1b\[2J\\nor") as error:
                    connection.call(Message({"x": f"{number}\x1b[2J"}), timeout=10)
                assert str(error.value).isprintable()
    lines = [record.getMessage() for record in caplog.records]
    assert 20 <= len(lines) <= 42 and all(line.isprintable() for line in lines)


def test_a_reason_is_logged_once_and_one_that_the_user_knows_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(peer: str, message: Message) -> Message:
        error = RefusedError(f"reason {message.header['x']}")
        error.is_told = message.header["x"] == 2
        raise error

    with serve(refuse, "localhost:0") as server, caplog.at_level(logging.WARNING):
        with connect(f"localhost:{server.port}") as connection:
            for number in (0, 1, 2, 0, 1, 2):
                with pytest.raises(RefusedError, match=f"reason {number}"):
                    connection.call(Message({"x": number}), timeout=10)
    assert [line[-8:] for line in caplog.messages] == ["reason 0", "reason 1"]


SERVER = """
import resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from fedpax.transport.message import Message
from fedpax.transport.calls import serve
def answer(peer, message):
    open("/dev/null").close()  # as a merge opens its journal
    return Message(message.header | {"peer": peer}, message.arrays)
with serve(answer, "localhost:0") as server:
    print(server.port, flush=True)
    time.sleep(120)
"""


@pytest.mark.slow
def test_connections_of_strangers_leave_files_to_the_syncer() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with connect(f"localhost:{port}") as connection, contextlib.ExitStack() as stack:
                assert_answers(connection)
                for _ in range(500):
                    stack.enter_context(raw_connection(port, b""))
                for seed in range(10):
                    assert_answers(connection, seed)
                with connect(f"localhost:{port}") as later:
                    assert_answers(later, seconds=40)  # after their handshakes have timed out
        finally:
            process.kill()
