import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fedpax.sources.data_sets import unreachable_hosts


@pytest.fixture
def server() -> Iterator[str]:
    """An HTTP server that answers everything with an error."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/data.zip"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/data.zip"


@pytest.fixture
def closed() -> str:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}/data.zip"


def test_an_http_error_counts_as_an_answer(server: str) -> None:
    assert unreachable_hosts([server]) == []


def test_one_answer_is_enough(server: str, closed: str) -> None:
    assert unreachable_hosts([closed, server]) == []


def test_a_closed_port_is_detected_immediately(closed: str) -> None:
    start = time.monotonic()
    assert unreachable_hosts([closed, closed + ".2"]) == ["127.0.0.1"]
    assert time.monotonic() - start < 4


def test_the_timeout_limits_the_wait_for_a_silent_host(silent: str) -> None:
    start = time.monotonic()
    assert unreachable_hosts([silent], timeout=0.3) == ["127.0.0.1"]
    assert 0.25 < time.monotonic() - start < 4


def test_other_schemes_are_not_checked() -> None:
    assert unreachable_hosts([]) == unreachable_hosts(["gs://bucket/file", "/a/path"]) == []
