"""Certificate requests: which ones are signed, what a signed certificate allows, and what stays."""

import base64
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from fedpax.transport.authority import ISSUED_FILE
from fedpax.transport.calls import DisconnectedError, RefusedError, connect, serve
from fedpax.transport.certificates import (
    make_certificates,
    make_request,
    read_certificates,
    sign_request,
)
from fedpax.transport.message import Message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and the signed site hospital-1 in `me`."""
    folder = tmp_path_factory.mktemp("requests")
    make_certificates(folder / "authority", ["localhost"])
    make_request(folder / "me", "hospital-1")
    accept(folder, folder / "me")
    return folder


def accept(folder: Path, site: Path, *, replace: bool = False) -> None:
    """Sign the request of a site, and put the signed files beside its key."""
    signed = folder / f"signed-{site.name}"
    sign_request(site / "request.pem", folder / "authority" / "authority", signed, replace=replace)
    assert sorted(os.listdir(signed)) == ["authority.pem", "certificate.pem"]
    for path in signed.iterdir():
        path.rename(site / path.name)


def test_a_signed_site_connects_under_its_name(folder: Path) -> None:
    def tell_peer(peer: str, message: Message) -> Message:
        return Message({"peer": peer})

    certificates = folder / "authority" / "localhost"
    with serve(tell_peer, "localhost:0", certificates=certificates) as server:
        address = f"localhost:{server.port}"
        with connect(address, certificates=folder / "me") as connection:
            assert connection.call(Message({}), timeout=10).header == {"peer": "hospital-1"}


def test_a_signed_site_cannot_pose_as_the_syncer(folder: Path) -> None:
    # Not even if its name is the host's: its certificate is not one of a server.
    make_request(folder / "host", "127.0.0.1")
    accept(folder, folder / "host")
    with serve(lambda peer, message: message, "127.0.0.1:0", certificates=folder / "host") as fake:
        site = folder / "authority" / "localhost"
        with connect(f"127.0.0.1:{fake.port}", certificates=site) as connection:
            with pytest.raises((RefusedError, DisconnectedError)):
                connection.call(Message({}), timeout=3)


def test_the_key_stays_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        fingerprint = make_request(tmp_path / "me", "site-1")
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "me").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "me" / "key.pem").stat().st_mode) == 0o600
    key = (tmp_path / "me" / "key.pem").read_bytes()
    request = (tmp_path / "me" / "request.pem").read_bytes()
    assert b"PRIVATE" in key and b"PRIVATE" not in request
    make_certificates(tmp_path / "a", ["localhost"])
    signed = sign_request(
        tmp_path / "me" / "request.pem", tmp_path / "a" / "authority", tmp_path / "signed", days=30
    )
    assert (signed.name, signed.fingerprint) == ("site-1", fingerprint)
    private = serialization.load_pem_private_key(key, None)
    certificate = x509.load_pem_x509_certificate((tmp_path / "signed/certificate.pem").read_bytes())
    assert certificate.public_key() == private.public_key()
    assert certificate.not_valid_after_utc == signed.expires
    with pytest.raises(FileExistsError, match="Choose a new folder"):
        make_request(tmp_path / "me", "site-1")
    assert (tmp_path / "me" / "key.pem").read_bytes() == key


def test_a_folder_whose_request_is_not_signed_yet(folder: Path, tmp_path: Path) -> None:
    make_request(tmp_path / "new", "site-9")
    with pytest.raises(FileNotFoundError, match=r"Let the coordinator sign .*new/request\.pem"):
        read_certificates(tmp_path / "new")


def test_a_given_name_is_given_again_only_by_option(folder: Path, tmp_path: Path) -> None:
    authority = folder / "authority" / "authority"
    make_request(tmp_path / "again", "hospital-1")
    request = tmp_path / "again" / "request.pem"
    with pytest.raises(ValueError, match=r"which another request was given\. .* pass --replace"):
        sign_request(request, authority, tmp_path / "signed")
    assert not (tmp_path / "signed").exists()
    sign_request(request, authority, tmp_path / "signed", replace=True)
    assert sorted(os.listdir(tmp_path / "signed")) == ["authority.pem", "certificate.pem"]


def test_a_key_has_one_name(folder: Path, tmp_path: Path) -> None:
    authority = folder / "authority" / "authority"
    key = serialization.load_pem_private_key((folder / "me" / "key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    for name in ("hospital-1", "hospital-7"):
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        request = x509.CertificateSigningRequestBuilder().subject_name(subject)
        signed = request.sign(key, hashes.SHA256())
        (tmp_path / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ValueError, match=r"of 'hospital-7' belongs to the site 'hospital-1', exp"):
        sign_request(tmp_path / "hospital-7.pem", authority, tmp_path / "signed", replace=True)
    assert not (tmp_path / "signed").exists()
    sign_request(tmp_path / "hospital-1.pem", authority, tmp_path / "signed", replace=True)


@pytest.mark.parametrize("listed", [True, False])
def test_the_names_of_the_coordinator_are_never_given(tmp_path: Path, listed: bool) -> None:
    make_certificates(tmp_path / "a", ["syncer.example.org"])
    if not listed:  # as earlier versions left it
        (tmp_path / "a" / "authority" / ISSUED_FILE).unlink()
    make_request(tmp_path / "evil", "syncer.example.org")
    request, authority = tmp_path / "evil" / "request.pem", tmp_path / "a" / "authority"
    for replace in (False, True):
        with pytest.raises(ValueError, match="made with the authority"):
            sign_request(request, authority, tmp_path / "signed", replace=replace)
    make_certificates(tmp_path / "more", ["site-1"], authority=authority)
    make_request(tmp_path / "other", "site-1")
    with pytest.raises(ValueError, match="made with the authority"):
        sign_request(tmp_path / "other" / "request.pem", authority, tmp_path / "signed")
    assert not (tmp_path / "signed").exists()


def test_a_damaged_list_of_names_is_told(folder: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", ["localhost"])
    with (tmp_path / "a" / "authority" / ISSUED_FILE).open("a") as file:
        file.write('{"name": \n')
    with pytest.raises(ValueError, match=r"issued\.jsonl is damaged, expected a line of JSON"):
        sign_request(
            folder / "me" / "request.pem", tmp_path / "a" / "authority", tmp_path / "signed"
        )


Builder = x509.CertificateSigningRequestBuilder


def _pem(
    name: str = "site-7",
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | None = None,
    change: Callable[[Builder], Builder] = lambda builder: builder,
    attributes: tuple[x509.NameAttribute, ...] = (),
) -> bytes:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name), *attributes])
    key = key or ec.generate_private_key(ec.SECP256R1())
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = change(Builder().subject_name(subject)).sign(key, algorithm)
    return request.public_bytes(serialization.Encoding.PEM)


def _forged() -> bytes:
    """Return a request whose signature is not by the key that it names."""
    der = bytearray(x509.load_pem_x509_csr(_pem()).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    body = base64.encodebytes(bytes(der)).decode()
    return (
        f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n".encode()
    )


def _asks_for(extension: x509.ExtensionType) -> Callable[[Builder], Builder]:
    return lambda builder: builder.add_extension(extension, critical=True)


ORGANIZATION = x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "hospital")
SECOND_NAME = x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")
REFUSED = {
    "no request": (lambda: b"text", "not a certificate request"),
    "empty": (lambda: b"", "not a certificate request"),
    "wildcard": (lambda: _pem("*.example.org"), "is not a name"),
    "control characters": (lambda: _pem("a\x1b[2J"), "is not a name"),
    "upper case": (lambda: _pem("Site"), "is not a name"),
    "path": (lambda: _pem("../localhost"), "is not a name"),
    "authority": (lambda: _pem("authority"), "authority's folder"),
    "RSA": (lambda: _pem(key=rsa.generate_private_key(65537, 2048)), "elliptic key on P-256"),
    "Ed25519": (lambda: _pem(key=ed25519.Ed25519PrivateKey.generate()), "elliptic key on P-256"),
    "P-384": (lambda: _pem(key=ec.generate_private_key(ec.SECP384R1())), "elliptic key on P-256"),
    "forged": (_forged, "not signed by the key"),
    "CA": (lambda: _pem(change=_asks_for(x509.BasicConstraints(True, None))), "extensions"),
    "other names": (
        lambda: _pem(change=_asks_for(x509.SubjectAlternativeName([x509.DNSName("*")]))),
        "extensions",
    ),
    "organization": (lambda: _pem(attributes=(ORGANIZATION,)), "other parts"),
    "two names": (lambda: _pem(attributes=(SECOND_NAME,)), "other parts"),
    "large": (lambda: b"-" * (1 << 17), "expected at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_are_refused(folder: Path, tmp_path: Path, case: str) -> None:
    make, words = REFUSED[case]
    (tmp_path / "request.pem").write_bytes(make())
    record = folder / "authority" / "authority" / ISSUED_FILE
    before = record.read_bytes()
    with pytest.raises((ValueError, OSError), match=words):
        sign_request(
            tmp_path / "request.pem", folder / "authority" / "authority", tmp_path / "signed"
        )
    assert record.read_bytes() == before and not (tmp_path / "signed").exists()
