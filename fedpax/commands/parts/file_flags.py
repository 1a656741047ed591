"""The flags of the commands that read files: which files, and how."""

import contextlib
import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from fedpax.comma_lists import split_names
from fedpax.commands.parts.options import did_you_mean_flag, parse
from fedpax.errors import FedpaxError, UsageError
from fedpax.user_files.file_remedies import with_flags
from fedpax.user_files.formats import FILE_NAME, parse_types

if TYPE_CHECKING:
    from fedpax.deploy.batch_training import RunRounds


def parse_files(
    command: str, arguments: Sequence[str]
) -> tuple[flags.FlagValues, list[str], dict[str, Any]]:
    """Parse the arguments of a command that reads files."""
    options, files = parse(command, _join_lists(arguments))
    unknown = [word for word in files if word.startswith("--")]
    if unknown:
        raise UsageError(
            f"`fedpax {command}` got {' '.join(unknown)!r}, which it does not have."
            f"{did_you_mean_flag(options, unknown[:1])} Run `fedpax {command} --help` to see all "
            "flags."
        )
    if not files:
        raise UsageError(
            f"`fedpax {command}` names no files. Run for example `fedpax {command} "
            "'hospitals/*.csv'`."
        )
    reading = {
        "client": options.client,
        "label": options.label,
        "split": options.split,
        "columns": split_names(options.columns or ""),
        "optional_columns": split_names(options.optional_columns or ""),
        "types": parse_types("--types", split_names(options.types or "")),
        "delimiter": options.delimiter,
        "decimal_point": options.decimal_point,
        "image_size": _size(options.image_size),
    }
    return options, files, reading


_LISTS = ("--columns", "--optional_columns", "--types")


def _join_lists(arguments: Sequence[str]) -> list[str]:
    """Put commas between columns that spaces separate, up to the next flag or file."""
    joined, in_list = list[str](), False
    for word in arguments:
        if word.startswith("--"):
            in_list = word in _LISTS
        elif in_list and not _is_file(word):
            joined[-1] += ("," if "=" in joined[-1] else "=") + word
            continue
        joined.append(word)
    return joined


def _is_file(word: str) -> bool:
    is_pattern = any(mark in word for mark in "*?{/")
    return is_pattern or Path(word).exists() or re.fullmatch(FILE_NAME, word) is not None


@contextlib.contextmanager
def flags_in_errors() -> Iterator[None]:
    """Let errors of reading files name flags for arguments."""
    try:
        yield
    except FedpaxError as error:
        error.in_flags = with_flags(str(error), "--")
        raise


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    size = re.fullmatch(r"([1-9]\d*)[x, ]([1-9]\d*)", text)
    if size is None:
        raise UsageError(
            f"--image_size={text}, expected HEIGHTxWIDTH. Set for example --image_size=32x32."
        )
    return int(size[1]), int(size[2])


# ---- `--engine`: what runs the rounds in place of the compiled round of this process

CHUNK_SIZE = 16
# The engine that each flag sets up.
_SETTINGS = {
    "beam_flags": "beam",
    "num_shards": "beam",
    "chunk_size": "out_of_core",
    "flower_flags": "flower",
}


def check_engine_flags(options: flags.FlagValues) -> None:
    """Check that no flag of an engine is given without this engine."""
    for name, engine in _SETTINGS.items():
        value = options[name].value if name in options else None
        if value is not None and options.engine != engine:
            raise UsageError(
                f"--{name}={value} without --engine={engine}, expected both. Add --engine={engine}."
            )


def engine_of(options: flags.FlagValues) -> "RunRounds | None":
    """Return the function that runs rounds as batch jobs; None: no engine for them is chosen."""
    check_engine_flags(options)
    if options.engine == "out_of_core":
        from fedpax.deploy.local_stages import run_out_of_core

        return functools.partial(run_out_of_core, chunk_size=options.chunk_size or CHUNK_SIZE)
    if options.engine == "beam":
        from fedpax.deploy.beam import run_beam

        return functools.partial(run_beam, flags=shlex.split(options.beam_flags or ""))
    return None
