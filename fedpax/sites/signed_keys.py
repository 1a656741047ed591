"""The former module of `fedpax.transport.signed_keys.CertificateSigner`."""

from fedpax.lazy_names import warn_deprecated


def __getattr__(name: str) -> object:
    if name != "CertificateSigner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    old, new = f"fedpax.sites.signed_keys.{name}", f"fedpax.transport.signed_keys.{name}"
    warn_deprecated(old, new, removed_in="0.3.0")
    from fedpax.transport.signed_keys import CertificateSigner

    return CertificateSigner
