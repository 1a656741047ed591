"""fedpax: federated and multi-island training as jitted JAX functions."""

from fedpax.lazy_names import lazy_names

__version__ = "0.2.0"

# The command line handles signals before it loads JAX.
__all__, __getattr__, __dir__ = lazy_names(__name__)
