"""Users' files as configuration: their clients, their labels, and what is held out."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fedpax.checks import CheckedConfig, Decay
from fedpax.data.open_client_files import OpenFiles, open_client_files
from fedpax.errors import ArgumentError
from fedpax.user_files.formats import LoadOptions, parse_types


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
        optional_columns: columns that some of the files lack; their values are missing there. On
            the command line, commas or spaces separate them, and a comma in a name follows a
            backslash.
        types: types of Arrow for columns of files, as "COLUMN=TYPE", such as "zip=string", where
            the type that is found is not the intended one, separated as `optional_columns` are.
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
    types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges and the types."""
        super().__post_init__()
        parse_types("--data.types", self.types)

    @property
    def has_split(self) -> bool:
        """Whether the path of a file has `{split}`."""
        return any("{split}" in file for file in self.files)

    def open(self, one_client: str | None = None) -> OpenFiles:
        """Read the files, and decide which examples are held out."""
        # `one_client` is the name of the client of one file that has no clients.
        if not self.files or self.label is None:
            raise ArgumentError(
                f"data.files={self.files} and data.label={self.label}, expected files and the "
                "column to predict. Set for example --data.files='hospitals/*.csv' "
                "--data.label=outcome."
            )
        if self.has_split and self.partition is not None:
            raise ArgumentError(
                f"data.partition={self.partition!r} divides the examples of one split, but "
                "data.files has {split}. Name all files with *, and hold out with "
                "--data.heldout_fraction."
            )
        # These have other meanings in `load`: all examples, and the columns that are read.
        fields = {k: v for k, v in vars(self).items() if k not in ("heldout_fraction", "columns")}
        fields["types"] = parse_types("--data.types", self.types)
        return open_client_files(
            self.files,
            LoadOptions.of(fields),
            missing_label=self.missing_label,
            heldout_fraction=self.heldout_fraction,
            heldout_clients=self.heldout_clients,
            heldout_split=self.heldout_split if self.has_split else None,
            one_client=one_client,
        )
