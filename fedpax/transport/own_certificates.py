"""What a site's folder of certificates gives it: a name, and signatures of its keys."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpax.transport.signed_keys import CertificateSigner


def certified_name(folder: str | Path | None) -> str | None:
    """Return the name in a site's certificate, or None without certificates."""
    if folder is None:
        return None
    from fedpax.transport.extras import read_certificates

    return read_certificates(folder).name


def signer_of(folder: str | Path | None) -> "CertificateSigner | None":
    """Return the signer of a site's keys, or None without certificates."""
    if folder is None:
        return None
    from fedpax.transport.extras import read_certificates
    from fedpax.transport.signed_keys import CertificateSigner

    return CertificateSigner(read_certificates(folder))
