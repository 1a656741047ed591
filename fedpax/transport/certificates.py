"""Certificates with which a syncer and its islands identify each other (mutual TLS).

Needs the package cryptography: `pip install "fedpax[sites]"`.
"""

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpax.errors import ArgumentError
from fedpax.transport.authority import (
    AUTHORITY,
    check_days,
    check_names,
    make_authority,
    now,
    read_authority,
    record_issued,
)
from fedpax.transport.certificate_files import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    check_mode,
    new_folder,
    read_pem,
    write_files,
)

_EXPIRES_SOON = datetime.timedelta(days=14)
_logger = logging.getLogger(__name__)


class Certificates(NamedTuple):
    """The certificates of a name, read by `read_certificates`."""

    name: str  # the name that the certificate states
    expires: datetime.datetime  # the time from which the certificate is no longer accepted, UTC
    authority: bytes  # PEM of the authority's certificate
    certificate: bytes  # PEM of the name's certificate
    key: bytes  # PEM of the private key


def make_certificates(
    out: Path | str,
    names: Sequence[str],
    *,
    days: int = 365,
    authority: Path | str | None = None,
) -> dict[str, datetime.datetime]:
    """Make an authority, and a certificate and a private key for each name.

    `OUT/NAME/` has the files that the site of this name needs: `authority.pem`, `certificate.pem`
    and `key.pem`. `OUT/authority/` has the authority's `certificate.pem` and `key.pem`. This key
    makes certificates: keep it off the sites. `issued.jsonl` beside it names the certificates. All
    files have mode 0600 and all folders mode 0700. Keys are elliptic (P-256), signatures ECDSA with
    SHA-256.
    """
    out = Path(out)
    check_names(names)
    check_days(days)
    with new_folder(out) as temporary:
        expires = {}
        if authority is None:
            issuer, record = make_authority(), temporary / AUTHORITY
            write_files(record, {CERTIFICATE_FILE: issuer.certificate, KEY_FILE: issuer.key})
            expires[AUTHORITY] = issuer.certificate.not_valid_after_utc
        else:
            issuer, record = read_authority(Path(authority)), Path(authority)
        issued = {}
        for name in names:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = issuer.issue(name, key.public_key(), days, only_connects=False)
            write_files(
                temporary / name,
                {AUTHORITY_FILE: issuer.certificate, CERTIFICATE_FILE: certificate, KEY_FILE: key},
            )
            issued[name] = certificate
            expires[name] = certificate.not_valid_after_utc
        record_issued(record, issued, "names")
    return expires


def read_certificates(folder: Path | str) -> Certificates:
    """Read the certificates of a site, and check that they can be used."""
    # A warning is logged if the certificate expires within 14 days.
    folder = Path(folder)
    authority_pem, certificate_pem, key_pem = (
        read_pem(folder / name) for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE)
    )
    check_mode(folder / KEY_FILE)
    name = AUTHORITY_FILE
    try:
        authority = x509.load_pem_x509_certificate(authority_pem)
        name = CERTIFICATE_FILE
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        name = KEY_FILE
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        content = "private key without a password" if name == KEY_FILE else "certificate"
        raise ArgumentError(
            f"{folder / name} is damaged, expected a {content} in PEM. Copy the folder again from "
            "where `fedpax certificates` wrote it."
        ) from None
    try:
        certificate.verify_directly_issued_by(authority)
        belongs = key.public_key() == certificate.public_key()
    except (InvalidSignature, ValueError, TypeError):
        belongs = False
    if not belongs:
        raise ArgumentError(
            f"certificates={str(folder)!r} has files that do not belong together. Copy the whole "
            "folder again from where `fedpax certificates` wrote it."
        )
    time, expires = now(), certificate.not_valid_after_utc
    begins = certificate.not_valid_before_utc
    if not begins <= time < expires:
        raise ArgumentError(
            f"certificates={str(folder)!r} are valid from {_minute(begins)} until "
            f"{_minute(expires)}, and it is {_minute(time)}. Make new ones with `fedpax "
            "certificates`, or set the clock."
        )
    if expires - time < _EXPIRES_SOON:
        _logger.warning("the certificates in %s expire at %s", folder, _minute(expires))
    subject = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    return Certificates(str(subject), expires, authority_pem, certificate_pem, key_pem)


def _minute(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
