"""Deprecation: an old name works for one more minor version, with a warning that names the new."""

import warnings


def warn_deprecated(old: str, new: str, *, removed_in: str) -> None:
    """Warn at the caller's caller that a name is deprecated, until the version `removed_in`.

    Example:
        >>> def weighted_mean(values):  # renamed to federated_mean
        ...     warn_deprecated("weighted_mean", "federated_mean", removed_in="9.0.0")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     weighted_mean([])
        >>> print(caught[0].message)
        weighted_mean is deprecated and will be removed in fedpax 9.0.0. Use federated_mean.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in fedpax {removed_in}. Use {new}.",
        DeprecationWarning,
        stacklevel=3,
    )
