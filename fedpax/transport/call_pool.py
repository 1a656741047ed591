"""Strangers at a server: its address, its refusals, its threads and its log."""

import concurrent.futures
import contextlib
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError


class CallPool(concurrent.futures.ThreadPoolExecutor):
    """Threads that each handle one call, and end a call of a silent peer if another call waits."""

    # A peer that opens calls and then sends nothing, or does not read the answers, would occupy all
    # threads. Therefore, if a call finds no free thread, the call that has waited longest for its
    # peer is ended. A call that does not wait for its peer is never ended.

    def __init__(self, max_calls: int) -> None:
        super().__init__(max_calls, "fedpax-call")
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._unfinished = 0
        # By thread: how to end the calls that wait for their peers, the longest wait first.
        self._waiting: dict[int, Callable[[], object]] = {}
        self._ended: set[int] = set()  # threads whose call was ended and has not returned yet

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Handle a call in a thread; see `concurrent.futures.Executor.submit`."""
        with self._lock:
            self._unfinished += 1
            self._make_room()
        return super().submit(self._run, fn, *args, **kwargs)

    @contextlib.contextmanager
    def waits_for_peer(self, end: Callable[[], object]) -> Iterator[None]:
        """Mark the call of this thread as waiting for its peer."""
        # `end` ends the call, in another thread and at most once. It must not block.
        thread = threading.get_ident()
        with self._lock:
            self._waiting[thread] = end
            self._make_room()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(thread, None)

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        finally:
            with self._lock:
                self._unfinished -= 1
                self._ended.discard(threading.get_ident())

    def _make_room(self) -> None:
        if self._waiting and self._unfinished - len(self._ended) > self._max_calls:
            thread = next(iter(self._waiting))
            self._ended.add(thread)
            self._waiting.pop(thread)()


class CallsBySite:
    """Counts the calls that each site has at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock, self._calls = threading.Lock(), Counter[str]()

    @contextlib.contextmanager
    def count(self, site: str) -> Iterator[bool]:
        """Count a call while it runs; yields whether the site has no more than it may have."""
        with self._lock:
            self._calls[site] += 1
            fits = not site or self._calls[site] <= self._most
        try:
            yield fits
        finally:
            with self._lock:
                self._calls[site] -= 1
                if not self._calls[site]:
                    del self._calls[site]


# A log of strangers' messages: they can neither fill it nor send control characters to it.
_MOST_REMEMBERED = 1000


class LimitedLog:
    """A log of warnings, of which at most `most` per interval are written.

    A warning that comes again within `remember` seconds is not written again.
    """

    def __init__(
        self,
        logger: logging.Logger,
        most: int = 20,
        seconds: float = 10.0,
        remember: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._most, self._seconds, self._clock = logger, most, seconds, clock
        self._lock = threading.Lock()
        self._end, self._count = float("-inf"), 0
        self._remember = remember
        self._known: dict[int, float] = {}  # the hash of a warning: when it last came; oldest first

    def warning(self, words: str, *values: object) -> None:
        """Write a warning, unless it repeats one, or count it."""
        text = escape(words % values)
        with self._lock:
            now, missing = self._clock(), 0
            last = self._known.pop(hash(text), float("-inf"))
            self._known[hash(text)] = now
            if len(self._known) > _MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
            if now - last < self._remember:
                return
            if now >= self._end:
                missing = self._count - self._most
                self._end, self._count = now + self._seconds, 0
            self._count += 1
            if self._count > self._most:
                return
        if missing > 0:
            self._logger.warning(
                "%d more warnings in %g s were not written", missing, self._seconds
            )
        self._logger.warning("%s", text)


def escape(words: str) -> str:
    """Escape control characters, which could change a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


# Find out why a server does not accept a connection: gRPC only reports a closed socket.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class _Socket(ssl.SSLSocket):
    """Close the socket if the peer resets the connection before the handshake."""

    # `wrap_socket` of Python 3.11 asks for the peer's name first, and leaves the socket open then.

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise


def find_refusal(
    address: str, certificates: Path | None, server_name: str, timeout: float
) -> str | None:
    """Connect to a server like gRPC does, and explain a handshake that always fails."""
    # None: the server accepts the connection, or cannot be reached at the moment. `timeout` is for
    # each of at most two attempts.
    refusal = _attempt(address, certificates, server_name, timeout)
    if refusal is None:
        return None
    # A server that exits closes connections too, but does not accept the next one.
    time.sleep(0.2)
    return _attempt(address, certificates, server_name, timeout)


def _attempt(
    address: str, certificates: Path | None, server_name: str, timeout: float
) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        connected = socket.create_connection((host.strip("[]"), int(port)), timeout)
    except OSError:
        return None
    with connected:
        try:
            if certificates is None:
                return _ask_for_tls(connected, address)
            context = ssl.create_default_context(cafile=certificates / "authority.pem")
            context.sslsocket_class = _Socket
            context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(connected, server_hostname=server_name) as encrypted:
                return _ask_for_settings(encrypted, address, certificates)
        except ssl.SSLCertVerificationError as error:
            return (
                f"the certificate of the server at {address} is not accepted: "
                f"{error.verify_message.rstrip('.')}. Use certificates of one authority on both "
                "sides (`fedpax certificates`), and for the server one with the name "
                f"{server_name!r}."
            )
        except ssl.SSLError as error:
            if certificates is not None and error.reason == "WRONG_VERSION_NUMBER":
                return (
                    f"the server at {address} does not use TLS. Start it with --certificates, or "
                    "check the port."
                )
            return None
        except OSError:
            return None


def _ask_for_tls(connected: socket.socket, address: str) -> str:
    """Begin TLS. Only a server with certificates answers; others raise an OSError."""
    context = ssl.create_default_context()
    context.sslsocket_class = _Socket
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.wrap_socket(connected).close()
    return (
        f"the server at {address} refuses connections without certificates. Pass this site's "
        "folder of `fedpax certificates` as --certificates."
    )


def _ask_for_settings(connected: socket.socket, address: str, certificates: Path) -> str | None:
    """Begin HTTP/2. A server that accepts the certificate answers with its settings at once."""
    try:
        connected.sendall(_HTTP2_PREFACE)
        accepted = bool(connected.recv(1))
    except TimeoutError:
        return None
    except OSError:  # the server closed the connection before it read everything
        accepted = False
    if accepted:
        return None
    return (
        f"the server at {address} refuses the certificate in {certificates}. Use one of the "
        "server's authority that has not expired (`fedpax certificates`)."
    )


# Addresses of syncers, of which only loopback addresses are accepted without certificates.
def check_address(
    argument: str, address: str, certificates: Path | str | None, *, any_port: bool = False
) -> str:
    """Return the host of HOST:PORT; without certificates, raise unless it is a loopback address."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    valid_port = port.isascii() and port.isdigit() and (not any_port) <= int(port) <= 65535
    if not colon or not bare or not valid_port or (":" in bare and bare == host) or "/" in bare:
        raise ArgumentError(
            f"{argument}={address!r} is not an address, expected HOST:PORT such as localhost:7000 "
            "or [::1]:7000."
        )
    if certificates is None and not _is_loopback(bare):
        raise ArgumentError(
            f"{argument}={address!r} is not a loopback address, and there are no certificates, "
            "expected localhost, 127.0.0.1 or [::1]. Make certificates with `fedpax certificates` "
            "and pass them on both sides to communicate between machines."
        )
    return bare


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
