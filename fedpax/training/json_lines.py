"""Files with one JSON object per line, which a kill or a disk can damage."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedpax.training.configuration import ConfigurationError


def read_json_lines(
    path: Path, is_whole: Callable[[Any], bool], expectation: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the lines of a file that are not damaged.

    A kill can leave a part of a line after the last newline: it is not counted as damage.

    Args:
        path: the file, which may be missing.
        is_whole: tells whether a JSON value, or None for text that is not JSON, is such a line.
        expectation: what is expected and the remedy, for the message if the file cannot be read.

    Returns:
        The lines, and the numbers of the damaged ones, from 1.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    if not path.exists():
        return lines, damaged
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}), {expectation}"
        ) from error
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if is_whole(line):
            lines.append(line)
        else:
            damaged.append(number)
    return lines, damaged


def name_lines(numbers: Sequence[int]) -> str:
    """Name the lines of a file.

    Example:
        >>> name_lines([8]), name_lines([8, 9])
        ('line 8', 'lines 8, 9')
    """
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
