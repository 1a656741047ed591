"""Addresses of syncers: which are taken, and which are refused."""

import pytest

from fedpax.transport.calls import connect, serve
from fedpax.transport.connection_checks import check_address
from fedpax.transport.message import Message


def answer(peer: str, message: Message) -> Message:
    return message


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("localhost", "expected HOST:PORT"),
        ("localhost:", "expected HOST:PORT"),
        (":7000", "expected HOST:PORT"),
        ("localhost:seven", "expected HOST:PORT"),
        ("localhost:70000", "expected HOST:PORT"),
        ("localhost:-1", "expected HOST:PORT"),
        ("::1:7000", r"or \[::1\]:7000"),
        ("unix:/tmp/x:1", "expected HOST:PORT"),
        ("0.0.0.0:7000", "Make certificates with `fedpax certificates`"),
        ("[::]:7000", "is not a loopback address"),
        ("192.0.2.1:7000", "is not a loopback address"),
        ("localhost.example.org:7000", "is not a loopback address"),
    ],
)
def test_addresses_that_are_refused(address: str, words: str) -> None:
    for use in (lambda: serve(answer, address), lambda: connect(address)):
        with pytest.raises(ValueError, match=words):
            use()


def test_addresses_that_are_accepted() -> None:
    for address in ("localhost:1", "127.0.0.1:7000", "127.8.9.1:7000", "[::1]:7000"):
        assert check_address("syncer", address, None) in address
    assert check_address("syncer", "[2001:db8::2]:7000", "folder") == "2001:db8::2"
    with pytest.raises(ValueError, match="syncer='localhost:0' is not an address"):
        check_address("syncer", "localhost:0", None)
