"""Secure sums of sites or nodes: the coordinator learns the sum of their integers alone.

- `SiteSide` and `CoordinatorSide` are the two sides of the protocol of Bonawitz et al. (2017), as
  state machines without network.
- `fedpax.secure_sums.arithmetic` makes integers of floats, without an error of the sum.
- `fedpax.aggregators.secure_mean.FixedPoint` makes integers of floats, as `secure_mean` does.

Needs the package cryptography: `pip install "fedpax[sites]"` or `"fedpax[flower]"`.
"""

from fedpax.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
