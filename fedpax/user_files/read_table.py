"""read_table and stream_tables: files as Arrow tables of one schema, with checked columns."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import are_images, array_to_arrow, plain_types, to_numpy
from fedpax.user_files.finding import CLIENT, DataFile
from fedpax.user_files.formats import (
    LoadOptions,
    ReadOptions,
    describe_contents,
    find_function,
    find_reader,
    find_stream,
    format_of,
    is_image,
)
from fedpax.user_files.image_hashes import is_hash, visible
from fedpax.user_files.readers.image_files import decode_features


def read_table(files: Sequence[DataFile], options: ReadOptions) -> pa.Table:
    """Read one file, or several images, each an example."""
    reader = find_reader(files[0])
    with _named(files[0]):
        table = reader(files if is_image(files[0]) else files[0], options)
        table = plain_types(decode_features(table, options, files[0].path))
    return _check_columns(files[0], table, options)


def stream_tables(files: Sequence[DataFile], options: ReadOptions) -> Iterator[pa.Table]:
    """Read one file in parts, or several images."""
    stream = find_stream(files[0])
    if stream is None:
        yield read_table(files, options)
        return
    parts = iter(stream(files[0], options))
    is_empty, first_row = True, 0
    while True:
        with _named(files[0]):
            table = next(parts, None)
            if table is None:
                break
            rows = table.num_rows
            table = plain_types(decode_features(table, options, files[0].path, first_row))
        is_empty, first_row = False, first_row + rows
        yield _check_columns(files[0], table, options)
    if is_empty:
        yield read_table(files, options)


@contextlib.contextmanager
def _named(file: DataFile) -> Iterator[None]:
    """Name the file in errors of the libraries that parse it."""
    try:
        yield
    except UnicodeEncodeError as error:  # of the path: the libraries take names in UTF-8
        raise ArgumentError(
            f"{file.path} has a name that is not UTF-8, expected one in UTF-8. Rename the file or "
            "its folder; where all names are UTF-8, set the environment variable PYTHONUTF8=1."
        ) from error
    except (pa.ArrowException, EOFError, MemoryError, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        if not is_image(file) and (told := describe_contents(file)):
            raise ArgumentError(told) from error
        text = " ".join(str(error).split()).rstrip(".") or "a size in it exceeds the memory"
        what = "" if is_image(file) else f"{file.path} cannot be read as {file.suffix[1:]}: "
        raise ArgumentError(f"{what}{text}.") from error


def _check_columns(file: DataFile, table: pa.Table, options: ReadOptions) -> pa.Table:
    """Select the columns, and give them the types that were asked for."""
    names: Sequence[str] = visible(table.column_names)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        remedy = "Rename them in the file."
        if not twice[0]:
            remedy = "Name the columns in its first line, and remove a title above the names."
        raise ArgumentError(
            f"{file.path} has several columns named {twice[0]!r}, expected different names. "
            f"{remedy}"
        )
    needed = [*options.columns, *options.types] if not format_of(file).varies else []
    if missing := [name for name in needed if name not in (*names, *options.optional)]:
        raise ArgumentError(
            f"{file.path} has no column {missing[0]!r}, expected one of "
            f"{', '.join(map(repr, names))}. Name one of these, or give "
            f"optional_columns=[{missing[0]!r}] if other files have it."
        )
    wanted = [c for c in options.columns if c in names] if options.columns else names
    if has_own_clients(table.schema) and CLIENT not in wanted:
        wanted = [*wanted, CLIENT]
    table = table.select([*wanted, *filter(is_hash, table.column_names)])
    for name, data_type in options.types.items():
        column = table.column(name) if name in table.column_names else None
        if column is not None:
            try:
                cast = _cast_values(column, _type_of_values(column.type, data_type))
            except pa.ArrowException as error:
                raise ArgumentError(
                    f"types: column {name!r} of {file.path} is {column.type} and cannot become "
                    f"{data_type}: {error}."
                ) from error
            table = table.set_column(table.column_names.index(name), name, cast)
    return table


def _type_of_values(kind: pa.DataType, values: pa.DataType) -> pa.DataType:
    """Return the type of a column of values; the values of a list or an array have the type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.fixed_shape_tensor(values, kind.shape)
    if pa.types.is_large_list(kind):
        return pa.large_list(_type_of_values(kind.value_type, values))
    if pa.types.is_list(kind):
        return pa.list_(_type_of_values(kind.value_type, values))
    return values


def _cast_values(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Cast a column. Arrow casts only the storage of arrays."""
    tensor = pa.FixedShapeTensorType
    if column.type == kind or not (isinstance(column.type, tensor) and isinstance(kind, tensor)):
        return column.cast(kind)
    chunks = [chunk.storage.cast(kind.storage_type) for chunk in column.chunks]
    return pa.chunked_array([pa.ExtensionArray.from_storage(kind, chunk) for chunk in chunks], kind)


_MARK = {b"fedpax": b"client"}  # in the field's metadata, to tell it from a column of the user


def add_clients(table: pa.Table, clients: Sequence[str]) -> pa.Table:
    """Add the name of each example's client to a table."""
    if CLIENT in table.column_names:
        raise ArgumentError(
            f"its clients have a field {CLIENT!r}, which is the column of their names. Rename it"
        )
    names = pa.array(clients, pa.string()).dictionary_encode()
    table = table.append_column(CLIENT, names)
    return table.cast(mark_clients(table.schema))


def mark_clients(schema: pa.Schema) -> pa.Schema:
    """Mark the column of clients as one that `add_clients` has added."""
    place = schema.get_field_index(CLIENT)
    return schema.set(place, schema.field(place).with_metadata(_MARK))


def has_own_clients(schema: pa.Schema) -> bool:
    """Return whether `add_clients` has added the clients."""
    return CLIENT in schema.names and schema.field(CLIENT).metadata == _MARK


def unify(
    files: Sequence[DataFile],
    schemas: Sequence[pa.Schema],
    optional: Sequence[str] = (),
    of_paths: Collection[str] = (),
) -> pa.Schema:
    """Return the schema of all files, and the columns of paths: numbers become wider, no text."""
    together = schemas[0].remove_metadata()
    seen: dict[str, DataFile] = {name: files[0] for name in together.names}
    for file, schema in zip(files, schemas, strict=True):
        if different := {*visible({*schema.names} ^ {*together.names})} - {*optional}:
            common = [n for n in together.names if n in schema.names and n not in of_paths]
            _check_optional(sorted(different)[0], file, files[0], together, visible(common))
        fields = {field.name: field for field in together}
        for field in schema.remove_metadata():
            known = fields.get(field.name)
            fields[field.name] = field if known is None else _join_fields(known, field, seen, file)
            seen.setdefault(field.name, file)
        together = pa.schema([pa.field(f.name, f.type) for f in fields.values()])
    return together


def join_parts(parts: Iterable[pa.Table]) -> pa.Table:
    """Concatenate the parts of a file, each of which has the types of its own values."""
    tables = [*parts]
    if not tables:
        raise ArgumentError("it has no examples, expected at least one")
    return pa.concat_tables(tables, promote_options="permissive")


def join_splits(splits: Mapping[str, pa.Table]) -> pa.Table:
    """Concatenate the tables of splits as `unify` does those of files; columns can be absent."""
    fields: dict[str, pa.Field] = {}
    for split, table in splits.items():
        for field in table.schema:
            known = fields.setdefault(field.name, field)
            joined = _join(known.type, field.type)
            if joined is None:
                raise ArgumentError(
                    f"The column {field.name!r} is {field.type} in the split {split!r} and "
                    f"{known.type} in others, expected one type. {_type_remedy(known)}"
                )
            fields[field.name] = known.with_type(joined).with_nullable(True)
    schema = pa.schema([*fields.values()])
    return pa.concat_tables([conform(table, schema) for table in splits.values()])


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give a table the columns and types of a schema from `unify`."""
    columns = [
        _cast(table.column(field.name), field)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    data_type = field.type
    if column.type == data_type or not (are_images(data_type) and are_images(column.type)):
        try:
            return _cast_values(column, data_type)
        except pa.ArrowException as error:
            raise ArgumentError(
                f"The column {field.name!r} is {column.type} in one file and {data_type} for all "
                f"files, which does not hold its values: {error}. Set "
                f"types={{{field.name!r}: 'string'}}, or leave the column out with columns=."
            ) from error
    gray = to_numpy(column)
    return pa.chunked_array([array_to_arrow(np.broadcast_to(gray, (len(gray), *data_type.shape)))])


def check_resized(name: str, schema: pa.Schema, options: LoadOptions) -> None:
    """Raise an error for an `image_size` that changes nothing."""
    size = options.image_size
    if size is None or options.columns or options.image is not None:
        return  # an experiment on images checks them itself
    images = [field for field in schema if are_images(field.type)]
    if tuple(size) in {tuple(field.type.shape[:2]) for field in images}:
        return
    has = "no encoded images"
    if images:
        height, width, _ = images[0].type.shape
        has = f"{images[0].name!r} as pixels of {height} x {width}"
    raise ArgumentError(
        f"image_size={tuple(size)} resizes encoded images, such as PNG and JPEG, but {name} has "
        f"{has}. Leave image_size out, or read the files of the images."
    )


def fits(schema: pa.Schema, together: pa.Schema) -> bool:
    """Return whether `conform` changes no value of a table of this schema."""
    return all(
        field.name in together.names
        and _join(together.field(field.name).type, field.type) == together.field(field.name).type
        for field in schema
    )


def _join(one: pa.DataType, two: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of two types, or None."""
    if one == two:
        return one
    if are_images(one) and are_images(two) and one.shape[:2] == two.shape[:2]:
        return one if one.shape[2] == 3 else two  # the others are gray
    if isinstance(one, pa.FixedShapeTensorType) and isinstance(two, pa.FixedShapeTensorType):
        if one.shape != two.shape or are_images(one) or are_images(two):  # 0 to 255, or to 1
            return None
        values = _join(one.value_type, two.value_type)
        return values and pa.fixed_shape_tensor(values, one.shape)
    try:
        schemas = [pa.schema([pa.field("", kind)]) for kind in (one, two)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _check_optional(
    column: str, file: DataFile, first: DataFile, together: pa.Schema, common: Sequence[str]
) -> None:
    """Raise an error for a column that a file lacks, unless the files are JSON."""
    if format_of(file).can_omit and format_of(first).can_omit:
        return
    lacks, has = (file, first) if column in together.names else (first, file)
    raise ArgumentError(
        f"{lacks.path} has no column {column!r}, which {has.path} has, expected the same columns "
        f"in all files. Add the column, or give optional_columns=[{column!r}] if its values are "
        f"missing there, or name common columns with columns={common}."
    )


def _join_fields(
    one: pa.Field, two: pa.Field, seen: dict[str, DataFile], file: DataFile
) -> pa.Field:
    joined = _join(one.type, two.type)
    if joined is not None:
        return one.with_type(joined)
    remedy = _type_remedy(one)
    if pa.types.is_timestamp(one.type) and pa.types.is_timestamp(two.type):
        unit = max(one.type.unit, two.type.unit, key="s ms us ns".index)
        remedy = (
            f"Set types={{{one.name!r}: 'timestamp[{unit}]'}} if all are in UTC: a time with a "
            "zone is converted to UTC, and one without keeps its value."
        )
    known, misfit = seen[one.name], ""
    for texts, field, other in ((known, one, two), (file, two, one)):
        find = format_of(texts).misfit
        if find and pa.types.is_string(field.type) and not pa.types.is_string(other.type):
            kind = pa.float64() if pa.types.is_integer(other.type) else other.type  # holds both
            misfit = find_function(find)(texts, one.name, kind)
    raise ArgumentError(
        f"The column {one.name!r} is {one.type} in {known.path} and {two.type} in {file.path}, "
        f"expected one type{misfit and f': {misfit}'}. {remedy}"
    )


def _type_remedy(field: pa.Field) -> str:
    if isinstance(field.type, pa.FixedShapeTensorType):
        return "Set image_size=(height, width) if they are images, or save one shape."
    return f"Correct the values, or set types={{{field.name!r}: 'string'}}."
