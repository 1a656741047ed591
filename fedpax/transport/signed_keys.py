"""Signatures of the public keys of sites, by the keys of their certificates."""

import base64
import contextlib
import ipaddress
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpax.secure_sums.arithmetic import SecureSumError
from fedpax.transport.authority import now
from fedpax.transport.certificates import Certificates

__all__ = ["CertificateSigner"]

_MAX_TEXT = 10_000
_COMMON_NAME = x509.NameOID.COMMON_NAME
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class CertificateSigner:
    """Signs with a site's certificate, and believes the certificates of its authority.

    So a coordinator that does not have the authority's key cannot pose as a site.

    A certificate of the name `server`, by which sites know the coordinator, is not a site's.
    """

    def __init__(self, certificates: Certificates, server: str = "") -> None:
        self._server = server
        key = serialization.load_pem_private_key(certificates.key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._authority = x509.load_pem_x509_certificate(certificates.authority)
        self._certificate = certificates.certificate.decode()

    def sign(self, content: bytes) -> dict[str, str]:
        """Return the certificate and the signature of the content."""
        signature = base64.b64encode(self._key.sign(content, _ALGORITHM)).decode()
        return {"certificate": self._certificate, "signature": signature}

    def check(self, site: str, content: bytes, proof: Mapping[str, Any]) -> None:
        """Raise a `SecureSumError` if the proof is not by the site."""
        reason = "are not signed by a certificate of this name and of this site's authority"
        try:
            match proof:
                case {"certificate": str() as pem, "signature": str() as text} if (
                    len(pem) + len(text) <= _MAX_TEXT
                ):
                    certificate = x509.load_pem_x509_certificate(pem.encode())
                    certificate.verify_directly_issued_by(self._authority)
                    names = certificate.subject.get_attributes_for_oid(_COMMON_NAME)
                    public = certificate.public_key()
                    if (
                        [name.value for name in names] == [site]
                        and certificate.not_valid_before_utc <= now()
                        and now() < certificate.not_valid_after_utc
                        and isinstance(public, ec.EllipticCurvePublicKey)
                    ):
                        public.verify(base64.b64decode(text), content, _ALGORITHM)
                        if not (self._server and _is_for(certificate, self._server)):
                            return
                        reason = (
                            "are of the coordinator's certificate, expected a site's. Make "
                            "it one of another name by `fedpax certificates --request`"
                        )
        except (ValueError, TypeError, InvalidSignature):
            pass
        raise SecureSumError(f"the keys of site {site!r} {reason}")


def _is_for(certificate: x509.Certificate, server: str) -> bool:
    """Tell whether a certificate can serve the connections to a host name or an address."""
    names = [str(x.value) for x in certificate.subject.get_attributes_for_oid(_COMMON_NAME)]
    with contextlib.suppress(x509.ExtensionNotFound):
        more = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names += more.get_values_for_type(x509.DNSName)
        names += map(str, more.get_values_for_type(x509.IPAddress))
    host = server.lower().rstrip(".")
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return not {host, "*." + host.partition(".")[2]}.isdisjoint(map(str.lower, names))
