"""Tables of the islands or sites of a run: lines on changes, and a file for `fedpax show`."""

import json
import time
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedpax.console import format_seconds
from fedpax.errors import ConfigurationError
from fedpax.files import read_json, replace_file
from fedpax.run_files.metrics_log import is_finite_number
from fedpax.training.progress import Progress

SECONDS_BETWEEN_FILES = 1.0

Report = TypeVar("Report", bound=Any)
"""A `NamedTuple` of numbers, texts and dicts of numbers, with a name, a state and a subject."""


class ReportWatch(Generic[Report]):
    """A reporter of changes in the states of islands or sites, with a file of their table."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path, self._progress = path, progress
        self._states: dict[str, str] = {}
        self._next_file = 0.0

    def update(self, reports: Sequence[Report], *, force: bool = False) -> None:
        """Report the changes since the last call, and write the table."""
        changed = [r for r in reports if self._states.get(r.name) != r.state]
        for report in changed:
            self._states[report.name] = report.state
            self._progress.note(f"{report.subject}: {report.state}")
        now = time.monotonic()
        if not changed and not force and now < self._next_file:
            return
        self._next_file = now + SECONDS_BETWEEN_FILES
        text = json.dumps([report._asdict() for report in reports], indent=2) + "\n"
        try:  # without a flush to the disk, for which merges would wait
            replace_file(self._path, text.encode(), sync=False)
        except IsADirectoryError as error:
            raise ConfigurationError(
                f"{error.filename2 or error.filename} is a folder, expected no folder: the "
                f"syncer writes the table of its {self._path.stem} to this file. Remove the "
                "folder, then run the same command again to resume."
            ) from error


def read_reports(path: Path, kind: type[Report]) -> list[Report]:
    """Read a table as it was last written; empty without a readable file of this kind."""
    try:
        reports = [kind(**fields) for fields in read_json(path)]
    except (OSError, ValueError, TypeError):
        return []
    hints = typing.get_type_hints(kind)
    fields = [field for report in reports for field in report._asdict().items()]
    return reports if all(_is_of(value, hints[name]) for name, value in fields) else []


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of a field."""
    if isinstance(hint, types.UnionType):
        return any(_is_of(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is Mapping:
        return isinstance(value, dict) and all(map(is_finite_number, value.values()))
    if hint in (int, float):
        return is_finite_number(value)
    return value is None if hint is types.NoneType else isinstance(value, str)


def format_ago(seconds: float | None) -> str:
    """Format the seconds since the last message; None: there was no message."""
    return "-" if seconds is None else f"{format_seconds(seconds)} ago"
