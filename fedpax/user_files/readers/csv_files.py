"""read_csv and stream_csv: CSV and TSV, parsed by pyarrow."""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from fedpax.console import count_of
from fedpax.errors import ArgumentError
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import BadRows, ReadOptions, TypeChangedError, describe_contents
from fedpax.user_files.readers.csv_hints import tell_open_quotes, tell_spaces
from fedpax.user_files.readers.exact_integers import check_integers_of_floats, integers_in_texts

_BLOCK = 1 << 24


def read_csv(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read CSV or TSV. An unquoted empty value, NA, NaN, null, ... is missing."""
    try:
        table = _read(file, options, use_threads=True)
    except pa.ArrowInvalid as error:
        column = _column_of(error, file, options)
        check_stated_number(error, column, options)
        check_header(file, _delimiter(file, options))
        with rows_explained(file, _delimiter(file, options)):
            table = _read(file, options, use_threads=False)  # one thread names the row
    _check_schema(file, options, table.schema)
    tell_open_quotes(file, table, _delimiter(file, options))
    check_decimal_points(table, options)
    _check_integers(file, options, table)
    _check_clients(file, options, table.schema)
    return table


def stream_csv(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read CSV or TSV in blocks, with the types of the first block."""
    try:
        yield from _blocks(file, options, use_threads=True)
    except pa.ArrowInvalid as error:
        column = _column_of(error, file, options)
        check_stated_number(error, column, options)
        if column is None:
            check_header(file, _delimiter(file, options))
            with rows_explained(file, _delimiter(file, options)):
                for _ in _blocks(file, options, use_threads=False):  # one thread names the row
                    pass
        if column is None or column in options.types:
            raise
        whole = _read(file, options, use_threads=True, columns=[column])
        _check_encoding(file, options, whole.schema)
        check_decimal_points(whole, options)
        _check_integers(file, options, whole)
        raise TypeChangedError(file.path, column, whole.schema.field(0).type) from error


def _blocks(file: DataFile, options: ReadOptions, *, use_threads: bool) -> Iterator[pa.Table]:
    with file.open() as opened:
        reader = csv.open_csv(opened, **_options(file, options, options.types, use_threads))
        _check_schema(file, options, reader.schema)
        examples = 0
        for number, batch in enumerate(reader):
            table = pa.Table.from_batches([batch])
            if number == 0:  # it has decided the types
                check_decimal_points(table, options)
            tell_open_quotes(file, table, _delimiter(file, options), examples)
            examples += len(table)
            _check_integers(file, options, table)
            yield table
        _check_clients(file, options, reader.schema)


def _read(
    file: DataFile, options: ReadOptions, *, use_threads: bool, columns: Any = None
) -> pa.Table:
    with file.open() as opened:
        given = _options(file, options, options.types, use_threads, columns)
        return csv.read_csv(opened, **given)


def _options(
    file: DataFile,
    options: ReadOptions,
    types: Mapping[str, pa.DataType],
    use_threads: bool,
    columns: Any = None,
) -> dict[str, Any]:
    bad_rows = options.bad_rows
    return {
        "read_options": csv.ReadOptions(use_threads=use_threads, block_size=_BLOCK),
        "parse_options": csv.ParseOptions(
            delimiter=_delimiter(file, options),
            newlines_in_values=True,
            invalid_row_handler=bad_rows and (lambda row: bad_rows.skip(file.path, row.text)),
        ),
        "convert_options": csv.ConvertOptions(
            column_types=dict(types),
            include_columns=columns,
            decimal_point=options.decimal_point or ".",
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    }


def _delimiter(file: DataFile, options: ReadOptions) -> str:
    given = "\t" if options.delimiter == "\\t" else options.delimiter  # as shells pass it
    if given is not None and len(given) != 1:
        raise ArgumentError(
            f"delimiter={given!r} has {len(given)} characters, expected one. Set delimiter=';' or "
            "another one"
        )
    return given or ("\t" if file.suffix in (".tsv", ".tab") else ",")


def _check_schema(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    _check_encoding(file, options, schema)
    if schema.names[0].startswith("sep="):
        _check_separator_line(file)
    if len(schema) == 1:
        check_single_column(file, _delimiter(file, options), schema.names[0])
        tell_spaces(file, schema.names[0])


def _check_encoding(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    """Raise an error for texts that are not UTF-8, which pyarrow reads as bytes."""
    try:
        fields = {name: schema.field(k).type for k, name in enumerate(schema.names)}
    except UnicodeDecodeError as error:
        raise not_utf8(file) from error
    if any(pa.types.is_binary(kind) for name, kind in fields.items() if name not in options.types):
        raise not_utf8(file)


def _texts_of(file: DataFile, options: ReadOptions, column: str) -> Iterator[Any]:
    as_text = options._replace(bad_rows=options.bad_rows and BadRows())  # counted already
    given = _options(file, as_text, {column: pa.string()}, use_threads=True, columns=[column])
    with file.open() as opened:
        for batch in csv.open_csv(opened, **given):
            yield batch.column(0).drop_null()


def _check_integers(file: DataFile, options: ReadOptions, table: pa.Table) -> None:
    def integers_of(column: str) -> Iterator[int]:
        for texts in _texts_of(file, options, column):
            yield from integers_in_texts(texts)

    remedy = "Set types={{{name!r}: 'string'}}"
    check_integers_of_floats(table, options, integers_of, remedy)


def _check_clients(file: DataFile, options: ReadOptions, schema: pa.Schema) -> None:
    """Raise for clients of different texts, such as 007 and 7, that are read as one."""
    client = options.client
    if client is None or client not in schema.names or client in options.types:
        return
    kind = schema.field(client).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return
    texts = pa.array([], pa.string())
    for batch in _texts_of(file, options, client):
        texts = pc.unique(pa.concat_arrays([texts, batch]))
    texts = pc.unique(pc.utf8_trim_whitespace(texts))
    plain = pc.replace_substring(texts, options.decimal_point or ".", ".")
    numbers = plain.cast(kind).to_numpy(zero_copy_only=False)
    order = np.argsort(numbers, kind="stable")
    is_equal = numbers[order[1:]] == numbers[order[:-1]]
    is_padded = pc.match_substring_regex(texts, r"^[+-]?0[\dxX]").to_numpy(zero_copy_only=False)
    if is_padded.any():
        places = [int(np.argmax(is_padded))]
    elif is_equal.any():
        first = int(np.argmax(is_equal))
        places = order[first : first + 2].tolist()
        if 2.0**53 < abs(numbers[places[0]]) < np.inf:
            return  # `check_client_numbers` tells of integers beyond float64
    else:
        return
    values = " and ".join(repr(texts[k].as_py()) for k in places)
    raise ArgumentError(
        f"its column {client!r} of clients has the value{'s' * (len(places) - 1)} {values}, read "
        f"as the number {numbers[places[0]]}. Set types={{{client!r}: 'string'}} (--types "
        f"{client}=string) to keep such clients apart, or types={{{client!r}: '{kind}'}} for "
        "numbers"
    )


def _column_of(error: Exception, file: DataFile, options: ReadOptions) -> str | None:
    """Return the column that pyarrow could not convert, or None for another error."""
    match = re.search(r"In CSV column #(\d+)", str(error))
    if match is None:
        return None
    with file.open() as opened:
        # Without stated types, to which the first block may not convert.
        reader = csv.open_csv(opened, **_options(file, options, {}, use_threads=True))
        return str(reader.schema.names[int(match[1])])


_FIRST_ROWS = 50  # below which a longer row can have the names of the columns
_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)


@contextlib.contextmanager
def rows_explained(file: DataFile, delimiter: str) -> Iterator[None]:
    """Add the remedy to pyarrow's error for a row, whose number one thread tells."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if "straddl" in str(error) or "out of sync" in str(error):
            raise ArgumentError(
                "it has a quoted value that does not end within 16 MB. Close the quote, or write a "
                'quote within a text as ""'
            ) from error
        match = _ROW.search(str(error))
        if match is None:
            raise
        raise ArgumentError(_explain_row(file, delimiter, match)) from error


def _explain_row(file: DataFile, delimiter: str, match: re.Match[str]) -> str:
    row, expected, got = int(match[1]), int(match[2]), int(match[3])
    first_line = match[4].split("\n")[0].rstrip("\r")
    columns = count_of(got, "column")
    text = f"its row {row} has {columns}, expected {expected} as in its first line: "
    if '"' in first_line and "\n" in match[4].strip():
        return (
            f"{text}{first_line!r} opens a quote that its line does not close. Close it, or write "
            'a quote within a text as ""'
        )
    if got > expected and row <= _FIRST_ROWS:
        lines = _first_lines(file)
        place = next((k for k, line in enumerate(lines) if line.startswith(first_line[:40])), 0)
        # The rows below a line of names have its length; those below a damaged row have not.
        below = lines[place + 1] if place + 1 < len(lines) else first_line
        if place and below.count(delimiter) == first_line.count(delimiter):
            return (
                f"its line 1, {lines[0][:80]!r}, is read as the names of the columns, "
                f"{expected} in all, and its line {place + 1}, {first_line[:80]!r}, has "
                f"{columns}. If line 1 is a title or a comment, remove the lines above the names, "
                f"such as by `tail -n +{place + 1} {file.path} > new.csv`; else correct the row"
            )
    return (
        f"{text}{first_line[:80]!r}. Correct it, and quote a value that contains the delimiter; "
        "`fedpax prepare` leaves such rows out with --on_bad_row=skip"
    )


def _first_lines(file: DataFile) -> list[str]:
    with file.open() as opened:
        head: bytes = opened.read(1 << 16)
    return head.decode(errors="replace").removeprefix("\ufeff").splitlines()


def check_header(file: DataFile, delimiter: str) -> None:
    """Raise for a file in another encoding, or with another delimiter."""
    with file.open() as opened:
        header = opened.read(1 << 16).split(b"\n")[0]
    if header.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ArgumentError(
            f"it is UTF-16, not UTF-8, expected UTF-8. Convert it, {_convert('UTF-16', file)}"
        )
    _check_separator_line(file)
    if delimiter.encode() not in header:
        check_delimiter(delimiter, header.decode(errors="replace").strip())


def _check_separator_line(file: DataFile) -> None:
    """Raise an error for a first line that tells spreadsheets the delimiter."""
    if match := re.fullmatch(r"sep=(.)", next(iter(_first_lines(file)), "")):
        raise ArgumentError(
            f"its first line, {match[0]!r}, tells spreadsheets the delimiter, and has no names of "
            f"columns. Remove it, such as by `tail -n +2 {file.path} > new.csv`, and set "
            f"delimiter={match[1]!r}"
        )


def check_single_column(file: DataFile, delimiter: str, name: str) -> None:
    """Raise for one column that the delimiter should divide, or that is no table."""
    check_delimiter(delimiter, name)
    if told := describe_contents(file):
        raise ArgumentError(told)


def check_delimiter(delimiter: str, name: str) -> None:
    """Raise an error for the name of a single column that has another delimiter."""
    if delimiters := [c for c in ";\t|" if c in name]:
        raise ArgumentError(
            f"it has one column, {name!r}, which delimiter={delimiter!r} does not divide. Set "
            f"delimiter={delimiters[0]!r}"
        )


def not_utf8(file: DataFile) -> ArgumentError:
    """Return an error that names the first line that is not UTF-8."""
    where = ""
    with file.open() as opened:
        for number, line in enumerate(io.BufferedReader(opened), 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 20]
                text = around.decode("cp1252", errors="replace").strip()
                where = f" in line {number}, which as WINDOWS-1252 is {text!r}"
                break
    return ArgumentError(
        f"it is not UTF-8{where}, expected UTF-8. Correct the line, or convert a file of "
        f"another encoding, {_convert('WINDOWS-1252', file)}"
    )


def _convert(encoding: str, file: DataFile) -> str:
    new = f"new{file.suffix}"
    return f"such as by `iconv -f {encoding} -t UTF-8 {file.path} > {new}`"


_SPACES = "'\u2019 \u00a0\u202f"  # apostrophes and spaces that separate thousands
_GROUPED = (
    rf"\d{{1,3}}(?:[.{_SPACES}]\d{{3}})+,\d+|\d{{1,3}}(?:[,{_SPACES}]\d{{3}})+\.\d+"
    r"|\d{1,3}(?:(?:\.\d{3}){2,}|(?:,\d{3}){2,})"
)
_NUMBER = rf"^\s*[+-]?(?:{_GROUPED}|\d*[.,]?\d+(?:[eE][+-]?\d+)?)\s*$"


def check_decimal_points(table: pa.Table, options: ReadOptions) -> None:
    """Raise for a column of texts that are numbers with another decimal point."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_read = not options.columns or name in options.columns
        if is_read and name not in options.types and pa.types.is_string(column.type):
            for chunk in column.chunks:
                values = chunk.drop_null()
                # A few values decide for almost all texts.
                if not (_match(values[:100], _NUMBER).all() and _match(values, _NUMBER).all()):
                    break
                _check_values(name, values, options.decimal_point or ".")


def check_stated_number(error: Exception, column: str | None, options: ReadOptions) -> None:
    """Raise for a decimal comma or separated thousands where the type is stated."""
    grouped = re.search(rf"invalid value '([+-]?(?:{_GROUPED}))'", str(error))
    if grouped and column in options.types:
        raise ArgumentError(
            f"its column {column!r} has numbers with thousands separators, such as {grouped[1]!r}. "
            "Write them in the file with one decimal point and without separators, or set "
            f"types={{{column!r}: 'string'}} to keep texts"
        ) from error
    value = re.search(r"invalid value '(-?\d*,\d+)'", str(error))
    if value and column in options.types and options.decimal_point != ",":
        raise ArgumentError(
            f"its column {column!r} has numbers with decimal commas: "
            f"{' '.join(str(error).split())}. Set decimal_point=','"
        ) from error


def _check_values(name: str, values: pa.Array, point: str) -> None:
    """Raise an error for a value that is not read as a number."""
    other = "," if point == "." else "."
    grouped = _match(values, rf"^\s*[+-]?(?:{_GROUPED})\s*$")
    decimal = _match(values, rf"^[^{point}]*\{other}[^{point}]*$") & ~grouped
    mixed = grouped if grouped.any() else decimal & _match(values, rf"\{point}").any()
    keep = f"or set types={{{name!r}: 'string'}} to keep texts"
    if mixed.any():
        raise ArgumentError(
            f"its column {name!r} has numbers with thousands separators or with both points and "
            f"commas, such as {_first(values, mixed)!r}, which are read as texts. Write them in "
            f"the file with one decimal point and without separators, {keep}"
        )
    if decimal.any():
        value = _first(values, decimal)
        remedy = f"Set decimal_point={other!r} for numbers"
        if point == ",":
            remedy = f"Leave decimal_point=',' out if {value!r} is a number with a decimal point"
        if re.fullmatch(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", value.strip()):  # 1.234, or 1234
            remedy += f", remove the {other!r} from the file if it separates thousands"
        raise ArgumentError(
            f"its column {name!r} has the value {value!r}, which is read as text, because "
            f"decimal_point is {point!r}. {remedy}, {keep}"
        )


def _match(values: pa.Array, pattern: str) -> NDArray[np.bool_]:
    return np.asarray(pc.match_substring_regex(values, pattern), np.bool_)


def _first(values: pa.Array, chosen: NDArray[np.bool_]) -> str:
    return str(values[int(np.argmax(chosen))])
