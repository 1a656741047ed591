"""Files of traces: NumPy archives, and JSON lines with one participant a line."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.errors import ArgumentError
from fedpax.files import check_fetched, parse_json
from fedpax.simulation.trace import Trace

FIELDS = ("seconds_per_step", "seconds_to_receive", "seconds_to_send")


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace to a file.

    Args:
        trace: the trace.
        path: a file ending in `.npz` (the arrays of `Trace`) or `.jsonl`. A line of `.jsonl` is a
            participant: `{"seconds_per_step": 1.5, "seconds_to_receive": 0.1, "seconds_to_send":
            0.2, "downtimes": [[60.0, 90.0], [120.0, null]]}`, null for never.

    Raises:
        ValueError: the name ends otherwise.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_trace(Trace(np.array([1.0, 2.5])), f"{folder}/trace.jsonl")
        ...     load_trace(f"{folder}/trace.jsonl").seconds_per_step.tolist()
        [1.0, 2.5]
    """
    path = Path(path)
    if _format(path) == ".npz":
        np.savez(path, downtimes=trace.downtimes, **{name: getattr(trace, name) for name in FIELDS})
        return
    lines = []
    for i in range(trace.num_participants):
        entry: dict[str, Any] = {name: float(getattr(trace, name)[i]) for name in FIELDS}
        intervals = trace.downtimes[i]
        entry["downtimes"] = [
            [float(start), None if np.isinf(end) else float(end)]
            for start, end in intervals[np.isfinite(intervals[:, 0])]
        ]
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def load_trace(path: str | Path) -> Trace:
    r"""Read a trace that `save_trace` wrote, or that has the same format.

    Args:
        path: a file ending in `.npz` or `.jsonl`. Of a line of `.jsonl`, `seconds_per_step` alone
            is required.

    Returns:
        The trace.

    Raises:
        ValueError: the name ends otherwise, a line is not a JSON object with these fields, or the
            values do not fit a `Trace`. The message names the file and the line.
        FileNotFoundError: there is no such file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "measured.jsonl")
        ...     _ = file.write_text('{"seconds_per_step": 0.5, "downtimes": [[60, 90]]}\n')
        ...     load_trace(file).is_up(75.0).tolist()
        [False]
    """
    path = Path(path)
    form = _format(path)
    check_fetched(path)
    return _load_arrays(path) if form == ".npz" else _load_lines(path)


def _load_arrays(path: Path) -> Trace:
    """Read a NumPy archive."""
    try:
        with np.load(path) as arrays:
            contents = {name: arrays[name] for name in arrays.files}
    except (ValueError, zipfile.BadZipFile):
        raise ArgumentError(
            f"{path} is no NumPy archive of arrays of numbers. Write it with save_trace."
        ) from None
    if missing := {*FIELDS, "downtimes"} - contents.keys():
        raise ArgumentError(f"{path} has no {min(missing)}. Write it with save_trace.")
    try:
        return Trace(**{name: contents[name] for name in (*FIELDS, "downtimes")})
    except ValueError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _load_lines(path: Path) -> Trace:
    """Read JSON lines."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ArgumentError(
            f"{path} is no text, expected lines of JSON. Write it with save_trace."
        ) from None
    entries = [
        _entry(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    most = max((len(entry["downtimes"]) for entry in entries), default=0)
    downtimes = np.full((len(entries), most, 2), np.inf)
    for i, entry in enumerate(entries):
        for k, (start, end) in enumerate(entry["downtimes"]):
            downtimes[i, k] = start, np.inf if end is None else end
    values = {name: np.array([entry[name] for entry in entries], np.float64) for name in FIELDS}
    try:
        return Trace(**values, downtimes=downtimes)
    except ValueError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _format(path: Path) -> str:
    if path.suffix not in (".npz", ".jsonl"):
        raise ArgumentError(
            f"{path} ends in {path.suffix!r}, expected '.npz' or '.jsonl'. Rename it."
        )
    return path.suffix


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    """Read a participant's line, and fill in the defaults."""
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ArgumentError(f"{path}, line {number}: not JSON: {error}.") from None
    known = {*FIELDS, "downtimes"}
    if not isinstance(entry, dict) or "seconds_per_step" not in entry or set(entry) - known:
        raise ArgumentError(
            f"{path}, line {number}: expected an object with seconds_per_step and, if need be, "
            f"{', '.join(sorted(known - {'seconds_per_step'}))}. Name the fields so."
        )
    defaults: dict[str, Any] = {**dict.fromkeys(FIELDS, 0.0), "downtimes": []}
    entry = defaults | entry
    downtimes = entry["downtimes"]
    if not (
        all(_is_number(entry[name]) for name in FIELDS)
        and isinstance(downtimes, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in downtimes)
        and all(_is_number(start) for start, _ in downtimes)
        and all(end is None or _is_number(end) for _, end in downtimes)
    ):
        raise ArgumentError(
            f"{path}, line {number}: expected seconds as numbers, and downtimes as pairs "
            "[failure, return], the return null for never."
        )
    return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
