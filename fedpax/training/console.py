"""Lines for the user: a closed pipe or a full disk loses the line, but does not stop the run."""

import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed, as after `>&-`.

    Python sets such a stream to None. Worse, its descriptor would go to the next file that is
    opened, and what libraries print would be written into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


def print_line(text: str) -> None:
    """Print a line on stdout, or drop it where stdout is closed.

    Args:
        text: the line, without its newline.

    Example:
        >>> print_line("Finished 3 of 3 rounds.")
        Finished 3 of 3 rounds.
    """
    _write(text, sys.stdout)


def print_error(text: str) -> None:
    """Print a line on stderr, or drop it where stderr is closed.

    Args:
        text: the line, without its newline.
    """
    _write(text, sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Discard all further output of a stream.

    The reader of a pipe can exit early, as `head` does. Every later write would raise again, and
    so would Python's own flush at exit.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
