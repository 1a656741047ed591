"""Islands of DiLoCo with their own runtimes, which a syncer merges."""

from fedpax.lazy_names import lazy_names

# Its packages need the extra `sites`.
__all__, __getattr__, __dir__ = lazy_names(__name__)
