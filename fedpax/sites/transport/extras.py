"""The packages of the extra `sites`, which are imported where they are needed."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpax.sites.transport.certificates import Certificates


def import_grpc() -> Any:
    """Import gRPC, without its own log: it repeats each failed handshake."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a user's setting remains
    return _import_extra("grpc", "grpcio")


def read_certificates(folder: Path | str) -> "Certificates":
    """Read a site's certificates, if the package cryptography is installed."""
    _import_extra("cryptography", "cryptography")
    from fedpax.sites.transport.certificates import read_certificates

    return read_certificates(folder)


def _import_extra(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ModuleNotFoundError(
            f"syncers and islands need the package {package}, and it is not installed. Install it: "
            "pip install 'fedpax[sites]'."
        ) from None
