"""The harness of the benchmarks: options, a table, JSON, a picture and a bar.

A benchmark is a class of options, with the columns of a table and a method that yields its rows:

    class Rounds(Timed):
        clients: list[int] = option("64,1024", "numbers of clients", integers)
        columns = "clients {clients:,} | median s {seconds:.3f} | a / b {ratio:.2f}"
        bar = "a takes at most as long as b"

        def measure(self) -> Iterator[Row]:
            for clients in self.clients:
                seconds = self.time(rounds(clients))
                ratio = paired_ratio(*seconds.values())
                yield Row(clients=clients, seconds=seconds["a"], ratio=ratio, met=ratio <= 1)

    main = command(Rounds)
"""

import abc
import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import string
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Row
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, dataclass_transform

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedpax.console import format_bytes, markdown_table
from fedpax.experiments.benchmarks import timing

PACKAGES = ("fedpax", "jax", "jaxlib", "drjax", "flax", "flwr", "numpy")
_Value = TypeVar("_Value")


def option(
    default: Any,
    help: str,
    parse: Callable[[str], Any] | None = None,
    *,
    least: int | None = None,
    known: Callable[[Any], Collection[str]] | None = None,
    **more: Any,
) -> Any:
    """Make an option of a benchmark, with arguments of `ArgumentParser.add_argument`.

    `parse` (default: the default's type) parses its text, also a `default` that is one; `least` is
    the smallest number, or of several; `known` returns the names that the option can list.
    """
    parse = parse or (str if default is None else type(default))
    value = parse(default) if isinstance(default, str) else default
    if default not in (None, ()):
        help = f"{help}; default {default}"
    parser = {"type": parse, "help": help, **more}
    metadata = {"parser": parser, "least": least, "known": known}
    return dataclasses.field(default_factory=lambda: value, metadata=metadata)


def some(separator: str, known: Callable[[Any], Collection[str]]) -> Any:
    """Make an option of known names with a separator, a semicolon where names have commas."""
    help = f"names separated by {'commas' if separator == ',' else 'semicolons'}; default: all"
    return option(None, help, lambda text: text.split(separator), known=known)


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark(abc.ABC):
    """A benchmark: its fields are options. A ValueError of `__post_init__` is a usage error.

    A subclass defines `measure`. A subclass that defines `draw` has the option `--plot`.

    Attributes:
        columns: titles and formats of the table, separated by `|`. A list stands for its median,
            None for a dash, and the format `bytes` writes a unit. Empty: no table.
        bar: a requirement. Each row's `met` says whether it meets it; if one does not, the exit
            status is 1.
    """

    columns: ClassVar[str] = ""
    bar: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, known = getattr(self, field.name), field.metadata["known"]
            if known is not None:
                check_names(field.name, value, known(self))
            if (least := field.metadata["least"]) is not None and value is not None:
                if (smallest := min(value) if isinstance(value, list) else value) < least:
                    raise ValueError(f"--{field.name} is {smallest}, expected at least {least}")

    def order(self, row: Row) -> Any:
        """Return a key: benchmarks that define this method print the sorted rows at the end."""
        raise NotImplementedError

    @abc.abstractmethod
    def measure(self) -> Iterable[Row]:
        """Yield the rows, which are printed at once. Names with an underscore are not written."""

    def summary(self, rows: list[Row]) -> str:
        """Return the text below the table: by default, which rows miss the bar."""
        cells = [cells_of(self.columns, row)[:2] for row in rows if not row.met]
        missed = [", ".join(cell.strip() for cell in pair) for pair in cells]
        return f"\nBar ({self.bar}): {'missed by ' + '; '.join(missed) if missed else 'met'}."

    def draw(self, rows: list[Row]) -> Figure:
        """Draw the rows for `--plot`, an option of the benchmarks that define this method."""
        raise NotImplementedError


class Timed(Benchmark):
    """A benchmark that times interleaved calls."""

    repetitions: int = option(5, "timed calls of each; 0: compile only")
    clock: str = option(
        "wall", "wall-clock time, or CPU time of the process", choices=timing.CLOCKS
    )

    def time(self, calls: Mapping[str, Callable[..., Any]], *arguments: Any) -> timing.Seconds:
        """Time interleaved calls of functions."""
        return timing.interleaved(calls, arguments, self.repetitions, self.clock)

    def compare(
        self, rounds: Mapping[str, timing.Compiled], to: str | Mapping[str, str]
    ) -> list[Row]:
        """Time rounds; return a row for each, with the ratio to a baseline's time."""
        seconds = self.time({name: compiled.call for name, compiled in rounds.items()})
        baselines = dict.fromkeys(rounds, to) if isinstance(to, str) else to
        return [
            Row(
                name=name,
                temporary_bytes=compiled.temporary_bytes,
                seconds=seconds[name],
                baseline=baselines[name],
                ratio=timing.paired_ratio(seconds[name], seconds[baselines[name]]),
            )
            for name, compiled in rounds.items()
        ]


class Command(NamedTuple):
    """The command line of a benchmark."""

    benchmark: type[Benchmark]

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; return the exit status."""
        return int(not all(vars(row).get("met", True) for row in self.run(argv)))

    def run(self, argv: Sequence[str] | None = None) -> list[Row]:
        """Run the benchmark; return the rows."""
        benchmark, json_file, picture = self._parse(argv)
        rows: list[Row] = []
        columns = benchmark.columns
        for row in benchmark.measure():
            rows.append(row)
            if columns and not self._overrides("order"):
                lines = _table(columns, [row]).splitlines()[0 if len(rows) == 1 else 2 :]
                print(*lines, sep="\n", flush=True)
        if self._overrides("order"):
            rows.sort(key=benchmark.order)
            print(_table(columns, rows))
        if benchmark.bar or self._overrides("summary"):
            print(benchmark.summary(rows))
        if picture:
            picture.parent.mkdir(parents=True, exist_ok=True)
            benchmark.draw(rows).savefig(picture)
            print(picture)
        if json_file or not self._overrides("draw"):
            _write(json_file, rows, vars(benchmark))
        return rows

    def _overrides(self, name: str) -> bool:
        return getattr(self.benchmark, name) is not getattr(Benchmark, name)

    def _parse(self, argv: Sequence[str] | None) -> tuple[Benchmark, Path | None, Path | None]:
        parser = argparse.ArgumentParser(
            description=sys.modules[self.benchmark.__module__].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        fields = dataclasses.fields(self.benchmark)
        for field in fields:
            assert callable(field.default_factory)
            more = field.metadata["parser"]
            default = {} if "required" in more else {"default": field.default_factory()}
            parser.add_argument(f"--{field.name}", **default, **more)
        files = {"json": ["--json"]}
        if self._overrides("draw"):
            files["plot"] = ["--plot", "--picture"]
        if "out" not in {field.name for field in fields}:
            [*files.values()][-1].append("--out")
        for content, flags in files.items():
            help = f"file for the {'figure' if content == 'plot' else 'measurements'}"
            parser.add_argument(*flags, dest=content, type=Path, metavar="FILE", help=help)
        options = vars(parser.parse_args(argv))
        paths = options.pop("json"), options.pop("plot", None)
        try:
            return self.benchmark(**options), *paths
        except ValueError as error:
            parser.error(str(error))


def command(benchmark: type[Benchmark]) -> Command:
    """Return a benchmark's command, and run it if its module is the program: call this last."""
    main = Command(benchmark)
    if benchmark.__module__ == "__main__":
        raise SystemExit(main())
    return main


class _CellFormatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            value = statistics.median(value) if value else None
        if value is None:
            return "-"
        if format_spec == "bytes":
            return format_bytes(value)
        return str(super().format_field(value, format_spec))


def _split(columns: str) -> dict[str, str]:
    parts = (column.partition("{") for column in columns.split("|"))
    return {title.strip(): f"{{{form.rstrip()}" for title, _, form in parts}


def cells_of(columns: str, row: Row) -> list[str]:
    """Format the cells of a row of a table."""
    return [_CellFormatter().vformat(form, (), vars(row)) for form in _split(columns).values()]


def _table(columns: str, rows: Sequence[Row]) -> str:
    return markdown_table(list(_split(columns)), [cells_of(columns, row) for row in rows])


def pivot(rows: Sequence[Row], line: str, column: str, cell: str, head: str) -> str:
    """Format rows as a Markdown table, with a line and a column for each value of two fields."""
    lines, columns = (dict.fromkeys(getattr(row, name) for row in rows) for name in (line, column))
    cells = {(getattr(r, line), getattr(r, column)): cell.format_map(vars(r)) for r in rows}
    table = [[str(value), *(cells[value, other] for other in columns)] for value in lines]
    return markdown_table([head, *map(str, columns)], table)


def _write(path: Path | None, rows: Sequence[Row], settings: Mapping[str, Any]) -> None:
    """Write or print measurements as JSON, with settings, versions of packages and the machine."""
    versions = dict[str, str]()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # also a bare checkout
            versions[package] = importlib.metadata.version(package)
    content = {
        "settings": settings,
        "versions": versions,
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


def panels(*axes: Mapping[str, Any], size: tuple[float, float], **more: Any) -> list[Axes]:
    """Return the axes of a figure side by side, with a grid and their properties."""
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    made: list[Axes] = figure.subplots(1, len(axes), squeeze=False, **more)[0].tolist()
    for panel, properties in zip(made, axes, strict=True):
        panel.set(**properties)
        panel.grid(alpha=0.3)
    return made


def figure_of(axes: Sequence[Axes], legend: int = 0) -> Figure:
    """Return the figure of some axes, with a legend in one of them."""
    axes[legend].legend(frameon=False, fontsize="small")
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure


def check_names(option: str, names: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise a ValueError for names that are unknown, or do nothing for None."""
    if unknown := sorted({*(names or ())} - {*known}):
        separator = "; " if any("," in name for name in known) else ", "
        raise ValueError(f"unknown {option} {unknown}; choose from {separator.join(known)}")


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


def names(text: str) -> list[str]:
    """Parse names, separated by commas."""
    return [name for name in text.split(",") if name]


def several(
    parse: Callable[[str], _Value], expected: str, example: str
) -> Callable[[str], list[_Value]]:
    """Return a parser of values separated by commas, which raises argparse.ArgumentTypeError."""

    def parse_all(text: str) -> list[_Value]:
        try:
            return [parse(entry) for entry in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r}, expected {expected} separated by commas, such as {example}"
            ) from None

    return parse_all


integers = several(integer, "integers of at least 1", "2,8")
numbers = several(number, "numbers of at least 0", "0.1,0.3")
seeds = several(int, "integers", "0,1,2")
chunk_sizes = several(chunk_size, '"auto" or integers of at least 1', "auto,8")
