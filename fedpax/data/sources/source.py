"""Sources by name: any TFDS data set, prepared to array_record and read without TensorFlow.

Two data sets are embedded, that is, prepared from what every machine has: ``stdlib_text`` and
``digits``. The federated standards (EMNIST, Shakespeare, Stack Overflow, CIFAR-100) are prepared
from TensorFlow Federated's archives, and all others are TFDS's own. They take the same path;
preparing them needs a network once, or for the federated ones a copy of the archive.
"""

import contextlib
import difflib
import importlib
import io
import logging
import operator
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpax.data.sources._reachability import unreachable

EMBEDDED = {
    "stdlib_text": "fedpax.data.sources.stdlib_text",
    "digits": "fedpax.data.sources.digits",
}
"""The data sets that need no network, and the modules of their TFDS builders."""

FEDERATED = {
    f"federated_{name}": "fedpax.data.sources.federated_sources"
    for name in ("cifar100", "emnist", "shakespeare", "stackoverflow")
}
"""The data sets that come with their clients, and the modules of their TFDS builders."""


class Source(Sequence[dict[str, Any]]):
    """The examples of a split, read one by one from a prepared data set.

    Attributes:
        name: data set, configuration, version and split, such as
            ``"stdlib_text/cpython-3.11.7/1.0.0:train"``.
        folder: where the data set was prepared.
    """

    def __init__(self, name: str, folder: Path, records: Any) -> None:
        self.name = name
        self.folder = folder
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        """Returns an example: NumPy values by field, texts as bytes."""
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.name} has {len(self)} examples, and none at {number}.")
        return self._read(self._records.__getitem__, number % len(self))

    def column(self, field: str) -> Iterator[Any]:
        """Yields a field of every example, in order, such as whose it is.

        Much cheaper than the examples where few values are shared by many: nothing else of an
        example is decoded, and each value once.

        Args:
            field: the name of the field.

        Yields:
            The field's values, as the examples have them; equal ones may be one object.

        Raises:
            KeyError: if the examples have no such field.
            OSError: if the prepared files cannot be read.

        Example:
            >>> source = load("stdlib_text", "heldout")
            >>> list(source.column("client")) == [example["client"] for example in source]
            True
        """
        from tensorflow_datasets.proto import tf_example_pb2

        def stored(number: int) -> Any:
            record = self._records.data_source[number]
            return tf_example_pb2.Example.FromString(record).features.feature

        decoded: dict[bytes, Any] = {}
        for number in range(len(self)):
            features = self._read(stored, number)
            if field not in features:  # a field of several features, or none at all
                yield self[number][field]
                continue
            value = features[field].SerializeToString()
            if value not in decoded:
                decoded[value] = self[number][field]
            yield decoded[value]

    def _read(self, read: Callable[[int], Any], number: int) -> Any:
        try:
            return read(number)
        except Exception as error:  # array_record and protobuf each have their own
            raise OSError(
                f"Example {number} of {self.name} cannot be read, so the files in {self.folder} "
                f"are damaged: delete that folder and load again. ({_sentence(error)})"
            ) from error

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {len(self)} examples, {str(self.folder)!r})"


def load(name: str, split: str, *, data_dir: str | os.PathLike[str] | None = None) -> Source:
    """Opens a split of a data set, after preparing the data set where that was not done yet.

    Preparing happens in a folder of its own that is renamed when it is whole, so that an
    interrupted preparation leaves nothing that would be read; of several processes that need the
    same data set, one prepares it and the others wait. TensorFlow is not imported.

    Args:
        name: ``"stdlib_text"``, ``"digits"``, a federated one (``"federated_cifar100"``,
            ``"federated_emnist"`` or its digits alone, ``"federated_emnist/digits"``,
            ``"federated_shakespeare"``, ``"federated_stackoverflow"``), or any name that TFDS
            takes, as ``"mnist"`` or ``"wikipedia/20230601.en"``.
        split: a split's name or a part of it in TFDS's notation, as ``"train[:90%]"``.
        data_dir: the folder of prepared data sets; by default that of the environment variable
            ``TFDS_DATA_DIR``, or else ``~/tensorflow_datasets``.

    Returns:
        The split's examples.

    Raises:
        ValueError: for a name or split that does not exist, or a split without examples.
        ConnectionError: if the data set must be downloaded and there is no network.
        RuntimeError: if preparing fails otherwise.
        OSError: if the prepared files cannot be read.

    Example:
        >>> source = load("stdlib_text", "heldout")
        >>> sorted(source[0])
        ['client', 'path', 'text']
    """
    root = Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    root = root.expanduser().absolute()
    builder = _builder(name, root)
    if not builder.data_path.exists():
        _prepare(name, split, root)
        builder = _builder(name, root)  # a new one, which reads what was written
    return _open(builder, split)


def _builder(name: str, root: Path) -> Any:
    """Makes the TFDS builder of a name, or says which names are near."""
    import tensorflow_datasets as tfds

    if module := {**EMBEDDED, **FEDERATED}.get(_data_set(name)):
        importlib.import_module(module)  # which registers it with TFDS
    try:
        try:
            return tfds.builder(name, data_dir=root)
        except tfds.core.DatasetNotFoundError:
            _import_all_builders()
            return tfds.builder(name, data_dir=root)
    except tfds.core.DatasetNotFoundError:
        known = {*EMBEDDED, *FEDERATED, *tfds.list_builders(with_community_datasets=False)}
        near = difflib.get_close_matches(_data_set(name), known, n=4)
        raise ValueError(
            f"There is no data set {name!r} in TFDS {tfds.__version__} nor prepared in {root}. "
            + (f"Near names: {', '.join(near)}. " if near else "")
            + f"Embedded are {' and '.join(EMBEDDED)}, federated {', '.join(FEDERATED)}; TFDS's "
            "catalog lists the others."
        ) from None
    except Exception as error:  # a wrong configuration or version, or damaged metadata
        folder = root / _data_set(name)
        raise ValueError(
            f"TFDS cannot open data set {name!r} in {root}: {_sentence(error)}"
            + (f" If {folder} is damaged, delete it and load again." if folder.exists() else "")
        ) from error


def _import_all_builders() -> None:
    """Imports TFDS's groups of builders one by one: it gives up itself at the first that fails.

    Some groups need a library (h5py) that TFDS does not require, and those after them (text
    among them, so C4 and Wikipedia) would be missing.
    """
    for group in ("question_answering", "summarization", "text", "translate", "video"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"tensorflow_datasets.{group}")


def _prepare(name: str, split: str, root: Path) -> None:
    """Prepares a data set in ``root``, unless another process does so meanwhile."""
    embedded, federated = _data_set(name) in EMBEDDED, _data_set(name) in FEDERATED
    builder = _builder(name, root)
    urls = builder.urls() if federated else [*(builder.url_infos or ())]
    if not embedded and (hosts := unreachable(urls)):
        by_hand = ""
        if federated:
            folder = builder.manual_path.parent
            by_hand = f"Put {urls[0]} into {folder} and load again, or prepare it elsewhere. "
        raise ConnectionError(
            f"Data set {name!r} is not prepared in {root} and cannot be downloaded, as "
            f"{' and '.join(hosts)} cannot be reached from here. "
            f"{by_hand}{_elsewhere(builder, split, root)}"
        )
    try:
        folder = builder.data_path.parent
        with _lock(folder.joinpath(f".{builder.data_path.name}.lock"), name) as alone:
            builder = _builder(name, root)
            if builder.data_path.exists():
                return
            if (embedded or federated) and alone:  # so these were left by preparations that died
                for left in folder.glob(f"incomplete.*_{builder.data_path.name}"):
                    shutil.rmtree(left, ignore_errors=True)
            with _quiet() if embedded else contextlib.nullcontext():
                builder.download_and_prepare(file_format="array_record")
    except Exception as error:
        if builder.data_path.exists():
            return  # another machine was faster, where locks do not reach across machines
        raise RuntimeError(
            f"Data set {name!r} could not be prepared in {root}: {_sentence(error)} "
            + (
                "Make that folder writable or give another data_dir."
                if embedded or isinstance(error, PermissionError)
                else f"Otherwise prepare it elsewhere. {_elsewhere(builder, split, root)}"
            )
        ) from error


def _open(builder: Any, split: str) -> Source:
    """Opens a split of a prepared data set."""
    folder = Path(builder.data_path)
    name = builder.info.full_name
    try:
        examples = builder.info.splits[split].num_examples
        records = builder.as_data_source(split=split) if examples else ()
    except NotImplementedError as error:
        raise OSError(
            f"{folder} was prepared as {builder.info.file_format.value}, which only TensorFlow "
            "reads: give another data_dir, or delete that folder and load again."
        ) from error
    except Exception as error:
        raise ValueError(
            f"Split {split!r} of {name} cannot be opened: {_sentence(error)} Its splits are "
            f"{', '.join(builder.info.splits) or 'none: delete ' + str(folder)}; a part of one is "
            "written as 'train[:10%]'."
        ) from error
    if not examples:
        raise ValueError(
            f"Split {split!r} of {name} has no examples: take another split, or a larger part of "
            "one."
        )
    return Source(f"{name}:{split}", folder, records)


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[bool]:
    """Holds a lock between processes, which ends with the process at the latest.

    Yields whether there is a lock: where there are none, TFDS's renaming alone keeps data sets
    whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield False
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).warning("Waiting for another process to prepare %s.", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield False
            return
        yield True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TFDS from printing and from drawing progress bars, for what takes a second."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils import tqdm_utils

    shown = tqdm_utils._active
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(shown)


def _elsewhere(builder: Any, split: str, root: Path) -> str:
    """Says how to prepare a data set where there is a network."""
    name = "/".join(builder.info.full_name.split("/")[:-1])
    command = f"import fedpax.data; fedpax.data.load('{name}', '{split}', data_dir='prepared')"
    return (
        f'On a machine with a network run\n    python -c "{command}"\n'
        f"and copy its folder prepared/{builder.name} to {root / builder.name} here, or give the "
        "folder that holds it as data_dir."
    )


def _data_set(name: str) -> str:
    """The data set's own part of a name: "mnist" of "mnist:3.0.1", "c4" of "c4/en"."""
    return name.partition("/")[0].partition(":")[0]


def _sentence(error: BaseException) -> str:
    """What an error says, on one line and not too long."""
    error = error.__cause__ or error  # TFDS puts the arguments of its calls around the message
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')[:500]}."
