"""Deprecation: an old name works for one more minor version, with a warning that names the new."""

import warnings


def warn_deprecated(old: str, new: str, *, removed_in: str, stacklevel: int = 2) -> None:
    """Warn that a name or an argument is deprecated.

    Args:
        old: the deprecated name, as users write it.
        new: its replacement.
        removed_in: the version without it: the minor version after the first one that warns. A test
            fails if the old name is still there in this version.
        stacklevel: the number of calls between the user's line and this one, as in `warnings.warn`.
            Default 2: the function that calls this one is the deprecated one.

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
        stacklevel=stacklevel + 1,
    )
