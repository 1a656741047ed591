"""Addresses of syncers, of which only loopback addresses are accepted without certificates."""

import contextlib
import ipaddress
from pathlib import Path

from fedpax.errors import ArgumentError


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
