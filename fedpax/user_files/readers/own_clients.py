"""add_clients: the column of clients in formats that group examples by client themselves."""

from collections.abc import Sequence

import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.user_files.finding import CLIENT

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
