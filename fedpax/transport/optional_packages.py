"""Functions that import the packages of the extra `sites` where they are called."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpax.extras import optional

if TYPE_CHECKING:
    from fedpax.transport.certificates import Certificates
    from fedpax.transport.signed_keys import CertificateSigner


def import_grpc() -> Any:
    """Import gRPC, without its own log: it repeats each failed handshake."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a user's setting remains
    with optional("The connection to a site"):
        return importlib.import_module("grpc")


def read_certificates(folder: Path | str) -> "Certificates":
    """Read a site's certificates, if the package cryptography is installed."""
    with optional("--certificates"):
        from fedpax.transport.certificates import read_certificates

    return read_certificates(folder)


def certified_name(folder: str | Path | None) -> str | None:
    """Return the name in a site's certificate, or None without certificates."""
    return None if folder is None else read_certificates(folder).name


def signer_of(folder: str | Path | None, server: str | None = None) -> "CertificateSigner | None":
    """Return the signer of a site's keys, or None without certificates; server: its own name."""
    if folder is None:
        return None
    certificates = read_certificates(folder)
    from fedpax.transport.signed_keys import CertificateSigner

    return CertificateSigner(certificates, server or certificates.name)
