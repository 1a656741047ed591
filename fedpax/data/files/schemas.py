"""unify and conform: one schema for the tables of several files."""

from collections.abc import Sequence

import pyarrow as pa

from fedpax.data.files.finding import DataFile
from fedpax.errors import ArgumentError

_JSON = (".json", ".jsonl", ".ndjson")  # in which a missing name is a missing value


def unify(files: Sequence[DataFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema that holds the values of all files.

    Integers become floats, and floats wider, where another file has them. Nothing becomes a text.

    Args:
        files: the files.
        schemas: the schema of each.

    Raises:
        ValueError: a file lacks a column, or has another type in it.
    """
    together = schemas[0].remove_metadata()
    seen: dict[str, DataFile] = {name: files[0] for name in together.names}
    for file, schema in zip(files, schemas, strict=True):
        if different := {*schema.names} ^ {*together.names}:
            _check_optional(sorted(different)[0], file, files[0], together, schema)
        fields = {field.name: field for field in together}
        for field in schema.remove_metadata():
            known = fields.get(field.name)
            fields[field.name] = field if known is None else _join(known, field, seen, file)
            seen.setdefault(field.name, file)
        together = pa.schema([pa.field(f.name, f.type) for f in fields.values()])
    return together


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give a table the columns and types of a schema from `unify`."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def fits(schema: pa.Schema, together: pa.Schema) -> bool:
    """Return whether `conform` gives a table of a schema another one without a change of a value.

    Args:
        schema: the schema of a part.
        together: the schema of all parts that were seen before.
    """
    if any(name not in together.names for name in schema.names):
        return False
    try:
        fields = [together.field(field.name) for field in schema]
        joined = pa.unify_schemas(
            [pa.schema(fields), schema.remove_metadata()], promote_options="permissive"
        )
    except pa.ArrowException:
        return False
    return all(joined.field(field.name).type == field.type for field in fields)


def _check_optional(
    column: str, file: DataFile, first: DataFile, together: pa.Schema, schema: pa.Schema
) -> None:
    """Raise an error for a column that a file lacks, unless the files are JSON."""
    if file.suffix in _JSON and first.suffix in _JSON:
        return
    lacks, has = (file, first) if column in together.names else (first, file)
    common = ", ".join(repr(name) for name in together.names if name in schema.names)
    raise ArgumentError(
        f"{lacks.path} has no column {column!r}, which {has.path} has, expected the same columns "
        f"in all files. Add the column, or name common columns with columns=, such as {common}."
    )


def _join(one: pa.Field, two: pa.Field, seen: dict[str, DataFile], file: DataFile) -> pa.Field:
    if one.type == two.type:
        return one
    try:
        return pa.unify_schemas(
            [pa.schema([pa.field(one.name, field.type)]) for field in (one, two)],
            promote_options="permissive",
        ).field(0)
    except pa.ArrowException:
        raise ArgumentError(
            f"The column {one.name!r} is {one.type} in {seen[one.name].path} and {two.type} in "
            f"{file.path}, expected one type. Correct the values, or set types={{{one.name!r}: "
            "'string'}."
        ) from None
