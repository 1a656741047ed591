"""Lines for the user: a closed pipe or a full disk loses the line, but does not stop the run."""

import os
import sys
from typing import TextIO


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
