"""Files with one JSON object per line, of which a kill or a disk can damage some lines."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from fedpax.errors import ConfigurationError
from fedpax.files import LINES_BYTES, describe_no_permission, parse_json, read_file


@contextlib.contextmanager
def explain_unreadable(path: PurePath, expectation: str) -> Iterator[None]:
    """Raise a ConfigurationError for a file of a run that cannot be read."""
    try:
        yield
    except PermissionError as error:
        raise ConfigurationError(describe_no_permission(path)) from error
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}), {expectation}"
        ) from error


def read_json_lines(
    path: Path, is_whole: Callable[[Any], bool], expectation: str
) -> tuple[list[dict[str, Any]], list[int]]:
    r"""Read the undamaged lines of a file.

    The text after the last newline is left out, and not counted as damage: a process that was
    killed leaves an incomplete line there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_text('{"round": 1}\nrou\n{"round": 3}\n{"rou')
        >>> read_json_lines(path, lambda value: isinstance(value, dict), "expected objects.")
        ([{'round': 1}, {'round': 3}], [2])
    """
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    with explain_unreadable(path, expectation):
        if not path.exists():
            return lines, damaged
        content = read_file(path, LINES_BYTES)
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            line = parse_json(text)
        except ValueError:
            line = None
        if is_whole(line):
            lines.append(line)
        else:
            damaged.append(number)
    return lines, damaged


def name_lines(numbers: Sequence[int]) -> str:
    """Format the numbers of lines for a message.

    Example:
        >>> name_lines([8]), name_lines([8, 9])
        ('line 8', 'lines 8, 9')
    """
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
