"""Calls between processes of different owners, over gRPC.

- `calls`, `message`: a server, its clients, and what they send.
- `authority`, `certificates`, `signed_keys`: who a site is.
- `admission`, `expulsions`, `checked_header`: what a server accepts from strangers.
"""

from typing import TYPE_CHECKING

from fedpax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fedpax.transport.signed_keys import CertificateSigner as CertificateSigner

_MODULES = {"CertificateSigner": "fedpax.transport.signed_keys"}
__all__ = list(_MODULES)
# Its modules need the extra `sites`.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
