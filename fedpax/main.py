"""The command line, `fedpax`: choose the command, and turn errors and signals into exit codes."""

import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from fedpax import __version__
from fedpax.commands import COMMANDS
from fedpax.commands.flag_table import FLAGS, describe_flags
from fedpax.console import (
    discard_output,
    escape_logs,
    escape_unknown_characters,
    hide_late_writes,
    open_closed_streams,
    print_error,
)
from fedpax.errors import (
    ArgumentError,
    ArgumentTypeError,
    FedpaxError,
    MissingFieldError,
    MissingPackageError,
)
from fedpax.extras import optional
from fedpax.files import NO_ROOM, describe_no_permission
from fedpax.garbage_collection import collect_seldom
from fedpax.preemption import delay_interrupts, exit_on_signals

_COMMANDS = "".join(command.usage for command in COMMANDS.values())

USAGE = f"""\
fedpax: federated and multi-island training on JAX

{_COMMANDS}\
  fedpax --version

{describe_flags(FLAGS)}

Compiled programs are kept in $XDG_CACHE_HOME/fedpax/jax (default ~/.cache/fedpax/jax), so that the
next start is faster. JAX_ENABLE_COMPILATION_CACHE=0 in the environment switches this off, and
JAX_COMPILATION_CACHE_DIR=DIR names another folder.

Exit status:
    0  finished
    1  stopped: the loss is not finite or spikes repeatedly, the disk is full, a planned round does
       not fit the devices' memory, your own code raised an exception, or `fedpax doctor` found a
       problem
    2  usage error, or a folder or configuration that cannot be used; the message names the remedy
   70  a round hung, with --training.on_hang=exit; the same command resumes
   75  another process of the job, the keeper of an elastic job, or an island's syncer is gone; the
       same commands resume
  130  Ctrl-C, and 143 SIGTERM: completed rounds are saved, and the same command resumes
  141  SIGPIPE: the program that read the output has exited
"""

STOPPED = 1
USAGE_ERROR = 2
CALLERS_ERRORS = (ArgumentError, ArgumentTypeError, MissingFieldError, MissingPackageError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, in the program or in Python.

    In Python, Ctrl-C raises `KeyboardInterrupt`; in a training, the first one saves. `fedpax.train`
    trains an experiment that is a Python object.

    Args:
        argv: the arguments after the program's name, a list of strings. Default None: the process's
            arguments.

    Returns:
        The exit status, as `fedpax --help` explains it. An error has been printed on stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C before or after the training, or a second one in it.

    Example:
        >>> print("status", main(["--help"]))  # doctest: +ELLIPSIS
        fedpax: federated and multi-island training on JAX
        ...
        status 0
    """
    open_closed_streams()
    escape_unknown_characters()
    try:
        status = _run(sys.argv[1:] if argv is None else _check_words(argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if argv is None:
            discard_output(sys.stdout)
        return 128 + signal.SIGPIPE
    except SystemExit as stop:  # tyro has printed the fields, or the error in one
        if isinstance(stop.code, str):
            print_error(stop.code)
            return STOPPED
        return int(stop.code or 0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            if argv is None and not _can_flush(sys.stdout):
                discard_output(sys.stdout)
            where = error.filename or "the output"
            print_error(
                f"fedpax: {where} cannot be written: {error.strerror}. {NO_ROOM[error.errno]}, "
                "or write to another disk."
            )
            return STOPPED
        if (failure := _status_of(error)) is None:
            raise
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            print_error(f"fedpax: {describe_no_permission(Path(error.filename))}")
        else:
            told = f"fedpax: {getattr(error, 'in_flags', None) or error}"
            print_error(told + _place_of(error))
        return failure


def _can_flush(stream: TextIO) -> bool:
    """Return whether a stream can be written: the full disk can belong to another file."""
    try:
        stream.flush()
    except OSError:
        return False
    return True


def program() -> int:
    """Run the command line of this process, which Ctrl-C and SIGTERM end at once."""
    open_closed_streams()
    escape_logs()
    hide_late_writes()
    with exit_on_signals():
        try:
            return main()
        except KeyboardInterrupt:
            print_error("fedpax: SIGINT: stopped without saving.")
            return 128 + signal.SIGINT


def _check_words(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a call in Python, if they are a list of strings."""
    is_list = isinstance(argv, Sequence) and not isinstance(argv, str)
    wrong = [word for word in argv if not isinstance(word, str)] if is_list else [argv]
    if not wrong:
        return list(argv)
    from fedpax.errors import UsageError

    shown = repr(argv) if isinstance(argv, str) else f"a {type(wrong[0]).__name__}"
    raise UsageError(
        f"main got {shown}, expected a list of the arguments of the command line, such as "
        '["train", "--exp=fedavg_digits", "--job_log_dir=runs/digits"]. To train an experiment '
        'that is a Python object, call fedpax.train(experiment, "runs/NAME").'
    )


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return USAGE_ERROR
    command, *rest = arguments
    if command in ("--help", "-h", "help", "--helpfull"):
        print(USAGE, end="")
        return 0
    if command in COMMANDS and {"--help", "-h"} & set(rest):
        named = [
            word for word in rest for flag in COMMANDS[command].fields_of if f"--{flag}" in word
        ]
        if not named or any("," in word for word in named):  # no fields of several experiments
            from fedpax.commands.command_table import help_of

            print(help_of(command), end="")
            return 0
    if command in ("--version", "version"):
        print(f"fedpax {__version__}")
        return 0
    # Here, because the command's imports take seconds: signals are handled by now.
    if command not in COMMANDS:
        from fedpax.errors import UsageError, did_you_mean

        raise UsageError(
            f"there is no command {command!r}.{did_you_mean(command, COMMANDS)} "
            "Run `fedpax --help` to see all commands."
        )
    module, _, name = COMMANDS[command].place.partition(":")
    with optional(f"`fedpax {command}`"):
        with delay_interrupts(), collect_seldom():
            execute: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
        return execute(rest)


def _status_of(error: Exception) -> int | None:
    """Return the exit status of an error whose message is enough. None: show a traceback."""
    if not isinstance(error, FedpaxError | OSError):
        return None
    if isinstance(error, FedpaxError) and not isinstance(error, CALLERS_ERRORS):
        return error.exit_status
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    package = last.f_globals.get("__name__", "").partition(".")[0]
    is_raised_here = package in ("__main__", "fedpax")
    is_told = not _foreign_frames(error) or _place_of(error)
    return USAGE_ERROR if is_raised_here and is_told else None


def _foreign_frames(error: Exception) -> list[tuple[Path, int, str]]:
    """Return the file, line and function of an error's frames in the user's code and packages."""
    known = {*sys.stdlib_module_names, "__main__", "fedpax", "grain", "jax"}
    return [
        (Path(frame.f_code.co_filename), line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in known
    ]


def _place_of(error: Exception) -> str:
    """Return the place in the user's code whose call raised an error; empty if it has no part."""
    frames = _foreign_frames(error) if isinstance(error, CALLERS_ERRORS) else []
    frames = [frame for frame in frames if "site-packages" not in frame[0].parts]
    if not frames:
        return ""
    file, line, function = frames[-1]
    return f" (called by {file.name}:{line}, in {function})"


if __name__ == "__main__":
    sys.exit(program())
