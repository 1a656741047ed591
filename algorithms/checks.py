"""Checks that methods share: settings in range, and client ids where clients keep state."""

from typing import Any

import jax
from jaxtyping import Array, Int

from fedpax.clients.cohort import Cohort


def check_setting(method: str, name: str, value: Any, *, most: float | None = None) -> None:
    """Check that a setting is at least 0. Traced values are not checked.

    Args:
        method: the method's name, for the message.
        name: the argument's name.
        value: a number, or a traced scalar (of a derivative, for example).
        most: the largest value. Default None: none.

    Raises:
        ValueError: the value is out of range or NaN.

    Example:
        >>> check_setting("fedprox", "mu", -1.0)
        Traceback (most recent call last):
            ...
        ValueError: fedprox: mu is -1.0, expected at least 0.
    """
    if isinstance(value, jax.core.Tracer) or (value >= 0 and (most is None or value <= most)):
        return
    wanted = "at least 0" if most is None else f"a number from 0 to {most:g}"
    raise ValueError(f"{method}: {name} is {value}, expected {wanted}.")


def required_client_ids(method: str, cohort: Cohort) -> Int[Array, " participants"]:
    """Return the cohort's client ids, which a method with client state needs.

    Raises:
        ValueError: `cohort.client_ids` is None.
    """
    if cohort.client_ids is None:
        raise ValueError(
            f"{method}: cohort.client_ids is None, but {method} keeps state for each client. Set "
            "client_ids to each participant's index in the population, an integer array "
            "[participants], -1 where absent; fedpax.data.cohort_rounds sets it."
        )
    return cohort.client_ids
