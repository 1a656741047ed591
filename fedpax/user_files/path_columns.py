"""path_fields and add_path_columns: the columns that the paths of files name, such as `client`."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa

from fedpax.errors import ArgumentError
from fedpax.user_files.finding import CLIENT, DataFile, absolute
from fedpax.user_files.formats import is_image, is_shard
from fedpax.user_files.readers.own_clients import has_own_clients

Fields = list[dict[str, str]]
"""For each file of a group the values of the columns that its path names."""


def path_fields(
    groups: Sequence[Sequence[DataFile]], schemas: Sequence[pa.Schema], client: str | None
) -> tuple[list[Fields], str | None]:
    """Return the columns that paths name, and the column that names the clients."""
    first = groups[0][0]
    if any(map(has_own_clients, schemas)) or CLIENT in first.fields:
        client = client or CLIENT
    fields = [[dict(file.fields) for file in group] for group in groups]
    if client is None and len(groups) > 1 and not is_shard(first) and not is_image(first):
        if any(CLIENT in schema.names for schema in schemas):
            raise ArgumentError(
                "Each of several files is a client unless client= names a column, but these files "
                f"have a column {CLIENT!r}. Set client={CLIENT!r} if it names the clients; "
                "otherwise leave it out with columns=."
            )
        client = CLIENT
        for (own,), name in zip(fields, _client_names([g[0] for g in groups]), strict=True):
            own[CLIENT] = name
    for group, schema, values in zip(groups, schemas, fields, strict=True):
        if twice := [name for name in values[0] if name in schema.names]:
            raise ArgumentError(
                f"{group[0].path} has a column {twice[0]!r}, and its path has {{{twice[0]}}} too, "
                "expected one of them. Write * in the path, or leave the column out with columns=."
            )
    return fields, client


def add_path_columns(table: pa.Table, fields: Fields) -> pa.Table:
    """Add the columns that paths name to the examples of a group of files."""
    for name in fields[0]:
        texts = pa.array([own[name] for own in fields]).dictionary_encode()
        if len(fields) == 1:
            texts = texts.take(pa.array(np.zeros(table.num_rows, np.int32)))
        table = table.append_column(name, texts)
    return table


def _client_names(files: Sequence[DataFile]) -> list[str]:
    """Name clients after their files; with folders and suffixes that tell equal names apart."""
    names = [file.name for file in files]
    if len({*names}) == len(names):
        return names
    whole = [absolute(file.path) for file in files]
    shared = os.path.commonpath([os.path.dirname(path) for path in whole])
    paths = [PurePosixPath(os.path.relpath(path, shared)) for path in whole]
    names = [path.with_name(name).as_posix() for path, name in zip(paths, names, strict=True)]
    count = Counter(names)
    return [
        name if count[name] == 1 else path.as_posix()
        for path, name in zip(paths, names, strict=True)
    ]
