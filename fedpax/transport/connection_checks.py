"""Checks of a server's address, and why a server does not accept a connection."""

import contextlib
import ipaddress
import socket
import ssl
import time
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError

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
