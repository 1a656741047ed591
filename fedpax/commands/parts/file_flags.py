"""The flags of the commands that read files: which files, and how."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from fedpax.commands.parts.options import did_you_mean_flag, parse
from fedpax.errors import FedpaxError, UsageError
from fedpax.experiments.parts.file_remedies import with_flags
from fedpax.path_patterns import split_names
from fedpax.user_files.load_options import parse_types


def parse_files(
    command: str, arguments: Sequence[str]
) -> tuple[flags.FlagValues, list[str], dict[str, Any]]:
    """Parse the arguments of a command that reads files."""
    options, files = parse(command, arguments)
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
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if size is None:
        raise UsageError(
            f"--image_size={text}, expected HEIGHTxWIDTH. Set for example --image_size=32x32."
        )
    return int(size[1]), int(size[2])
