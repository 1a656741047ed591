"""Secure sums between sites: the coordinator learns the sum of the sites' integers alone.

- `SiteSide` and `CoordinatorSide` are the two sides of the protocol of Bonawitz et al. (2017), as
  state machines that exchange messages. They do not use the network.
- `CertificateSigner` signs the keys of a site with the key of its certificate.
- `fedpax.aggregators.fixed_point.FixedPoint` makes integers of floats, as `secure_mean` does.

Needs the package cryptography: `pip install "fedpax[sites]"`.
"""

from fedpax.sites.secure_sums.coordinator_side import CoordinatorSide
from fedpax.sites.secure_sums.errors import SecureSumError
from fedpax.sites.secure_sums.signed_keys import CertificateSigner
from fedpax.sites.secure_sums.site_side import SiteSide

__all__ = ["CertificateSigner", "CoordinatorSide", "SecureSumError", "SiteSide"]
