"""read_csv: CSV and TSV, parsed by pyarrow."""

import pyarrow as pa
from pyarrow import csv

from fedpax.data.files.finding import DataFile
from fedpax.data.files.formats import ReadOptions
from fedpax.errors import ArgumentError


def read_csv(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read CSV or TSV. An unquoted empty value, NA, NaN, null, ... is missing."""
    separator = options.delimiter or ("\t" if file.suffix in (".tsv", ".tab") else ",")

    def read(use_threads: bool) -> pa.Table:
        with file.open() as opened:
            return csv.read_csv(
                opened,
                csv.ReadOptions(use_threads=use_threads, block_size=1 << 24),
                csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                csv.ConvertOptions(
                    column_types=dict(options.types),
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )

    try:
        table = read(use_threads=True)
    except pa.ArrowInvalid:
        table = read(use_threads=False)  # the message of one thread names the row
    if table.num_columns == 1 and (found := [c for c in ";\t|" if c in table.column_names[0]]):
        raise ArgumentError(
            f"it has one column, {table.column_names[0]!r}, which delimiter={separator!r} does not "
            f"divide. Set delimiter={found[0]!r}"
        )
    return table
