"""Calls from islands to a syncer: over broken streams, failing networks, and by many threads."""

import contextlib
import gc
import logging
import select
import socket
import struct
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from test_message import MALFORMED

from fedpax.experiments.benchmarks.unreliable_network import UnreliableNetwork
from fedpax.transport.calls import (
    Connection,
    DisconnectedError,
    MessageServer,
    RefusedError,
    connect,
    serve,
)
from fedpax.transport.connection_checks import find_refusal
from fedpax.transport.message import CHUNK_BYTES, Message, MessageError, encode

LIMIT = 1 << 24
METHOD = "/fedpax.Sites/Call"


def answer(peer: str, message: Message) -> Message:
    match message.header.get("kind"):
        case "refuse":
            raise RefusedError("the round 7 is over: pull first. ü €")
        case "fail":
            raise ValueError("an error in the handler")
        case "sleep":
            time.sleep(message.header["seconds"])
        case "unsendable":
            return Message({"x": object()})
    return Message({**message.header, "peer": peer}, message.arrays)


@pytest.fixture(scope="module")
def server() -> Iterator[MessageServer]:
    with serve(answer, "localhost:0", max_message_bytes=LIMIT) as server:
        yield server


@pytest.fixture
def connection(server: MessageServer) -> Iterator[Connection]:
    """A connection; after the test, the server has to answer."""
    with connect(f"localhost:{server.port}", max_message_bytes=LIMIT) as connection:
        yield connection
        assert_answers(connection)


def assert_answers(connection: Connection, seed: int = 0, seconds: float = 10.0) -> None:
    """The server echoes random arrays; a network that was cut has some seconds to recover."""
    sent = {"x": np.random.default_rng(seed).normal(size=(3, 50)).astype(np.float32)}
    end = time.monotonic() + seconds
    while True:
        try:
            received = connection.call(Message({"seed": seed}, sent), timeout=seconds)
            break
        except DisconnectedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    assert received.header == {"seed": seed, "peer": ""}
    np.testing.assert_array_equal(received.arrays["x"], sent["x"])


def test_large_messages_in_both_directions(connection: Connection) -> None:
    x = np.random.default_rng(0).normal(size=LIMIT // 8)
    np.testing.assert_array_equal(connection.call(Message({}, {"x": x}), 20).arrays["x"], x)


def test_a_refusal_comes_in_the_words_of_the_handler(connection: Connection) -> None:
    with pytest.raises(RefusedError, match=r"^the round 7 is over: pull first\. ü €$"):
        connection.call(Message({"kind": "refuse"}), timeout=10)


@pytest.mark.parametrize("kind", ["fail", "unsendable"])
def test_an_error_of_the_handler_is_logged_and_not_told(
    connection: Connection, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with pytest.raises(DisconnectedError, match="internal error: see the log") as error:
        connection.call(Message({"kind": kind}), timeout=10)
    assert "an error in the handler" not in str(error.value)
    assert caplog.records[-1].levelno == logging.ERROR and caplog.records[-1].exc_info


def test_a_call_ends_at_its_timeout_and_blocks_no_other(connection: Connection) -> None:
    begin = time.monotonic()
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(connection.call, Message({"kind": "sleep", "seconds": 1.0}), 0.5)
        assert_answers(connection, seconds=0.4)
        assert not slow.done()
        with pytest.raises(DisconnectedError, match=r"no answer within 0\.5 s"):
            slow.result()
    assert time.monotonic() - begin < 3


def test_many_threads_call_at_once(connection: Connection) -> None:
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda seed: assert_answers(connection, seed), range(200)))


def test_messages_over_the_limit_are_not_sent(connection: Connection) -> None:
    with pytest.raises(MessageError, match="Send smaller fragments"):
        connection.call(Message({}, {"x": np.zeros(LIMIT + 1, np.int8)}), timeout=10)


def test_messages_over_the_limit_of_the_server_are_refused(
    server: MessageServer, connection: Connection
) -> None:
    with connect(f"localhost:{server.port}", max_message_bytes=2 * LIMIT) as larger:
        with pytest.raises(RefusedError, match=f"expected at most max_message_bytes = {LIMIT}"):
            larger.call(Message({}, {"x": np.zeros(LIMIT + 1, np.int8)}), timeout=10)


def test_the_limit_of_a_server_can_grow() -> None:
    limits = [10]
    with serve(answer, "localhost:0", max_message_bytes=lambda: limits[-1]) as growing:
        with connect(f"localhost:{growing.port}") as connection:
            with pytest.raises(RefusedError, match="expected at most max_message_bytes = 10"):
                connection.call(Message({}, {"x": np.zeros(11, np.int8)}), timeout=10)
            limits.append(11)
            assert connection.call(Message({}, {"x": np.ones(11, np.int8)}), 10).arrays["x"].all()


def test_answers_over_the_limit_are_refused(server: MessageServer, connection: Connection) -> None:
    with connect(f"localhost:{server.port}", max_message_bytes=100) as smaller:
        with pytest.raises(MessageError, match="have 101 bytes, expected at most"):
            smaller.call(Message({}, {"x": np.zeros(101, np.int8)}), timeout=10)
    with serve(lambda peer, message: Message({}, {"x": np.zeros(500)}), "localhost:0") as other:
        with connect(f"localhost:{other.port}", max_message_bytes=100) as smaller:
            with pytest.raises(MessageError, match="have 4000 bytes, expected at most"):
                smaller.call(Message({}), timeout=10)


@contextlib.contextmanager
def raw_connection(port: int, content: bytes) -> Iterator[socket.socket]:
    """Connect to a port and send bytes, as a stranger does."""
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(content)
        yield stranger


def raw_call(port: int, chunks: list[bytes], method: str = METHOD) -> grpc.StatusCode:
    with grpc.insecure_channel(f"localhost:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        with pytest.raises(grpc.RpcError) as error:
            list(channel.stream_stream(method)(iter(chunks), timeout=10))
        return error.value.code()


@pytest.mark.parametrize("name", MALFORMED)
def test_the_server_survives_malformed_streams(
    server: MessageServer, connection: Connection, name: str
) -> None:
    code = raw_call(server.port, MALFORMED[name][0])
    if name == "a chunk that is too large":  # not even read
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    else:
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS)


def test_the_server_survives_other_methods_and_chunks_without_end(
    server: MessageServer, connection: Connection
) -> None:
    assert raw_call(server.port, [b"x"], "/other/Method") == grpc.StatusCode.UNIMPLEMENTED
    chunks = list(encode(Message({}, {"x": np.zeros(2 * CHUNK_BYTES, np.int8)}), LIMIT))
    assert raw_call(server.port, chunks * 50) == grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize(
    "content",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000],
    ids=["nothing", "HTTP/1.1", "broken HTTP/2"],
)
def test_the_server_survives_strangers_at_its_port(
    server: MessageServer, connection: Connection, content: bytes
) -> None:
    with raw_connection(server.port, content), raw_connection(server.port, content + bytes(500)):
        assert_answers(connection)


def test_a_server_that_is_not_a_syncer_is_named() -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("localhost:0")
    other.start()
    try:
        with connect(f"localhost:{port}") as connection:
            with pytest.raises(RefusedError, match="Pass the address of `fedpax syncer --listen`"):
                connection.call(Message({}), timeout=10)
    finally:
        other.stop(None)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with connect(f"localhost:{port}") as connection:
        begin = time.monotonic()
        with pytest.raises(DisconnectedError, match=r"no connection \([A-Z][^:]*\)\. Check"):
            connection.call(Message({}), timeout=10)
        assert time.monotonic() - begin < 2


def test_a_reset_before_the_handshake_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def connect_and_reset(*args: Any) -> socket.socket:
            connected = create_connection(*args)
            peer, _ = listener.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            select.select([connected], [], [], 5)  # the reset has arrived
            return connected

        create_connection = socket.create_connection
        monkeypatch.setattr(socket, "create_connection", connect_and_reset)
        with warnings.catch_warnings(record=True) as result:
            warnings.simplefilter("always", ResourceWarning)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            assert find_refusal(address, None, "localhost", 5.0) is None
            gc.collect()
    assert [str(warning.message) for warning in result if "SSLSocket" in str(warning.message)] == []


def test_a_server_returns_at_its_port() -> None:
    with serve(answer, "localhost:0") as first:
        port = first.port
        connection = connect(f"localhost:{port}")
        assert_answers(connection)
    with connection:
        with pytest.raises(DisconnectedError):
            connection.call(Message({}), timeout=10)
        with serve(answer, f"localhost:{port}"):
            begin = time.monotonic()
            assert_answers(connection)
            assert time.monotonic() - begin < 5


def test_a_port_has_one_server(server: MessageServer) -> None:
    with pytest.raises(OSError, match="Stop the other server, or choose another port"):
        serve(answer, f"localhost:{server.port}")


def test_a_cut_network_is_noticed_at_once(server: MessageServer) -> None:
    with UnreliableNetwork(server.port) as network:
        with connect(f"localhost:{network.port}") as connection, ThreadPoolExecutor() as threads:
            assert_answers(connection)
            slow = threads.submit(connection.call, Message({"kind": "sleep", "seconds": 1.0}), 10)
            time.sleep(0.1)
            network.cut()
            with pytest.raises(DisconnectedError, match="no connection"):  # not "no answer within"
                slow.result()
            with pytest.raises(DisconnectedError):
                connection.call(Message({}), timeout=5)
            network.restore()
            assert_answers(connection)
            assert network.num_connections >= 2


def test_a_message_is_cut_in_the_middle(server: MessageServer, connection: Connection) -> None:
    x = np.zeros(LIMIT // 2, np.int8)
    with UnreliableNetwork(server.port) as network, ThreadPoolExecutor() as threads:
        with connect(f"localhost:{network.port}") as unreliable:
            assert_answers(unreliable)
            network.bytes_per_second = 2e7
            half = threads.submit(unreliable.call, Message({}, {"x": x}), 10)
            time.sleep(0.2)
            assert not half.done()
            network.cut()
            with pytest.raises(DisconnectedError):
                half.result()


def test_a_slow_network_slows_its_own_island_alone(
    server: MessageServer, connection: Connection
) -> None:
    x = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    with UnreliableNetwork(server.port) as network, ThreadPoolExecutor() as threads:
        network.bytes_per_second, network.delay = 4e6, 0.001
        with connect(f"localhost:{network.port}") as slow:
            begin = time.monotonic()
            throttled = threads.submit(slow.call, Message({}, {"x": x}), 20)
            for seed in range(5):
                assert_answers(connection, seed)
            assert not throttled.done()
            np.testing.assert_array_equal(throttled.result().arrays["x"], x)
            assert time.monotonic() - begin > 2 * len(x) / 4e6 / 2  # in part side by side


def test_a_sender_waits_for_a_receiver_that_does_not_read(server: MessageServer) -> None:
    read = 0

    def chunks() -> Iterator[bytes]:
        nonlocal read
        for chunk in encode(Message({}, {"x": np.zeros(LIMIT, np.int8)}), LIMIT):
            read += len(chunk)
            yield chunk

    with UnreliableNetwork(server.port) as network:
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"localhost:{network.port}", options) as channel:
            grpc.channel_ready_future(channel).result(5)
            network.is_stalled = True
            call = channel.stream_stream(METHOD)(chunks(), timeout=1.0)
            with pytest.raises(grpc.RpcError):
                list(call)
            network.cut()  # closing waits for the bytes in the socket otherwise
    assert 0 < read < LIMIT / 2  # the socket's buffers, and no more


def test_a_connection_closes_on_a_stalled_network(server: MessageServer) -> None:
    with UnreliableNetwork(server.port) as network:
        connection = connect(f"localhost:{network.port}")
        assert_answers(connection)
        network.is_stalled = True
        with pytest.raises(DisconnectedError, match=r"no answer within 0\.3 s"):
            connection.call(Message({}, {"x": np.zeros(LIMIT, np.int8)}), timeout=0.3)
        begin = time.monotonic()
        connection.close()
        assert time.monotonic() - begin < 3


def test_an_island_starts_before_its_syncer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with connect(f"localhost:{port}") as connection, ThreadPoolExecutor() as threads:
        waiting = threads.submit(assert_answers, connection)
        time.sleep(0.2)
        with serve(answer, f"localhost:{port}"):
            waiting.result()


@pytest.mark.slow
def test_a_network_that_forwards_nothing_is_noticed(server: MessageServer) -> None:
    with UnreliableNetwork(server.port) as network:
        with connect(f"localhost:{network.port}", keepalive=0.3) as connection:
            assert_answers(connection)
            network.is_stalled = True
            begin = time.monotonic()
            with pytest.raises(DisconnectedError, match="ping timeout"):
                connection.call(Message({}), timeout=60)
            assert time.monotonic() - begin < 10
            network.restore()
            assert_answers(connection)
