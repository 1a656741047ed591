"""Certificates with which a syncer and its islands identify each other (mutual TLS).

Needs the package cryptography: `pip install "fedpax[sites]"`.
"""

import datetime
import ipaddress
import logging
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpax.errors import ArgumentError
from fedpax.files import read_file

AUTHORITY = "authority"
"""The folder of the authority, beside the folders of the names."""

_AUTHORITY_FILE, _CERTIFICATE_FILE, _KEY_FILE = "authority.pem", "certificate.pem", "key.pem"
_AUTHORITY_DAYS = 3650
_EXPIRES_SOON = datetime.timedelta(days=14)
_CLOCK_DIFFERENCE = datetime.timedelta(hours=1)  # of the sites, at most
_HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
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
    makes certificates: keep it off the sites. All files have mode 0600 and all folders mode 0700.
    Keys are elliptic (P-256), signatures ECDSA with SHA-256.

    Args:
        out: the folder to make.
        names: host names, IP addresses or, for sites that only connect, any names of letters,
            digits, hyphens and dots. The syncer's name is the host by which islands reach it.
        days: days until the certificates expire, at the latest with the authority. Default 365. A
            new authority expires after 3650 days.
        authority: the folder of an existing authority, to add sites. Default None: make a new one.

    Returns:
        The time at which each certificate expires, UTC, by name. A new authority has the name
        `"authority"`.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: there is no authority in the folder `authority`.
        ValueError: there are no names, or a name is malformed or given twice, `days` is out of
            range, or `authority` holds no usable authority.

    Example:
        >>> folder = Path(tempfile.mkdtemp()) / "certificates"
        >>> expires = make_certificates(folder, ["syncer.example.org", "site-1"])
        >>> sorted(expires)
        ['authority', 'site-1', 'syncer.example.org']
        >>> sorted(path.name for path in (folder / "site-1").iterdir())
        ['authority.pem', 'certificate.pem', 'key.pem']
        >>> read_certificates(folder / "site-1").name
        'site-1'
    """
    out = Path(out)
    _check_names(names)
    if type(days) is not int or not 1 <= days <= _AUTHORITY_DAYS:
        raise ArgumentError(
            f"days={days!r} is out of range, expected a whole number from 1 to {_AUTHORITY_DAYS}. "
            "Choose for example days=365."
        )
    if out.exists():
        raise FileExistsError(
            f"out={str(out)!r} exists, and certificates that are in use must not be replaced. "
            "Choose a new folder, or remove this one."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    # The folder appears under its name when it is complete.
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))  # mode 0700
    try:
        expires = {}
        if authority is None:
            issuer, issuer_key = _make_authority()
            _write(temporary / AUTHORITY, {_CERTIFICATE_FILE: issuer, _KEY_FILE: issuer_key})
            expires[AUTHORITY] = issuer.not_valid_after_utc
        else:
            issuer, issuer_key = _read_authority(Path(authority))
        for name in names:
            certificate, key = _issue(name, days, issuer, issuer_key)
            _write(
                temporary / name,
                {_AUTHORITY_FILE: issuer, _CERTIFICATE_FILE: certificate, _KEY_FILE: key},
            )
            expires[name] = certificate.not_valid_after_utc
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return expires


def read_certificates(folder: Path | str) -> Certificates:
    """Read the certificates of a site, and check that they can be used."""
    # A warning is logged if the certificate expires within 14 days.
    folder = Path(folder)
    authority_pem, certificate_pem, key_pem = (
        _read_file(folder / name) for name in (_AUTHORITY_FILE, _CERTIFICATE_FILE, _KEY_FILE)
    )
    _check_mode(folder / _KEY_FILE)
    name = _AUTHORITY_FILE
    try:
        authority = x509.load_pem_x509_certificate(authority_pem)
        name = _CERTIFICATE_FILE
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        name = _KEY_FILE
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        content = "private key without a password" if name == _KEY_FILE else "certificate"
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
    now, expires = _now(), certificate.not_valid_after_utc
    begins = certificate.not_valid_before_utc
    if not begins <= now < expires:
        raise ArgumentError(
            f"certificates={str(folder)!r} are valid from {_minute(begins)} until "
            f"{_minute(expires)}, and it is {_minute(now)}. Make new ones with `fedpax "
            "certificates`, or set the clock."
        )
    if expires - now < _EXPIRES_SOON:
        _logger.warning("the certificates in %s expire at %s", folder, _minute(expires))
    subject = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    return Certificates(str(subject), expires, authority_pem, certificate_pem, key_pem)


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise ArgumentError(
            "there are no names, expected the syncer's host name and a name for each site. Set for "
            "example --names=syncer.example.org,site-1,site-2."
        )
    for index, name in enumerate(names):
        if len(name) > 64 or not (_HOST_NAME.fullmatch(name) or _address(name)):
            raise ArgumentError(
                f"names[{index}]={name!r} is not a name, expected at most 64 lower-case letters, "
                "digits, hyphens and dots, such as site-1 or syncer.example.org, or an IP address."
            )
        if name == AUTHORITY:
            raise ArgumentError(
                f"names[{index}]={name!r} is the name of the authority's folder. Choose another."
            )
    if len(set(names)) < len(names):
        raise ArgumentError(
            f"names={','.join(names)} has a name twice, expected one per site: a name tells a site "
            "from the others. Remove the duplicate."
        )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _make_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A random part: each authority has its own name, so that errors can tell them apart.
    name = _subject(f"fedpax authority {os.urandom(6).hex()}")
    expires = _now() + datetime.timedelta(days=_AUTHORITY_DAYS)
    builder = (
        _builder(name, name, key, key, expires)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return builder.sign(key, hashes.SHA256()), key


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (folder / _KEY_FILE).exists():
        _check_mode(folder / _KEY_FILE)
    try:
        certificate = x509.load_pem_x509_certificate(_read_file(folder / _CERTIFICATE_FILE))
        key = serialization.load_pem_private_key(_read_file(folder / _KEY_FILE), None)
        certificate.verify_directly_issued_by(certificate)
        usable = key.public_key() == certificate.public_key()
        usable &= certificate.not_valid_after_utc > _now()
    except (ValueError, TypeError, InvalidSignature):
        usable = False
    if not usable or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ArgumentError(
            f"authority={str(folder)!r} holds no authority that can sign, or an expired one, "
            "expected the folder `authority` that `fedpax certificates` made. Pass this folder, or "
            "make a new authority and new certificates for all sites."
        )
    return certificate, key


def _issue(
    name: str, days: int, issuer: x509.Certificate, issuer_key: ec.EllipticCurvePrivateKey
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    address = _address(name)
    alternative = x509.DNSName(name) if address is None else x509.IPAddress(address)
    usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    expires = min(_now() + datetime.timedelta(days=days), issuer.not_valid_after_utc)
    builder = (
        _builder(_subject(name), issuer.subject, key, issuer_key, expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256()), key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    expires: datetime.datetime,
) -> x509.CertificateBuilder:
    public, issuer_public = key.public_key(), issuer_key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_DIFFERENCE)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_public), critical=False
        )
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _write(folder: Path, files: dict[str, x509.Certificate | ec.EllipticCurvePrivateKey]) -> None:
    folder.mkdir(mode=0o700)
    for name, value in files.items():
        if isinstance(value, x509.Certificate):
            content = value.public_bytes(serialization.Encoding.PEM)
        else:
            content = value.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)


def _read_file(path: Path) -> bytes:
    try:
        return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there is no file {path}. Pass a folder that `fedpax certificates` made for one name, "
            "such as certificates/site-1."
        ) from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}), expected a file that `fedpax certificates` "
            "made. Let the user of this process read it, or copy the folder again."
        ) from None


def _check_mode(path: Path) -> None:
    """Check that only its owner can use a private key. As in ssh, keys of another user pass."""
    if os.name == "nt":
        return
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.getuid() and mode & 0o077:
        raise ArgumentError(
            f"{path} has mode {mode:04o}, expected 0600: other users of this machine can read or "
            f"change this private key. Run `chmod 600 {shlex.quote(str(path))}`."
        )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _minute(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
