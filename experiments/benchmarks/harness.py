"""The harness of the benchmarks: options, a table, JSON and a picture.

A benchmark is a dataclass of settings, a function that yields rows, and the columns of a table:

    @dataclasses.dataclass(frozen=True)
    class Settings(Timed):
        clients: list[int] = option("64,1024", "numbers of clients", integers)

    def measure(settings: Settings) -> Iterator[Row]:
        for clients in settings.clients:
            seconds = interleaved(rounds(clients), (), settings.repetitions, settings.clock)
            yield Row(clients=clients, seconds=seconds["a"], ratio=paired_ratio(*seconds.values()))

    main = Benchmark(__doc__, Settings, measure, {"clients": "{clients:,}", "s": "{seconds:.3f}"})

    if __name__ == "__main__":
        raise SystemExit(main())
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Row
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from matplotlib.figure import Figure

from fedpax.experiments.benchmarks.timing import CLOCKS, is_installed
from fedpax.reports.table import markdown_table

PACKAGES = ("fedpax", "jax", "jaxlib", "drjax", "flax", "flwr", "numpy")
Column: TypeAlias = str | Callable[[Any], str]
"""A format of a row's measurements, in which a list stands for its median, or a function."""
_Settings = TypeVar("_Settings")
_Value = TypeVar("_Value")


def option(default: Any, help: str, parse: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """Make a field of a dataclass of settings, which is an option of the command.

    Args:
        default: the default; a text is parsed.
        help: the text of `--help`.
        parse: parses the option's text. Default None: the type of the default.
        **more: `positional=True`, or arguments of `ArgumentParser.add_argument`.
    """
    parse = parse or (str if default is None else type(default))
    value = parse(default) if isinstance(default, str) else default
    if default not in (None, ()):
        help = f"{help}; default {default}"
    return dataclasses.field(
        default_factory=lambda: value, metadata={"type": parse, "help": help, **more}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """The options of a benchmark that times interleaved calls."""

    repetitions: int = option(5, "timed calls of each; 0: compile only")
    clock: str = option("wall", "wall-clock time, or CPU time of the process", choices=CLOCKS)


@dataclasses.dataclass(frozen=True)
class Benchmark(Generic[_Settings]):
    """A command that measures, prints a table, and writes JSON and a picture.

    Attributes:
        doc: the description for `--help`.
        settings: a dataclass of `option`s. A ValueError of its `__post_init__` is a usage error.
        measure: yields the rows. Names that begin with an underscore are not written.
        columns: the columns of the table by title. A row is printed when it is measured.
        summary: the text below the table.
        draw: draws the rows for `--plot`.
        required: the name of a truth value of each row: if one is false, the exit status is 1.
        aliases: other names of `--json` and `--plot`.
        picture: the default of `--plot`. Default None: no picture.
    """

    doc: str | None
    settings: type[_Settings]
    measure: Callable[[_Settings], Iterable[Row]]
    columns: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    summary: Callable[[_Settings, list[Row]], str] | None = None
    draw: Callable[[_Settings, list[Row]], Figure] | None = None
    required: str | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    picture: Path | None = None

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; return the exit status."""
        rows = self.run(argv)
        return int(self.required is not None and not all(vars(r)[self.required] for r in rows))

    def run(self, argv: Sequence[str] | None = None) -> list[Row]:
        """Run the benchmark; return the rows."""
        settings, json_file, picture = self._parse(argv)
        rows: list[Row] = []
        for row in self.measure(settings):
            if self.columns:
                print(_table_lines(self.columns, row, has_head=not rows), flush=True)
            rows.append(row)
        if self.summary:
            print(self.summary(settings, rows))
        if self.draw and picture:
            picture.parent.mkdir(parents=True, exist_ok=True)
            self.draw(settings, rows).savefig(picture)
            print(picture)
        if json_file or not self.draw:
            write(json_file, rows, **vars(settings))
        return rows

    def _parse(self, argv: Sequence[str] | None) -> tuple[_Settings, Path | None, Path | None]:
        parser = argparse.ArgumentParser(
            description=self.doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        settings: Any = self.settings
        for field in dataclasses.fields(settings):
            arguments = dict(field.metadata)
            assert callable(field.default_factory)
            if not arguments.get("required"):
                arguments["default"] = field.default_factory()
            name = field.name if arguments.pop("positional", False) else f"--{field.name}"
            parser.add_argument(name, **arguments)
        files = {"--json": "the measurements, as JSON"}
        if self.draw:
            files["--plot"] = "the figure, such as figure.png"
        for name, content in files.items():
            parser.add_argument(
                *filter(None, (name, self.aliases.get(name))),
                type=Path,
                metavar="FILE",
                default=self.picture if name == "--plot" else None,
                help=f"file for {content}",
            )
        options = vars(parser.parse_args(argv))
        json_file, picture = options.pop("json"), options.pop("plot", None)
        try:
            return settings(**options), json_file, picture
        except ValueError as error:
            parser.error(str(error))


class _CellFormatter(string.Formatter):
    """Formats the median of a list, and a dash in place of a missing measurement."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            value = statistics.median(value) if value else None
        if value is None:
            return "-"
        return str(super().format_field(value, format_spec))


def _table_lines(columns: Mapping[str, Column], row: Row, *, has_head: bool) -> str:
    """Format a row of a Markdown table, below its head if it is the first one."""
    cells = [
        _CellFormatter().vformat(column, (), vars(row)) if isinstance(column, str) else column(row)
        for column in columns.values()
    ]
    lines = markdown_table(list(columns), [cells]).splitlines()
    return "\n".join(lines if has_head else lines[2:])


def write(path: Path | None, rows: Sequence[Row], **settings: Any) -> None:
    """Write or print measurements as JSON, with settings, versions of packages and the machine."""
    content = {
        "settings": settings,
        "versions": {p: importlib.metadata.version(p) for p in PACKAGES if is_installed(p)},
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "workers": os.environ.get("PJRT_NPROC"),  # None: one per simulated device or core
        },
        "rows": [{k: v for k, v in vars(row).items() if k[0] != "_"} for row in rows],
    }
    if path is None:
        print(json.dumps(content, default=str))
        return
    text = json.dumps(content, indent=2, default=str)
    # A list of numbers takes one line.
    text = re.sub(r"\[[^][{}\"]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
    path.write_text(f"{text}\n", encoding="utf-8")


def check_names(option: str, names: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise a ValueError for names that are unknown, or do nothing for None."""
    if unknown := sorted({*(names or ())} - {*known}):
        separator = "; " if any("," in name for name in known) else ", "
        raise ValueError(f"unknown {option} {unknown}; choose from {separator.join(known)}")


def check_at_least(least: int, **options: int) -> None:
    """Raise a ValueError for an option that is too small."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"--{name} is {value}, expected at least {least}")


def integers(text: str) -> list[int]:
    """Parse integers of at least 1, separated by commas.

    Example:
        >>> integers("1,8")
        [1, 8]
    """
    return several(text, integer, "integers of at least 1", "2,8")


def numbers(text: str) -> list[float]:
    """Parse finite numbers of at least 0, separated by commas.

    Example:
        >>> numbers("0.1,1e-3")
        [0.1, 0.001]
    """
    return several(text, number, "numbers of at least 0", "0.1,0.3")


def seeds(text: str) -> list[int]:
    """Parse integers, separated by commas."""
    return several(text, int, "integers", "0,1,2")


def names(text: str) -> list[str]:
    """Parse names, separated by commas."""
    return [name for name in text.split(",") if name]


def names_with_commas(text: str) -> list[str]:
    """Parse names that may have commas, separated by semicolons."""
    return text.split(";")


def integer(text: str) -> int:
    """Parse an integer of at least 1, or raise a ValueError."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def number(text: str) -> float:
    """Parse a finite number of at least 0, or raise a ValueError."""
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


def chunk_size(text: str) -> int | Literal["auto"]:
    """Parse "auto" or an integer of at least 1, or raise a ValueError."""
    return "auto" if text == "auto" else integer(text)


def several(text: str, parse: Callable[[str], _Value], expected: str, example: str) -> list[_Value]:
    """Parse values separated by commas, or raise an argparse.ArgumentTypeError."""
    try:
        return [parse(entry) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected {expected} separated by commas, such as {example}"
        ) from None
