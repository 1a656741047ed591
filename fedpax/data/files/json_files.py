"""read_json_lines and read_json: JSON lines, a JSON list of objects, and LEAF's JSON."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyarrow import json as arrow_json

from fedpax.data.files.columns import concatenate_values
from fedpax.data.files.finding import DataFile
from fedpax.data.files.formats import ReadOptions
from fedpax.data.files.own_clients import add_clients
from fedpax.errors import ArgumentError

_BLOCK = 1 << 26  # the longest line that is read, in bytes
_LARGEST_BLOCK = (1 << 31) - 1


def read_json_lines(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read one JSON object a line."""
    del options
    try:
        return _read_lines(file, _BLOCK)
    except pa.ArrowInvalid:
        return _read_lines(file, _LARGEST_BLOCK)  # one block: the message counts its rows


def _read_lines(file: DataFile, block_size: int) -> pa.Table:
    with file.open() as opened:
        return arrow_json.read_json(
            opened,
            arrow_json.ReadOptions(block_size=block_size),
            arrow_json.ParseOptions(newlines_in_values=False),
        )


def read_json(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read a list of objects, LEAF's users, or JSON lines in a file that is named .json."""
    with file.open() as opened:
        start = opened.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        return pa.Table.from_pylist(_parse(file))
    if start.startswith(b"{") and b'"users"' in start.split(b"[", 1)[0]:
        return read_leaf(_parse(file))
    return read_json_lines(file, options)


def _parse(file: DataFile) -> Any:
    with file.open() as opened:
        return json.loads(opened.read())


def read_leaf(content: Mapping[str, Any]) -> pa.Table:
    """Read LEAF's format: `user_data` has for each of the `users` lists of equal length by field.

    Args:
        content: the parsed file.

    Returns:
        The examples, with the column `client`.

    Raises:
        ValueError: a user has no data, or lists of different lengths.

    Example:
        >>> user_data = {"u1": {"x": [[0.5, 1.0], [0.0, 2.0]], "y": [1, 0]}}
        >>> read_leaf({"users": ["u1"], "user_data": user_data}).column_names
        ['x', 'y', 'client']
    """
    users, user_data = content["users"], content.get("user_data")
    if not isinstance(user_data, Mapping) or (missing := [u for u in users if u not in user_data]):
        who = f" of user {missing[0]!r}" if isinstance(user_data, Mapping) else ""
        raise ArgumentError(
            f"it has 'users' but no 'user_data'{who}, expected LEAF's users, num_samples and "
            "user_data"
        )
    fields: dict[str, list[Any]] = {name: [] for user in users for name in user_data[user]}
    clients: list[str] = []
    for user in users:
        sizes = {name: len(user_data[user].get(name, ())) for name in fields}
        if len(set(sizes.values())) > 1:
            raise ArgumentError(f"user {user!r} has {sizes} values, expected equal numbers")
        clients += [user] * next(iter(sizes.values()), 0)
        for name, values in fields.items():
            values += user_data[user][name]
    columns = {name: concatenate_values(values) for name, values in fields.items()}
    return add_clients(pa.table(columns), clients)
