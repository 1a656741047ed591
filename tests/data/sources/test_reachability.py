import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fedpax.data.sources._reachability import unreachable


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
    """A host that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/data.zip"


@pytest.fixture
def closed() -> str:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}/data.zip"


def test_a_host_that_answers_with_an_error_is_there(server: str) -> None:
    assert unreachable([server]) == []


def test_one_host_that_answers_is_enough(server: str, closed: str) -> None:
    assert unreachable([closed, server]) == []


def test_a_closed_port_is_found_at_once(closed: str) -> None:
    start = time.monotonic()
    assert unreachable([closed, closed + ".2"]) == ["127.0.0.1"]
    assert time.monotonic() - start < 4


def test_a_silent_host_is_waited_for_no_longer_than_told(silent: str) -> None:
    start = time.monotonic()
    assert unreachable([silent], seconds=0.3) == ["127.0.0.1"]
    assert 0.25 < time.monotonic() - start < 4


def test_without_hosts_there_is_nothing_to_ask() -> None:
    assert unreachable([]) == unreachable(["gs://bucket/file", "/a/path"]) == []
