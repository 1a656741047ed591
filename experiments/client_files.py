"""Users' files as clients: the examples, their clients, and which of them are held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from fedpax.checks import CheckedConfig, Decay
from fedpax.data import load
from fedpax.data.tables.labels import Label, missing_label_message
from fedpax.data.tables.values import arrow_column, is_missing
from fedpax.errors import ArgumentError


class PreparedFiles(Protocol):
    """Examples as arrays, and their label."""

    @property
    def examples(self) -> Mapping[str, NDArray[Any]]:
        """The fields of all examples, arrays `[examples, ...]`, with `label`."""
        ...

    @property
    def label(self) -> Label:
        """The label that the model predicts."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Lines that are printed when a run starts."""
        ...


@dataclasses.dataclass(frozen=True)
class FilesConfig(CheckedConfig):
    """Files whose examples have clients and labels.

    Attributes:
        files: paths and patterns, as for `fedpax.data.load`, such as "hospitals/*.csv". With
            `{split}` in the path, the split "train" is trained on.
        client: the column that names an example's client. Default None: `{client}` in the path, or
            each file is a client.
        partition: clients for files that have none, such as "dirichlet:0.3:100", as for
            `fedpax.data.load`.
        label: the column to predict.
        missing_label: what examples without a label are: an "error", or left out, "skip".
        heldout_fraction: share of each client's examples that is held out, chosen by a hash of the
            example.
        heldout_clients: share of the clients that are held out with all their examples, chosen by a
            hash of the name.
        heldout_split: the split to evaluate on if `files` has `{split}`; `heldout_fraction` then
            has no effect.
        optional_columns: columns that some of the files lack; their values are missing there.
    """

    group = "data"
    files: tuple[str, ...] = ()
    client: str | None = None
    partition: str | None = None
    label: str | None = None
    missing_label: Literal["error", "skip"] = "error"
    heldout_fraction: Decay = 0.2
    heldout_clients: Decay = 0.0
    heldout_split: str = "test"
    optional_columns: tuple[str, ...] = ()

    def load_arguments(self) -> dict[str, Any]:
        """Return the arguments of `fedpax.data.load` beside the files and the split."""
        return {
            "client": self.client,
            "partition": self.partition,
            "label": self.label,
            "optional_columns": self.optional_columns,
        }


class OpenFiles(NamedTuple):
    """The examples of files, and the part of each."""

    columns: Mapping[str, Any]  # all columns by name, Arrow arrays, sorted by client
    client: str  # the column of clients
    names: Sequence[str]  # the clients' names
    owners: Int[np.ndarray, " examples"]  # the client of each example
    heldout: Bool[np.ndarray, " examples"]  # whether an example of a training client is held out
    is_new: Bool[np.ndarray, " clients"]  # whether a client is held out with all its examples
    notes: tuple[str, ...]  # lines that tell what was read

    @property
    def training(self) -> Bool[np.ndarray, " examples"]:
        """Tell for each example whether it is a training example."""
        return np.asarray(~self.heldout & ~self.is_new[self.owners], np.bool_)

    def parts(self, chosen: Bool[np.ndarray, " examples"]) -> dict[str, NDArray[np.int64]]:
        """Return the chosen examples of each client that has any, by its name."""
        rows = np.flatnonzero(chosen)
        owners = self.owners[rows]
        ends = np.searchsorted(owners, np.arange(len(self.names) + 1))
        return {
            name: rows[begin:end]
            for name, begin, end in zip(self.names, ends, ends[1:], strict=False)
            if end > begin
        }


def open_files(data: FilesConfig, one_client: str | None = None) -> OpenFiles:
    """Read files, and decide which examples are held out.

    Args:
        data: the files.
        one_client: name of the client of one file that has no clients. Default None: raise.
    """
    if not data.files or data.label is None:
        raise ArgumentError(
            f"data.files={data.files} and data.label={data.label}, expected files and the column "
            "to predict. Set for example --data.files='hospitals/*.csv' --data.label=outcome."
        )
    has_split = any("{split}" in file for file in data.files)
    if has_split and data.partition is not None:
        raise ArgumentError(
            f"data.partition={data.partition!r} divides the examples of one split, but data.files "
            "has {split}. Name all files with *, and hold out with --data.heldout_fraction."
        )
    splits = ["train", data.heldout_split] if has_split else [None]
    # One name alone can be the folder of a prepared data set.
    files = data.files[0] if len(data.files) == 1 else data.files
    sources: list[Any] = [load(files, split, **data.load_arguments()) for split in splits]
    client = sources[0].client
    if client is None and one_client is None:
        raise ArgumentError(
            f"data.files={' '.join(data.files)} is one file without clients, expected the column "
            "that names an example's client. Set --data.client to one of "
            f"{', '.join(map(repr, sources[0].fields))}."
        )
    table, of_heldout = _join(sources)
    if client is None:
        client = "client"
        table = table.append_column(client, [[one_client] * table.num_rows])
    skipped = is_missing(arrow_column(table.column(data.label)))
    if skipped.any():
        if data.missing_label == "error":
            raise ArgumentError(missing_label_message(data.label, skipped))
        table, of_heldout = table.filter(~skipped), of_heldout[~skipped]
    encoded = table.column(client).combine_chunks().dictionary_encode()
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    owners = np.asarray(encoded.indices.to_numpy(), np.int64)
    # Sorted by client again: the held-out split followed the training split.
    order = np.argsort(owners, kind="stable")
    table, owners, of_heldout = table.take(order), owners[order], of_heldout[order]
    heldout, is_new = _held_out(data, table, client, names, owners, of_heldout, has_split)
    parts = [f"{int(heldout.sum()):,} held out within clients"]
    if is_new.any():
        new = f"{int(is_new.sum()):,} held-out clients"
        parts.append(f"{int(is_new[owners].sum()):,} of {new}")
    notes = [f"{len(names):,} clients, {len(owners):,} examples: {', '.join(parts)}"]
    if skipped.any():
        notes.append(f"left out: {int(skipped.sum()):,} examples without {data.label!r}")
    return OpenFiles(
        dict(zip(table.column_names, table.columns, strict=True)),
        client,
        names,
        owners,
        heldout,
        is_new,
        tuple(notes),
    )


def _join(sources: Sequence[Any]) -> tuple[Any, Bool[np.ndarray, " examples"]]:
    """Concatenate the tables of the splits, and tell the examples of the second one."""
    import pyarrow as pa

    tables = [source.table for source in sources]
    of_heldout = np.repeat(np.arange(len(tables)) == 1, [table.num_rows for table in tables])
    if len(tables) == 1:
        return tables[0], of_heldout
    return pa.concat_tables(tables, promote_options="permissive"), of_heldout


def _held_out(
    data: FilesConfig,
    table: Any,
    client: str,
    names: Sequence[str],
    owners: Int[np.ndarray, " examples"],
    of_heldout: Bool[np.ndarray, " examples"],
    has_split: bool,
) -> tuple[Bool[np.ndarray, " examples"], Bool[np.ndarray, " clients"]]:
    """Return which examples of training clients, and which clients, are held out."""
    from fedpax.user_files.held_out import held_out

    # Clients that a partition made are no content: equal examples are on one side.
    content = table if data.partition is None else table.drop_columns([client])
    chosen = of_heldout if has_split else held_out(content, data.heldout_fraction)
    of_clients = held_out(table.select([client]), data.heldout_clients)
    is_new = np.zeros(len(names), np.bool_)
    is_new[owners[of_clients]] = True
    if is_new.all():
        raise ArgumentError(
            f"data.heldout_clients={data.heldout_clients} holds out all {len(names)} clients, "
            "expected some to train on. Set a smaller --data.heldout_clients."
        )
    heldout = chosen & ~is_new[owners]
    if not heldout.any() and not is_new.any():
        raise ArgumentError(
            f"data.heldout_fraction={data.heldout_fraction} holds out none of {len(owners)} "
            "examples, expected some to evaluate on. Set a larger --data.heldout_fraction or "
            "--data.heldout_clients."
        )
    return heldout, is_new
