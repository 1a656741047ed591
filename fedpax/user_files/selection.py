"""select_files: what a user asks to be read, checked and in groups that are read at once."""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.user_files.finding import CLIENT, DataFile, absolute, check_shards, find_files, is_url
from fedpax.user_files.folders import find_in_folder
from fedpax.user_files.formats import LoadOptions, ReadOptions, is_image, is_shard
from fedpax.user_files.read_table import has_own_clients
from fedpax.user_paths import expand_home

HELD_OUT_SPLITS = ("heldout", "test", "validation")
"""Names of the split that `heldout_fraction` makes."""

_IMAGES_AT_ONCE = 1024


class Selection(NamedTuple):
    """Files to read."""

    name: str
    # the files that are read at once: several images, or one file of another format
    groups: list[list[DataFile]]
    options: ReadOptions
    names_split: bool  # paths or folders name the split, so no share of the examples is held out
    unwanted: list[str]  # columns that are read to check `types`, and that `columns` leaves out
    path_types: Mapping[str, pa.DataType]  # of columns that paths name


def select_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: LoadOptions,
    read: Counter[str] | None = None,
) -> Selection:
    """Find the files, and check the options; reading them counts images in `read`."""
    if isinstance(files, str | os.PathLike):
        files = [files]
    if not isinstance(files, list | tuple) or not all(
        isinstance(file, str | os.PathLike) for file in files
    ):
        raise ArgumentTypeError(_expected(files))
    if not files:
        raise ArgumentError(_expected(files))
    if options.decimal_point not in (None, ".", ","):
        raise ArgumentError(
            f"decimal_point is {options.decimal_point!r}, expected '.' or ','. Set ',' for numbers "
            "such as 1,5."
        )
    patterns = [os.fspath(file) for file in files]
    name = ",".join(patterns)
    data_files, names_split = _find(patterns, options)
    check_shards(data_files, [p for p in patterns if is_url(p) or not expand_home(p).is_dir()])
    check_split(name, options._replace(split="train") if names_split else options)
    data_files = _chosen_fields(data_files, options)
    in_path = {field for file in data_files for field in file.fields}
    kept = [c for c in (options.client, options.label) if c is not None and c not in in_path]
    types = _arrow_types(options.types)
    columns = [c for c in options.columns and (*options.columns, *kept) if c not in in_path]
    if options.columns and not columns:
        raise ArgumentError(
            f"columns={list(options.columns)} are parts of paths, expected also a column of the "
            f"files {name}. Name one, or leave columns out."
        )
    unwanted = [c for c in types if c not in (*columns, *in_path)] if columns else []
    read_options = ReadOptions(
        tuple(dict.fromkeys([*columns, *unwanted])),
        {name: kind for name, kind in types.items() if name not in in_path},
        options.delimiter,
        options.image_size,
        optional=tuple(options.optional_columns),
        decimal_point=options.decimal_point,
        client=options.client,
        image=options.image,
        read=read,
        decoded=set(),
    )
    path_types = {name: kind for name, kind in types.items() if name in in_path}
    return Selection(name, _group(data_files), read_options, names_split, unwanted, path_types)


def _chosen_fields(files: Sequence[DataFile], options: LoadOptions) -> list[DataFile]:
    """Leave out values of paths that `columns` leaves out; those that stay are in all paths."""
    always = {CLIENT, "label", "split", options.client, options.label, *options.columns}
    chosen = [
        file._replace(fields={k: v for k, v in file.fields.items() if k in always})
        if options.columns
        else file
        for file in files
    ]
    for file in chosen:
        if lacking := chosen[0].fields.keys() ^ file.fields.keys():
            name = min(lacking)
            having, other = (chosen[0], file) if name in chosen[0].fields else (file, chosen[0])
            raise ArgumentError(
                f"{having.path} is in a folder {name}=..., and {other.path} is not, expected it in "
                "all paths. Name the files of one kind, or move them."
            )
    return chosen


def _expected(files: object) -> str:
    return (
        f"load() got {files!r:.80}, expected the name of a data set, files, a list of files, or a "
        "table. Name for example 'hospitals/*.csv'."
    )


def check_split(name: str, options: LoadOptions) -> None:
    """Check the name of a split that a share of the examples makes."""
    split, heldout_fraction = options.split, options.heldout_fraction
    if not 0 <= heldout_fraction < 1:
        raise ArgumentError(
            f"heldout_fraction is {heldout_fraction}, expected a share from 0 to below 1, such as "
            "0.1."
        )
    if split is None and heldout_fraction:
        raise ArgumentError(
            f"heldout_fraction={heldout_fraction} divides {name} into 'train' and 'heldout', but "
            "split is None, expected one of them. Set split='train', or leave heldout_fraction out "
            "for all examples."
        )
    if split in (None, "train"):
        return
    if not heldout_fraction:
        raise ArgumentError(
            f"{name} has no split {split!r}. Write {{split}} in the path, such as "
            "'data/{split}/*.csv', or hold out a share of the examples with heldout_fraction=0.1."
        )
    if split not in HELD_OUT_SPLITS:
        raise ArgumentError(
            f"split is {split!r}, expected 'train', or one of {', '.join(HELD_OUT_SPLITS)} for the "
            "examples that heldout_fraction holds out."
        )


def wanted_columns(options: LoadOptions) -> dict[str, str | None]:
    """Return the columns of all files that the options name, for `check_columns`."""
    named = {"columns": options.columns, "types": options.types or ()}
    return {f"{key}[{k}]": c for key, columns in named.items() for k, c in enumerate(columns)}


def _arrow_types(types: Mapping[str, str] | None) -> dict[str, pa.DataType]:
    arrow_types = {}
    for column, text in (types or {}).items():
        try:
            arrow_types[column] = pa.type_for_alias(text)
        except ValueError:
            raise ArgumentError(
                f"types: {text!r} of column {column!r} is not a type of Arrow, expected one such "
                "as string, int64, float32, bool, date32 or timestamp[s]."
            ) from None
    return arrow_types


def _find(patterns: Sequence[str], options: LoadOptions) -> tuple[list[DataFile], bool]:
    """Return the files of a split, and whether paths or folders name the splits."""
    split = options.split
    folders = [p for p in patterns if not is_url(p) and expand_home(p).is_dir()]
    if not folders:
        names_split = any("{split}" in pattern for pattern in patterns)
        return find_files(patterns, split), names_split
    if len(patterns) > 1:
        raise ArgumentError(
            f"{folders[0]} is a folder, expected one folder or several files. Name its files, such "
            f"as '{folders[0]}/*.parquet'."
        )
    folder = expand_home(folders[0])
    if options.heldout_fraction and split in HELD_OUT_SPLITS:
        with contextlib.suppress(ValueError):  # the folder has no such split
            return find_in_folder(folder, split)
        split = "train"
    data_files, names_split = find_in_folder(folder, split)
    return data_files, names_split and not options.heldout_fraction


def _group(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Put images together, which are read in parallel; every other file is alone."""
    if all(is_image(file) for file in files):
        size = -(-len(files) // -(-len(files) // _IMAGES_AT_ONCE))  # no group is much smaller
        return [list(files[k : k + size]) for k in range(0, len(files), size)]
    return [[file] for file in files]


Fields = list[dict[str, str | None]]
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
                f"{group[0].path} has a column {twice[0]!r}, and its path has {twice[0]!r} too, "
                "expected one of them. Write * in the path, or leave the column out with columns=."
            )
    return fields, client


def add_path_columns(table: pa.Table, fields: Fields, types: Mapping[str, pa.DataType]) -> pa.Table:
    """Add the columns that paths name to the examples of a group of files: one, or one each."""
    for name in fields[0]:
        texts = pa.array([own[name] for own in fields], pa.string())
        try:
            texts = texts.cast(types[name]) if name in types else texts.dictionary_encode()
        except pa.ArrowInvalid as error:
            raise ArgumentError(
                f"types: the path's {name!r} is no {types[name]}: {error}. Leave its type out."
            ) from error
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
