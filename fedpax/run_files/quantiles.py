"""Quantiles of metrics that have a value for each participant."""

from collections.abc import Mapping
from typing import Any

import numpy as np

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""The ends of the names in `metrics.jsonl`, and the quantiles that they stand for."""


def is_vector(value: Any) -> bool:
    """Return whether a metric has a value for each participant, and is not one number."""
    return np.ndim(value) == 1 and np.size(value) != 1


def with_quantiles(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each vector by its quantiles, such as `accuracy/p10`; leave all else as it is.

    A value that is NaN or infinite is left out: a participant that is absent has none.

    Example:
        >>> with_quantiles({"loss": 0.5, "accuracy": np.array([0.1, 0.3, np.nan, 0.8])})
        {'loss': 0.5, 'accuracy/p10': 0.14, 'accuracy/p50': 0.3, 'accuracy/p90': 0.7}
    """
    named: dict[str, Any] = {}
    for name, value in values.items():
        if not is_vector(value):
            named[name] = value
            continue
        known = finite_values(value)
        for end, quantile in QUANTILES.items():
            exact = float(np.quantile(known, quantile)) if known.size else np.nan
            named[f"{name}/{end}"] = round(exact, 12)
    return named


def finite_values(values: Any) -> np.ndarray:
    """Return the finite values of a vector, as float64."""
    wide = np.asarray(values, np.float64)
    return wide[np.isfinite(wide)]
