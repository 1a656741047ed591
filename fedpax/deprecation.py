"""Deprecation: an old name works for one more minor version, with a warning that names the new."""

import warnings


def warn_deprecated(old: str, new: str, *, removed_in: str) -> None:
    """Warn at the caller's caller that a name is deprecated, until the version `removed_in`."""
    warnings.warn(
        f"{old} is deprecated and will be removed in fedpax {removed_in}. Use {new}.",
        DeprecationWarning,
        stacklevel=3,
    )
