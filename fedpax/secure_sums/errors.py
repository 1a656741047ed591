"""The error of a secure sum."""

from fedpax.errors import FedpaxError


class SecureSumError(FedpaxError, ValueError):
    """A message that the protocol of a secure sum does not allow, or too few sites."""
