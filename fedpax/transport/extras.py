"""The packages of the extra `sites`, which are imported where they are needed."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpax.extras import optional

if TYPE_CHECKING:
    from fedpax.transport.certificates import Certificates


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
