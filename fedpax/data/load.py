"""load and prepare: the doors to data sets by name and to users' files."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fedpax.errors import ArgumentError
from fedpax.extras import optional
from fedpax.sources.data_sets import (
    EMBEDDED,
    FEDERATED,
    folder_hint,
    missing_file,
    open_data_set,
    open_records,
)
from fedpax.sources.source import SUFFIX, Source
from fedpax.user_files.folders import is_files
from fedpax.user_files.formats import LoadOptions
from fedpax.user_paths import fill_in_split

if TYPE_CHECKING:
    from fedpax.user_files.preparing import Prepared


def load(
    name: Any,
    split: str | None = None,
    *,
    client: str | None = None,
    label: str | None = None,
    partition: str | None = None,
    columns: Sequence[str] = (),
    optional_columns: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    decimal_point: str | None = None,
    image_size: tuple[int, int] | None = None,
    heldout_fraction: float = 0.0,
    heldout_by: str = "example",
    data_dir: str | os.PathLike[str] | None = None,
) -> Source:
    r"""Open a split of a data set, or files as clients.

    Files are sorted by client; a client's examples keep their order. Nothing in a file is executed.

    A data set of TFDS is prepared first if necessary, by one process while others wait. An
    interrupted preparation leaves nothing that is read.

    Args:
        name: one of

            - an embedded data set: `"stdlib_text"` or `"digits"`;
            - a federated one: `"federated_cifar100"`, `"federated_emnist"`,
              `"federated_emnist/digits"`, `"federated_shakespeare"` or
              `"federated_stackoverflow"`;
            - any name in TFDS's catalog, such as `"mnist"` or `"wikipedia/20230601.en"`;
            - a folder that `prepare` wrote;
            - files, as a path, a pattern, a URL in a bucket, or a list of these: CSV and TSV (.gz,
              .zst and .bz2 too), Parquet, JSON lines, Arrow and Feather, LEAF's JSON, .npz, HDF5
              (a group is a client), images, TFRecords, WebDataset's tar, and folders of Hugging
              Face's `save_to_disk` or hub. `{client}`, `{label}` and `{split}` stand for a part of
              a path: `"photos/{client}/{label}/*.jpg"`;
            - a table in memory: pandas, Polars, pyarrow, a `Dataset` of Hugging Face, or a dict of
              arrays `[examples, ...]`;
            - array_record files: `"corpus/{split}-*.array_record"`. A record is a text in UTF-8
              (the field `"text"`) or a `tf.train.Example`.

            A folder or file that exists as it is written is itself.
        split: a split's name. In a data set of TFDS also a part of a split, such as
            `"train[:90%]"`. For files the text of `{split}`, or `"train"` and `"heldout"` for the
            parts that `heldout_fraction` makes. Default None: all files.
        client: the column of files that names an example's client. Default None: `{client}` in the
            path; else each of several files is a client, by its name in the column `"client"`; one
            file has none.
        label: the column of files with the label.
        partition: clients for files that have none, as the `partition_...` function, its parameter
            and the number of clients: `"iid:100"`, `"dirichlet:0.3:100"`, `"shards:2:100"` or
            `"quantity:0.5:100"`; `"dirichlet:0.3:100:7"` has the seed 7 in place of 0.
        columns: the columns of files to read. Default: all.
        optional_columns: columns that some files may lack; their values are missing there.
        types: types of Arrow for columns of files, such as `{"zip": "string"}`. Default: pyarrow's
            choice.
        delimiter: the character between columns of CSV. Default None: a comma, in TSV a tab.
        decimal_point: `","` for numbers such as 1,5 in CSV. Default None: a point.
        image_size: the height and width to resize image files and columns of image bytes to.
            Default None: all image files have one size, and bytes in tables stay bytes.
        heldout_fraction: the share of the examples of files in the split `"heldout"` and not in
            `"train"`, chosen by a hash of the content (of images, the file's bytes): the same on
            every machine.
        heldout_by: what is hashed: `"example"`, all columns; `"client"`, to hold out whole clients;
            or a column, such as `"text"`, whose equal values are on one side.
        data_dir: the folder of prepared data sets. Default None: the environment variable
            `TFDS_DATA_DIR`, or `~/tensorflow_datasets`; a whole split of an embedded data set is
            then made in memory, and nothing is written.

    Returns:
        The split's examples. For files a `fedpax.user_files.table_source.TableSource`.

    Raises:
        ValueError: the data set or split does not exist, the split has no examples, or a file is
            damaged or does not fit the others; the message names the file, the column and a remedy.
        ConnectionError: the data set must be downloaded and there is no network.
        RuntimeError: preparing fails for another reason.
        FileNotFoundError: no file matches.
        ImportError: files need the extra: `pip install "fedpax[files]"`.
        OSError: the prepared files cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "north.csv").write_text("age,outcome\n70,1\n,0\n")
        >>> _ = (folder / "Åre.csv").write_text("age,outcome\n50,0\n")
        >>> hospitals = load(folder / "*.csv", label="outcome")
        >>> hospitals.client_names, hospitals.client_starts
        (ClientNames(['north', 'Åre']), array([0, 2, 3]))
        >>> hospitals[1]
        {'age': None, 'outcome': np.int64(0), 'client': 'north'}
    """
    return load_with(name, LoadOptions.of(locals()), data_dir)


def load_with(name: Any, options: LoadOptions, data_dir: Any = None) -> Source:
    """Open a data set by name, or files."""
    split = options.split
    if isinstance(name, str) and name.endswith(SUFFIX):
        with optional(f"Reading {name!r}"):
            return open_records(fill_in_split(name, split or "train"))
    if not isinstance(name, str) or (name not in {*EMBEDDED, *FEDERATED} and is_files(name)):
        with optional(f"Reading {name!r}"):
            from fedpax.user_files.open_files import open_files

            return open_files(name, options)
    for argument, value in options._asdict().items():
        if value and argument not in ("split", "heldout_by", "texts", "image"):
            if missing := missing_file(name):
                raise FileNotFoundError(missing)
            raise ArgumentError(
                f"{argument}={value!r} is for files, but {name!r} is the name of a data set. "
                f"Leave {argument} out, or name files, such as './{name}/*.csv'."
                f"{folder_hint(name)}"
            )
    if split is None:
        if missing := missing_file(name):
            raise FileNotFoundError(missing)
        raise ArgumentError(
            f"The split of the data set {name!r} is None, expected a name such as 'train'. Give "
            f"load({name!r}, 'train').{folder_hint(name)}"
        )
    with optional(f"The data set {name!r}"):
        return open_data_set(name, split, data_dir)


def prepare(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    client: str | None = None,
    label: str | None = None,
    split: str | None = None,
    columns: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
    delimiter: str | None = None,
    decimal_point: str | None = None,
    image_size: tuple[int, int] | None = None,
    optional_columns: Sequence[str] = (),
    heldout_fraction: float = 0.0,
    heldout_by: str = "example",
    on_bad_row: Literal["error", "skip"] = "error",
    memory: str | None = None,
) -> "Prepared":
    r"""Sort files by client into a folder that `fedpax.data.load` opens without reading it.

    Examples and order are those of `load(files, client=...)`. Files may exceed the memory. The
    folder appears at the end: after an interruption, prepare again.

    Args:
        files: as for `load`.
        out: the folder to write, which must not exist.
        client: as for `load`.
        label: as for `load`; kept in the folder.
        split: as for `load`.
        columns: as for `load`.
        types: as for `load`.
        delimiter: as for `load`.
        decimal_point: as for `load`.
        image_size: as for `load`.
        optional_columns: as for `load`.
        heldout_fraction: as for `load`; prepare each split into its own folder.
        heldout_by: as for `load`.
        on_bad_row: `"error"`, or `"skip"` to leave out and count rows of CSV with another number of
            columns, lines of JSON lines that are not objects, damaged images, and examples without
            a client.
        memory: the memory for sorting, such as `"4GB"`. Default None: half of the machine's.

    Returns:
        The source, and the number of skipped rows by file.

    Raises:
        ValueError: as for `load`; or `out` exists, or a client is missing.
        OSError: the disk has not enough space.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.csv").write_text("user,x\nbo,1\nann,2\nbo,3\n")
        >>> prepared = prepare(folder / "a.csv", folder / "out", client="user")
        >>> prepared.source.client_names, prepared.source.column("x")
        (ClientNames(['ann', 'bo']), array([2, 1, 3]))
    """
    options = LoadOptions.of(locals())
    with optional(f"Reading {files!r}"):
        from fedpax.user_files.preparing import prepare_files

        return prepare_files(files, out, options, on_bad_row=on_bad_row, memory=memory)
