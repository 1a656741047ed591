"""`fedpax data`: the columns and clients of files, as tables and a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from numpy.typing import NDArray

from fedpax.commands.parts.file_flags import define_file_flags, parse_files
from fedpax.commands.parts.options import output_file
from fedpax.console import print_line
from fedpax.data import load, partition_statistics, plot_partition
from fedpax.data.tables import ColumnSummary, infer_treatments, summarize_columns
from fedpax.errors import UsageError
from fedpax.populations.contiguous_clients import ContiguousClients
from fedpax.reports.table import markdown_table

_MOST_CLIENTS = 20  # in the table of clients
_MOST_LABELS = 1000  # labels with more distinct values are numbers


def data(arguments: Sequence[str]) -> int:
    """Print the columns, types, missing values and clients of files, and their label skew.

    Args:
        arguments: the arguments after `data`.

    Returns:
        The exit status.

    Raises:
        UsageError: a flag is unknown, or the picture is not a PNG or there are no clients to draw.
        ValueError: as in `fedpax.data.load`.
    """
    options, files, reading = parse_files("data", arguments, define_flags)
    picture = output_file("picture", options.picture, ".png")
    named = files if len(files) > 1 else files[0]
    source: Any = load(named, partition=options.partition, **reading)
    clients = "" if source.client is None else f" of {len(source.client_names):,} clients"
    print_line(f"{source.name}: {len(source):,} examples{clients}")
    for line in _describe_columns(source):
        print_line(line)
    if source.client is None:
        if picture:
            raise UsageError(
                f"--picture={options.picture} shows clients, but the files have none. Set --client "
                "to the column that names them."
            )
        return 0
    population = ContiguousClients(source.client_starts)
    names, labels = _labels(source)
    print_line("")
    for line in _describe_clients(source, names, labels).splitlines():
        print_line(line)
    print_line("")
    for line in str(partition_statistics(population, labels)).splitlines():
        print_line(line)
    if picture:
        plot_partition(
            population,
            labels,
            picture,
            class_names=names,
            participant_names=source.client_names,
        )
    return 0


def define_flags(options: flags.FlagValues) -> None:
    """Define the flags of the command."""
    define_file_flags(options)
    flags.DEFINE_string("partition", None, "Clients by a partition.", flag_values=options)
    flags.DEFINE_string("picture", None, "A PNG file for the clients.", flag_values=options)


def _describe_columns(source: Any) -> list[str]:
    """Return the table of columns, with the treatment that `fedavg_table` gives them."""
    table = {name: source.table.column(name) for name in source.fields}
    roles = {source.client: "client", source.label: "label"}
    treatments = infer_treatments(table)
    rows = []
    for summary in summarize_columns(table, treatments):
        cells = summary.cells()
        kind = source.table.schema.field(summary.treatment.name).type
        if hasattr(kind, "value_type") and hasattr(kind, "shape"):  # a tensor
            cells[1], cells[-1] = f"{kind.value_type}{list(kind.shape)}", "an array"
        if role := roles.get(summary.treatment.name):
            cells[-2:] = [role, "stated" if role == "label" else "names the clients"]
        rows.append(cells)
    return ["", *markdown_table(ColumnSummary.HEAD, rows).splitlines()]


def _labels(source: Any) -> tuple[list[str] | None, NDArray[np.int64] | None]:
    """Return the names of the labels, and each example's, or None if they are not classes."""
    if source.label is None:
        return None, None
    column = source.column(source.label)
    if column.ndim > 1 or column.dtype.kind in "fmM":
        return None, None
    missing = np.ma.getmaskarray(column)
    texts = np.where(missing, "missing", np.ma.getdata(column).astype(str))
    names, labels = np.unique(texts, return_inverse=True)
    if len(names) > _MOST_LABELS:
        return None, None
    numbers = column.dtype.kind in "iub"
    order = np.argsort(
        [float("inf") if name == "missing" else float(name == "True") if name in ("True", "False")
         else float(name) for name in names]
        if numbers
        else np.arange(len(names)),
        kind="stable",
    )  # fmt: skip
    rank = np.argsort(order, kind="stable")
    return names[order].tolist(), rank[labels].astype(np.int64)


def _describe_clients(
    source: Any, names: list[str] | None, labels: NDArray[np.int64] | None
) -> str:
    """Return the table of the largest and smallest clients."""
    sizes = np.diff(source.client_starts)
    by_size = np.argsort(-sizes, kind="stable")
    if len(by_size) > _MOST_CLIENTS:
        half = _MOST_CLIENTS // 2
        by_size = np.concatenate([by_size[:half], [-1], by_size[-half:]])
    head = ["client", "examples"] + ([] if labels is None else ["most frequent label"])
    rows = []
    for client in by_size.tolist():
        if client < 0:
            rows.append(["..."] * len(head))
            continue
        row = [str(source.client_names[client]), f"{sizes[client]:,}"]
        if labels is not None and names is not None:
            begin, end = source.client_starts[client : client + 2]
            counts = np.bincount(labels[begin:end], minlength=len(names))
            top = int(counts.argmax())
            row.append(f"{names[top]} ({counts[top] / max(1, end - begin):.0%})")
        rows.append(row)
    return markdown_table(head, rows)
