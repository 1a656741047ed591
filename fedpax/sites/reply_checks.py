"""Checks of what sites send to a coordinator."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedpax.sites.contract import Json
from fedpax.sites.tasks import Task
from fedpax.transport.calls import MalformedError, RefusedError
from fedpax.transport.checked_header import CheckedHeader

MOST_METRICS, LONGEST_DESCRIPTION = 100, 1 << 18

MOST_RENUMBERED = 100
"""Times that a site can join with another number of clients than before, at most.

Each time its clients get new numbers, and the coordinator traces its program again."""


def check_size(name: str, description: Json, count: int, most: int) -> None:
    """Raise if a site that joins has a large description, or too many clients."""
    if (size := len(json.dumps(description))) > LONGEST_DESCRIPTION:
        raise MalformedError(
            f"site {name!r} has a description of {size:,} bytes, expected at most "
            f"{LONGEST_DESCRIPTION:,}. State the categories of columns, or leave columns out: "
            "--data.columns NAME=left_out."
        )
    if count > most:
        raise RefusedError(
            f"site {name!r} has {count:,} clients, expected at most {most:,}. Start `fedpax "
            f"syncer` with --clients_per_site={count}, or join with fewer clients."
        )


def check_renumbered(name: str, times: int) -> None:
    """Raise if a site that joins with another number of clients has done so too often."""
    if times >= MOST_RENUMBERED:
        raise RefusedError(
            f"site {name!r} has joined {times} times with another number of clients than before "
            f"and now does so again, expected at most {MOST_RENUMBERED} times. Give the site its "
            "former data, or wait for another run."
        )


def find_fault(task: Task, own: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return why a reply cannot be counted, or None."""
    rows = len(own.get("clients", ()))
    expected = task.coded if own.get("coded") else task.expected
    for name, (shape, dtype) in expected.items():
        wanted = tuple(rows if size is None else size for size in shape)
        array = arrays.get(name)
        if array is None or array.shape != wanted or array.dtype != dtype:
            received = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            return f"{name} is {received}, expected {dtype}{list(wanted)}"
        if array.dtype.kind not in "biu" and not is_finite(array):
            return f"{name} has NaN or infinity, expected finite values"
    if extra := arrays.keys() - expected.keys():
        return f"{min(extra)} is not asked for"
    return None if task.is_encoded(own) else find_wrong_weight(task, rows, arrays)


def checked_fields(fields: Json) -> Json:
    """Return the fields of a reply; raise a `MalformedError` if a number or a name is none."""
    checked = CheckedHeader(fields)
    if "examples" in fields:
        checked.count("examples")
    metrics = checked.mapping("metrics") if "metrics" in fields else {}
    if len(metrics) > MOST_METRICS:
        raise MalformedError(f"a reply has {len(metrics)} metrics, at most {MOST_METRICS} fit.")
    for name in metrics:
        CheckedHeader({"name": name}).text("name"), CheckedHeader(metrics).number(name)
    return fields


def check_types(types: Json) -> None:
    """Raise a `MalformedError` unless each field of a batch has a dtype and a shape."""
    for name, kind in types.items():
        CheckedHeader({"name": name}).text("name")
        try:
            dtype, shape = kind
            fits = all(type(size) is int and 0 <= size < 2**31 for size in shape)
            np.dtype(dtype)
        except (TypeError, ValueError):
            fits = False
        if not fits or len(shape) > 32:
            raise MalformedError(f"the field {name!r} of a batch is {str(kind)[:100]}.")


def find_wrong_weight(task: Task, rows: int, arrays: Mapping[str, Any]) -> str | None:
    """Return why the weights of some clients cannot be counted, or None."""
    for name, most in task.weights.items():
        weight = float(arrays[name])
        if not 0 <= weight <= rows * most * (1 + 1e-5):  # float32 rounds a sum
            return f"its weight is {weight:g}, expected 0 to {rows * most:g}"
        if not weight and any(arrays[other].any() for other in task.weighted):
            return "its weight is 0 and its values are not"
    return None


def claimed_weight(task: Task, arrays: Mapping[str, np.ndarray]) -> float | None:
    """Return the weight that a site claims for its clients; None if the task asks for none."""
    return next((float(arrays[name]) for name in task.weights), None)


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array has no NaN and no infinity."""
    floats = array if array.dtype.kind in "fc" else array.astype(np.float32)  # such as bfloat16
    return bool(np.all(np.isfinite(floats)))


def shorten_types(types: Json) -> str:
    """Describe the fields of a batch."""
    return ", ".join(f"{name}: {kind}" for name, kind in sorted(types.items()))[:500]
