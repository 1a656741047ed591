"""Certificate requests: a site makes its key, and the authority signs the site's request.

The private key never leaves the site. Needs the package cryptography:
`pip install "fedpax[sites]"`.
"""

import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedpax.errors import ArgumentError
from fedpax.files import read_file
from fedpax.transport.authority import (
    check_days,
    check_name,
    fingerprint,
    read_authority,
    read_issued,
    record_issued,
)
from fedpax.transport.certificate_files import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REQUEST_FILE,
    new_folder,
    write_files,
)

_MAX_BYTES = 1 << 16  # of a request


class SignedRequest(NamedTuple):
    """A certificate that `sign_request` made.

    Attributes:
        name: the site's name.
        fingerprint: the fingerprint of the site's public key.
        expires: the time at which the certificate expires, UTC.
    """

    name: str
    fingerprint: str
    expires: datetime.datetime


def make_request(out: Path | str, name: str) -> str:
    """Make a site's private key, and a request for a certificate of its public key.

    `OUT/key.pem` is the private key: it stays at the site. `OUT/request.pem` holds the name and the
    public key, signed by the private key: send it to the coordinator. Both files have mode 0600.

    Args:
        out: the folder to make.
        name: the site's name: letters, digits, hyphens and dots.

    Returns:
        The fingerprint of the public key. If it equals the fingerprint that `sign_request` returns,
        the coordinator signs this request and no other one.

    Raises:
        FileExistsError: `out` exists.
        ValueError: the name is malformed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "me"
        >>> make_request(folder, "hospital-1")
        'SHA256:...'
        >>> sorted(path.name for path in folder.iterdir())
        ['key.pem', 'request.pem']
    """
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
    """Sign the request of a site, which holds the private key.

    `OUT/certificate.pem` and `OUT/authority.pem` go beside the site's key. They are not secret. The
    certificate holds the request's name and public key, and nothing else of the request. It allows
    to connect, and not to serve: a site cannot pose as the coordinator, whatever its name is.

    Args:
        request: the file `request.pem` of the site.
        authority: the folder of the authority. Its file `issued.jsonl` gets the name.
        out: the folder to make.
        days: days until the certificate expires, at the latest with the authority. Default 365.
        replace: whether a name that was given by request before may be given again, such as when a
            certificate expires. The former certificate stays valid until it expires.

    Returns:
        The name, the fingerprint of the public key, and the time at which the certificate expires.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: there is no authority in the folder `authority`.
        OSError: the request cannot be read.
        ValueError: the request is malformed, is not signed by its key, has another type of key,
            asks for the rights of an authority or for other names, its name is malformed or given,
            or its key belongs to another name; or another argument is out of range.

    Example:
        >>> import tempfile
        >>> from fedpax.transport.certificates import make_certificates, read_certificates
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = make_certificates(folder / "authority", ["syncer.example.org"])
        >>> fingerprint = make_request(folder / "me", "hospital-1")  # at the site
        >>> signed = sign_request(
        ...     folder / "me" / "request.pem", folder / "authority" / "authority", folder / "signed"
        ... )
        >>> signed.name, signed.fingerprint == fingerprint
        ('hospital-1', True)
        >>> for file in (folder / "signed").iterdir():  # at the site, which gets the two files
        ...     _ = file.rename(folder / "me" / file.name)
        >>> read_certificates(folder / "me").name
        'hospital-1'
    """
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
        # The list comes first: a certificate that is not in it could be given twice.
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

    content = read_file(path, _MAX_BYTES)
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
