"""The authority of a federation: its key issues certificates, and its folder names all of them."""

import contextlib
import datetime
import ipaddress
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

from fedpax.errors import ArgumentError
from fedpax.files import read_file

AUTHORITY = "authority"
"""The folder of the authority, beside the folders of the names."""

ISSUED_FILE = "issued.jsonl"
"""The file of the authority with a line for each certificate."""

AUTHORITY_DAYS = 3650
_CLOCK_DIFFERENCE = datetime.timedelta(hours=1)  # of the sites, at most
_HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")


class Authority(NamedTuple):
    """An authority that can issue certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def issue(
        self, name: str, public: ec.EllipticCurvePublicKey, days: int, *, only_connects: bool
    ) -> x509.Certificate:
        """Return a certificate of a name; one that only connects cannot pose as a server."""
        address = _address(name)
        alternative = x509.DNSName(name) if address is None else x509.IPAddress(address)
        usages = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
        if not only_connects:
            usages.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
        issuer, expires = self.certificate, now() + datetime.timedelta(days=days)
        expires = min(expires, issuer.not_valid_after_utc)
        builder = (
            _builder(_subject(name), issuer.subject, public, self.key.public_key(), expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


def make_authority() -> Authority:
    """Make an authority with its own key."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    # A random part, so that errors can tell authorities apart.
    name = _subject(f"fedpax authority {os.urandom(6).hex()}")
    expires = now() + datetime.timedelta(days=AUTHORITY_DAYS)
    builder = (
        _builder(name, name, public, public, expires)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def read_authority(folder: Path) -> Authority:
    """Read an authority, and check that it can issue certificates."""
    if (folder / KEY_FILE).exists():
        check_mode(folder / KEY_FILE)
    try:
        certificate = x509.load_pem_x509_certificate(read_pem(folder / CERTIFICATE_FILE))
        key = serialization.load_pem_private_key(read_pem(folder / KEY_FILE), None)
        certificate.verify_directly_issued_by(certificate)
        usable = key.public_key() == certificate.public_key()
        usable &= certificate.not_valid_after_utc > now()
    except (ValueError, TypeError, InvalidSignature):
        usable = False
    if not usable or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ArgumentError(
            f"authority={str(folder)!r} holds no authority that can sign, or an expired one, "
            "expected the folder `authority` that `fedpax certificates` made. Pass this folder, or "
            "make a new authority and new certificates for all sites."
        )
    return Authority(certificate, key)


def record_issued(folder: Path, certificates: dict[str, x509.Certificate], by: str) -> None:
    """Append certificates to the authority's list: `by` is "names" or "request"."""
    lines = [
        json.dumps(
            {
                "name": name,
                "by": by,
                "serial": f"{certificate.serial_number:x}",
                "key": fingerprint(certificate.public_key()),
                "expires": certificate.not_valid_after_utc.isoformat(),
            }
        )
        for name, certificate in certificates.items()
    ]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(folder / ISSUED_FILE, flags, 0o600), "ab") as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())


def fingerprint(public: CertificatePublicKeyTypes) -> str:
    """Return the fingerprint of a public key."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        public.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return f"SHA256:{digest.finalize().hex()}"


class Issued(NamedTuple):
    """The certificates of an authority.

    Names have "names" or "request", how they got a certificate; keys are fingerprints.
    """

    names: Mapping[str, str]
    keys: Mapping[str, str]


def read_issued(folder: Path) -> Issued:
    """Return the certificates of the authority in a folder."""
    # An authority of an earlier version has no list; its certificates are made beside it.
    beside = {
        path.parent.name: "names" for path in folder.resolve().parent.glob("*/certificate.pem")
    }
    beside.pop(folder.resolve().name, None)
    path = folder / ISSUED_FILE
    try:
        entries = [json.loads(line) for line in read_file(path).decode().splitlines()]
        names = beside | {str(entry["name"]): str(entry["by"]) for entry in entries}
        keys = {str(entry["key"]): str(entry["name"]) for entry in entries if "key" in entry}
        return Issued(names, keys)
    except FileNotFoundError:
        return Issued(beside, {})
    except (ValueError, KeyError, TypeError):
        raise ArgumentError(
            f"{path} is damaged, expected a line of JSON with `name` and `by` for each "
            "certificate. Restore the file from a copy, or remove the damaged line."
        ) from None


def check_names(names: Sequence[str]) -> None:
    """Check names of certificates."""
    if not names:
        raise ArgumentError(
            "there are no names, expected the syncer's host name and a name for each site. Set for "
            "example --names=syncer.example.org,site-1,site-2."
        )
    for index, name in enumerate(names):
        check_name(f"names[{index}]", name)
    if len(set(names)) < len(names):
        raise ArgumentError(
            f"names={','.join(names)} has a name twice, expected one per site: a name tells a site "
            "from the others. Remove the duplicate."
        )


def check_name(argument: str, name: str) -> None:
    """Check the name of a certificate: a host name or an address, without wildcards."""
    if len(name) > 64 or not (_HOST_NAME.fullmatch(name) or _address(name)):
        raise ArgumentError(
            f"{argument}={name!r} is not a name, expected at most 64 lower-case letters, "
            "digits, hyphens and dots, such as site-1 or syncer.example.org, or an IP address."
        )
    if name == AUTHORITY:
        raise ArgumentError(
            f"{argument}={name!r} is the name of the authority's folder. Choose another."
        )


def check_days(days: int) -> None:
    """Check the days until certificates expire."""
    if type(days) is not int or not 1 <= days <= AUTHORITY_DAYS:
        raise ArgumentError(
            f"days={days!r} is out of range, expected a whole number from 1 to {AUTHORITY_DAYS}. "
            "Choose for example days=365."
        )


def now() -> datetime.datetime:
    """Return the time, UTC."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    issuer_public: ec.EllipticCurvePublicKey,
    expires: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _CLOCK_DIFFERENCE)
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


# ---- files of certificates, requests and private keys: read with checks, written for their owner

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "authority.pem", "certificate.pem", "key.pem"
REQUEST_FILE = "request.pem"

Content = x509.Certificate | x509.CertificateSigningRequest | ec.EllipticCurvePrivateKey


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder of mode 0700 that appears as `out` when the block has ended without error."""
    if out.exists():
        raise FileExistsError(
            f"out={str(out)!r} exists, and certificates that are in use must not be replaced. "
            "Choose a new folder, or remove this one."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))  # mode 0700
    try:
        yield temporary
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_files(folder: Path, files: dict[str, Content]) -> None:
    """Write PEM files of mode 0600 into a folder, which is made if it is missing."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, value in files.items():
        if isinstance(value, ec.EllipticCurvePrivateKey):
            content = value.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        else:
            content = value.public_bytes(serialization.Encoding.PEM)
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)


def read_pem(path: Path) -> bytes:
    """Read a file that `fedpax certificates` made."""
    try:
        return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        remedy = (
            "Pass a folder that `fedpax certificates` made for one name, such as "
            "certificates/site-1."
        )
        if (path.parent / REQUEST_FILE).exists():
            remedy = (
                f"Let the coordinator sign {path.parent / REQUEST_FILE} by `fedpax certificates "
                f"--sign`, and copy the files of the signed folder into {path.parent}."
            )
        raise FileNotFoundError(f"there is no file {path}. {remedy}") from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}), expected a file that `fedpax certificates` "
            "made. Let the user of this process read it, or copy the folder again."
        ) from None


def check_mode(path: Path) -> None:
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
