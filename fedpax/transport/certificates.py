"""Certificates with which a syncer and its islands identify each other (mutual TLS)."""

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpax.errors import ArgumentError
from fedpax.files import read_file
from fedpax.transport.authority import (
    AUTHORITY,
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REQUEST_FILE,
    check_days,
    check_mode,
    check_name,
    check_names,
    fingerprint,
    make_authority,
    new_folder,
    now,
    read_authority,
    read_issued,
    read_pem,
    record_issued,
    write_files,
)

_EXPIRES_SOON = datetime.timedelta(days=14)
_logger = logging.getLogger(__name__)


class Certificates(NamedTuple):
    """The certificates of a name, read by `read_certificates`."""

    name: str
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
    """Make an authority, and a folder with a certificate and a private key for each name."""
    # `OUT/authority/key.pem` makes certificates: it stays off the sites. Keys are elliptic (P-256).
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


# ---- certificate requests: a site makes its key, and the authority signs the site's request
#
# The private key never leaves the site.

_MAX_BYTES = 1 << 16  # of a request


class SignedRequest(NamedTuple):
    """A certificate that `sign_request` made, with its expiry, UTC, and its key's fingerprint."""

    name: str
    fingerprint: str
    expires: datetime.datetime


def make_request(out: Path | str, name: str) -> str:
    """Make a site's private key, and a request for a certificate of its key."""
    check_name("name", name)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    with new_folder(Path(out)) as temporary:
        request = builder.sign(key, hashes.SHA256())
        write_files(temporary, {KEY_FILE: key, REQUEST_FILE: request})
    return fingerprint(key.public_key())


def sign_request(
    request: Path | str,
    authority: Path | str,
    out: Path | str,
    *,
    days: int = 365,
    replace: bool = False,
) -> SignedRequest:
    """Sign the request of a site, which holds the private key."""
    # It does not allow to serve: a site cannot pose as the coordinator.
    check_days(days)
    name, public = _check_request(Path(request))
    authority = Path(authority)
    issuer = read_authority(authority)
    issued, key = read_issued(authority), fingerprint(public)
    _check_is_free(name, issued.names.get(name), replace)
    if (former := issued.keys.get(key, name)) != name:
        raise ArgumentError(
            f"--sign={request}: the key of {name!r} belongs to the site {former!r}, expected a "
            "key of one site: an expelled site could return under another name. Compare the "
            "fingerprint by telephone, and let the site make a new request in an empty folder."
        )
    certificate = issuer.issue(name, public, days, only_connects=True)
    with new_folder(Path(out)) as temporary:
        # First: a certificate that is not in the list could be given twice.
        record_issued(authority, {name: certificate}, "request")
        write_files(temporary, {AUTHORITY_FILE: issuer.certificate, CERTIFICATE_FILE: certificate})
    return SignedRequest(name, key, certificate.not_valid_after_utc)


def _check_request(path: Path) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the name and the public key of a request, which a stranger can have written."""

    def refuse(reason: str) -> ArgumentError:
        return ArgumentError(
            f"--sign={path}: {reason}. Let the site make its request by `fedpax certificates "
            "--request --name=NAME --out=DIR`, and sign the file request.pem."
        )

    try:
        content = read_file(path, _MAX_BYTES)
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror or error})") from None
    try:
        request = x509.load_pem_x509_csr(content)
        names = [attribute for part in request.subject.rdns for attribute in part]
        extensions = list(request.extensions)
        public = request.public_key()
    except Exception:  # such as unknown curves, for which cryptography has several errors
        raise refuse("it is not a certificate request in PEM") from None
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp256r1":
        raise refuse("its key has another type, expected an elliptic key on P-256")
    if not request.is_signature_valid:
        raise refuse("it is not signed by the key that it names")
    if len(names) != 1 or names[0].oid != x509.NameOID.COMMON_NAME:
        raise refuse("its subject has other parts than a common name")
    if extensions:
        raise refuse(
            "it asks for extensions, such as further names or the rights of an authority, expected "
            "none"
        )
    name = str(names[0].value)
    try:
        check_name("name", name)
    except ArgumentError as error:
        raise refuse(str(error)) from None
    return name, public


def _check_is_free(name: str, given_by: str | None, replace: bool) -> None:
    if given_by == "names":
        raise ArgumentError(
            f"the request is for the name {name!r}, whose certificate and key were made with the "
            "authority, as the coordinator's are. Let the site choose another name."
        )
    if given_by is not None and not replace:
        raise ArgumentError(
            f"the request is for the name {name!r}, which another request was given. If the same "
            "site asks again, such as after its certificate has expired, pass --replace; else let "
            "the site choose another name."
        )
