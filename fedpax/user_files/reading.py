"""Reading: files as tables of one schema, a group of files after another."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedpax.errors import ArgumentError
from fedpax.user_files.arrow_numpy import (
    are_images,
    check_client_numbers,
    check_client_type,
    join_zeros,
)
from fedpax.user_files.finding import CLIENT, DataFile
from fedpax.user_files.formats import BadRows, LoadOptions, ReadOptions, TypeChangedError, format_of
from fedpax.user_files.held_out import part_of_split
from fedpax.user_files.image_hashes import can_be_encoded
from fedpax.user_files.read_table import (
    check_resized,
    conform,
    fits,
    has_own_clients,
    mark_clients,
    stream_tables,
    unify,
)
from fedpax.user_files.selection import (
    Fields,
    Selection,
    add_path_columns,
    path_fields,
    wanted_columns,
)
from fedpax.user_files.table_source import check_columns

Result = TypeVar("Result")


class Reading:
    """The parts of files as tables of one schema, which later parts can change.

    `groups` are read at once; `fields` has the values of columns that paths name, `types` of
    columns that a file's first part lacks.
    """

    def __init__(self, selected: Selection, options: LoadOptions, bad_rows: BadRows | None) -> None:
        self.groups = selected.groups
        self.client = options.client
        self.schema = pa.schema([])
        self._name = selected.name
        self._options = options._replace(heldout_fraction=0.0) if selected.names_split else options
        self._read_options = selected.options
        self._path_types = selected.path_types
        self._unwanted = dict.fromkeys(selected.unwanted, False)  # whether a part has it
        self.bad_rows, self.read = bad_rows, selected.options.read
        self.types: dict[str, dict[str, pa.DataType]] = {}
        self.fields: list[Fields] = []
        self.without_examples: list[str] = []

    def read_schema(self, *, first_part: bool) -> None:
        """Read the schema from the first part of each file, or from all parts."""
        self.join([self._group_schema(group, first_part) for group in self.groups])
        wanted = {*self._wanted().values()} - {None, *self._names()}
        if first_part and wanted and any(format_of(group[0]).varies for group in self.groups):
            self.read_schema(first_part=False)
        if first_part and self._finds_images():
            self.read_schema(first_part=True)

    def _finds_images(self) -> bool:
        """Read up to the first image if the first parts have damaged ones."""
        options, kinds = self._read_options, self.schema.types
        if options.image_size is None or options.decoded or any(map(are_images, kinds)):
            return False
        parts = (part for group in self.groups for part in self._parts(group))
        return any(map(can_be_encoded, kinds)) and any(options.decoded for _ in parts)

    def check_columns(self) -> None:
        """Check that the files have the columns that the options name."""
        check_columns(self._names(), self._wanted(), self._name)
        check_resized(self._name, self.schema, self._options)

    def _names(self) -> list[str]:
        return [*self.schema.names, *(name for name, is_seen in self._unwanted.items() if is_seen)]

    def _wanted(self) -> dict[str, str | None]:
        options = self._options
        wanted = wanted_columns(options)
        return wanted | {"client": self.client, "label": options.label}

    def _group_schema(self, group: Sequence[DataFile], first_part: bool) -> pa.Schema:
        parts = self._parts(group)
        own = [table.schema for table in ([next(parts)] if first_part else parts)]
        return unify_parts(group[0], own)

    def raw_parts(self, number: int) -> Iterator[tuple[pa.Table, pa.Schema, str | None]]:
        """Yield before `join` the parts of a group, their schemas and the column of clients."""
        file = self.groups[number][0]
        row = 0
        for part in self._parts(self.groups[number]):
            client = self.client or (CLIENT if has_own_clients(part.schema) else None)
            table = _decode(part)
            if client is not None and client in table.column_names:
                table = self._with_clients(table, client, file, row)
            row += part.num_rows
            yield table, part.schema, client

    def copy(self) -> "Reading":
        """Return a copy that counts skipped rows and changed images by itself."""
        again = copy.copy(self)
        again.bad_rows = None if self.bad_rows is None else BadRows()
        again.read = None if self.read is None else Counter()
        again.types = {path: dict(types) for path, types in self.types.items()}
        return again

    def join(self, schemas: Sequence[pa.Schema]) -> None:
        """Set `schema` and `client` from the schemas of the groups, without the paths' columns."""
        client, is_divided = self._options.client, self._options.partition is not None
        if is_divided:  # a file is not a client
            client = client or CLIENT
        self.fields, named = path_fields(self.groups, schemas, client)
        self.client = self._options.client if is_divided else named
        schemas = [
            _decode(add_path_columns(schema.empty_table(), fields[:1], self._path_types)).schema
            for schema, fields in zip(schemas, self.fields, strict=True)
        ]
        known = self.schema.names  # whose order stays when types of columns change
        files = [group[0] for group in self.groups]
        together = unify(files, schemas, self._options.optional_columns, self.fields[0][0])
        names = [*known, *(name for name in together.names if name not in known)]
        self.schema = pa.schema([together.field(name) for name in names])

    def describe(self) -> dict[str, Any]:
        """Check the columns, and return what prepared.json says of the files."""
        self.check_columns()
        if self.client is not None:
            check_client_type(self.schema.field(self.client).type, self.client, self._name)
        return {"client": self.client, "label": self._options.label, "files": self._name}

    def repeat(self, use: Callable[["Reading"], Result]) -> Result:
        """Return `use(self)`, called again where a part needs another type than those before."""
        while True:
            try:
                return use(self)
            except TypeChangedError as changed:
                self._change_type(changed)

    def _change_type(self, changed: TypeChangedError) -> None:
        if changed.column:
            self.types.setdefault(changed.path, {})[changed.column] = changed.type
        if self.fields:  # after `join`
            self.repeat(lambda again: again.read_schema(first_part=bool(changed.column)))

    def tables(self) -> Iterator[pa.Table]:
        """Yield all parts."""
        if self.bad_rows is not None:
            self.bad_rows.clear()
        if self.read is not None:
            self.read.clear()
        self.without_examples = []
        for number in range(len(self.groups)):
            yield from self.group_tables(number)

    def log_without_examples(self) -> None:
        """Log the files without examples, whose clients are left out."""
        for path in self.without_examples:
            logging.getLogger(__name__).warning("%s has no examples.", path)

    def group_tables(self, number: int) -> Iterator[pa.Table]:
        """Yield the parts of a group: the examples of the split that have a client."""
        group, fields = self.groups[number], self.fields[number]
        row = 0
        for part in self._parts(group):
            if len(group) > 1 and self.bad_rows is not None:  # images, without skipped ones
                skipped = self.bad_rows.count
                fields = [
                    own
                    for file, own in zip(group, self.fields[number], strict=True)
                    if file.path not in skipped
                ]
            table = _decode(add_path_columns(part, fields, self._path_types))
            if not fits(table.schema, self.schema):
                raise TypeChangedError(group[0].path, "", None)
            table = conform(table, self.schema)
            if self.client is not None:
                table = self._with_clients(table, self.client, group[0], row)
            row += part.num_rows
            table = part_of_split(self._name, table, self._options, self.client)
            if table.num_rows:
                yield table
        if not row and len(self.groups) > 1:
            self.without_examples.append(group[0].path)

    def _with_clients(self, table: pa.Table, client: str, file: DataFile, row: int) -> pa.Table:
        """Leave out the examples without a client, or raise an error."""
        column = table.column(client)
        check_client_numbers(column, client, file.path)
        table = join_zeros(table, client)
        missing = np.asarray(pc.is_null(column, nan_is_null=True))
        if not missing.any():
            return table
        if self.bad_rows is None:
            raise ArgumentError(
                f"{file.path} has no client in the column {client!r} of example "
                f"{row + int(np.argmax(missing))}, counted from 0. Fill it in, or leave such "
                "examples out: `fedpax prepare` does with --on_bad_row=skip."
            )
        for part in table.filter(pa.array(missing)).to_batches(max_chunksize=1000):
            for example in part.to_pylist():
                text = ", ".join(f"{name}: {value}" for name, value in example.items())
                self.bad_rows.skip(file.path, text)
        return table.filter(pa.array(~missing))

    def _parts(self, group: Sequence[DataFile]) -> Iterator[pa.Table]:
        for part in stream_tables(group, self._options_of(group[0])):
            unwanted = [name for name in self._unwanted if name in part.column_names]
            self._unwanted |= dict.fromkeys(unwanted, True)
            yield part.drop_columns(unwanted)

    def _options_of(self, file: DataFile) -> ReadOptions:
        types = {**self._read_options.types, **self.types.get(file.path, {})}
        return self._read_options._replace(types=types, bad_rows=self.bad_rows, read=self.read)


def unify_parts(file: DataFile, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema of a file from those of its parts."""
    names = {name for schema in schemas for name in schema.names}
    optional = [*names] if format_of(file).varies else []
    together = unify([file] * len(schemas), schemas, optional)
    return mark_clients(together) if has_own_clients(schemas[0]) else together


def _decode(table: pa.Table) -> pa.Table:
    """Decode categories: the batches of a file have no common dictionary."""
    kinds = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(kinds, table.schema.metadata))
