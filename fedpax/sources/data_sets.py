"""Open a data set of TFDS, prepared to array_record, without TensorFlow."""

import contextlib
import difflib
import http.client
import importlib
import io
import logging
import os
import shutil
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError
from fedpax.extras import is_installed
from fedpax.files import lock_file, parse_json, read_json
from fedpax.sources.embedded import is_whole_split, open_in_memory
from fedpax.sources.source import Source, TextRecords, one_line, read_client_starts
from fedpax.user_paths import expand_home

EMBEDDED = {name: "fedpax.sources.embedded_builders" for name in ("stdlib_text", "digits")}
"""The data sets that need no network, with the modules of their TFDS builders."""

FEDERATED = {
    f"federated_{name}": "fedpax.sources.federated_sources"
    for name in ("cifar100", "emnist", "shakespeare", "stackoverflow")
}
"""The data sets with a field `client`, with the modules of their TFDS builders."""


def open_data_set(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Source:
    """Open a split of a data set of TFDS, and prepare the data set first if necessary."""
    # TFDS takes ten times as long to import as these examples take to make.
    if is_whole_split(name, split) and not (data_dir and is_installed("tensorflow_datasets")):
        return open_in_memory(name, split)
    root = data_folder(data_dir)
    builder = _builder(name, root)
    if not builder.data_path.exists():
        _prepare(name, split, root)
        builder = _builder(name, root)  # a new builder reads the new files
    return _open(builder, split)


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of prepared data sets, see `load`."""
    root = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return expand_home(Path(root)).absolute()


def open_records(pattern: str) -> Source:
    """Open array_record files by their path."""
    folder = expand_home(pattern).absolute().parent
    try:
        records = TextRecords(pattern)
    except (FileNotFoundError, ImportError, ValueError):
        raise
    except Exception as error:
        raise OSError(
            f"The files {pattern!r} cannot be read as array_record: write them with "
            f"array_record's ArrayRecordWriter. ({one_line(error)})"
        ) from error
    if not len(records):
        raise ArgumentError(f"The files {pattern!r} have no records: write them again.")
    # The name does not depend on the folder, which may be another one when a run resumes.
    return Source(Path(pattern).name, folder, records)


def folder_hint(name: str) -> str:
    """Return how to name the files of a folder that a data set's name could mean too."""
    first = Path(name).parts[0]
    if not Path(name).is_dir():
        is_path = ":" not in name and not Path(first).exists()
        return f" If it is a path of files: there is no folder {first!r}." if is_path else ""
    return f" For the files of the folder {name}, name them, such as '{name}/{{client}}/*.jpg'."


def missing_file(name: str) -> str:
    """Describe a file that an existing folder lacks; return "" for other names."""
    path = Path(name)
    in_folder = path.parent != Path() and path.parent.is_dir()
    if path.exists() or ":" in name or not (in_folder or ("/" not in name and path.suffix)):
        return ""
    names = sorted(file.name for file in path.parent.iterdir())
    similar = difflib.get_close_matches(path.name, names, n=4)
    known = f"Similar names in {path.parent}: {', '.join(similar)}." if similar else ""
    return f"There is no file {name!r}. {known or 'Check it with ls.'}"


def _builder(name: str, root: Path) -> Any:
    """Make the TFDS builder of a data set, or raise an error that suggests similar names."""
    import tensorflow_datasets as tfds

    check_feature_classes(root / _base_name(name))
    if module := {**EMBEDDED, **FEDERATED}.get(_base_name(name)):
        importlib.import_module(module)  # this registers the builder with TFDS
    try:
        try:
            return tfds.builder(name, data_dir=root)
        except tfds.core.DatasetNotFoundError:
            _import_all_builders()
            return tfds.builder(name, data_dir=root)
    except tfds.core.DatasetNotFoundError:
        known = {*EMBEDDED, *FEDERATED, *tfds.list_builders(with_community_datasets=False)}
        similar = difflib.get_close_matches(_base_name(name), known, n=4)
        raise ArgumentError(
            f"There is no data set {name!r} in TFDS {tfds.__version__} or prepared in {root}. "
            + (f"Similar names: {', '.join(similar)}. " if similar else "")
            + f"Embedded data sets: {', '.join(EMBEDDED)}. Federated data sets: "
            f"{', '.join(FEDERATED)}. TFDS's catalog lists the others.{folder_hint(name)}"
            + (f" {missing}" if (missing := missing_file(name)) else "")
        ) from None
    except Exception as error:  # an unknown configuration or version, or damaged metadata
        folder = root / _base_name(name)
        raise ArgumentError(
            f"TFDS cannot open data set {name!r} in {root}: {one_line(error)}"
            + (f" If {folder} is damaged, delete it and load again." if folder.exists() else "")
        ) from error


def _import_all_builders() -> None:
    """Import TFDS's groups of builders one by one."""
    # TFDS itself stops at the first group that fails, such as for a library (h5py) that it does not
    # require.
    for group in ("question_answering", "summarization", "text", "translate", "video"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"tensorflow_datasets.{group}")


def _prepare(name: str, split: str, root: Path) -> None:
    """Prepare a data set in `root`, unless another process does so at the same time."""
    is_embedded, is_federated = _base_name(name) in EMBEDDED, _base_name(name) in FEDERATED
    builder = _builder(name, root)
    urls = builder.urls() if is_federated else [*(builder.url_infos or ())]
    if not is_embedded and (hosts := unreachable_hosts(urls)):
        manual = ""
        if is_federated:
            folder = builder.manual_path.parent
            manual = f"Put {urls[0]} into {folder} and load again, or prepare it elsewhere. "
        raise ConnectionError(
            f"Data set {name!r} is not prepared in {root} and cannot be downloaded, because "
            f"{' and '.join(hosts)} cannot be reached. "
            f"{manual}{_how_to_copy(builder, split, root)}"
        )
    try:
        folder = builder.data_path.parent
        with _lock(folder.joinpath(f".{builder.data_path.name}.lock"), name) as locked:
            builder = _builder(name, root)
            if builder.data_path.exists():
                return
            if (is_embedded or is_federated) and locked:  # remains of killed preparations
                for remains in folder.glob(f"incomplete.*_{builder.data_path.name}"):
                    shutil.rmtree(remains, ignore_errors=True)
            with _quiet() if is_embedded else contextlib.nullcontext():
                builder.download_and_prepare(file_format="array_record")
    except Exception as error:
        if builder.data_path.exists():
            return  # another machine prepared it, on a file system without locks across machines
        raise RuntimeError(
            f"Data set {name!r} could not be prepared in {root}: {one_line(error)} "
            + (
                "Make that folder writable or pass another data_dir."
                if is_embedded or isinstance(error, PermissionError)
                else f"Otherwise prepare it elsewhere. {_how_to_copy(builder, split, root)}"
            )
        ) from error


def _open(builder: Any, split: str) -> Source:
    folder = Path(builder.data_path)
    name = builder.info.full_name
    try:
        examples = builder.info.splits[split].num_examples
        records = builder.as_data_source(split=split) if examples else ()
    except NotImplementedError as error:
        raise OSError(
            f"{folder} was prepared as {builder.info.file_format.value}, which only TensorFlow "
            "can read: pass another data_dir, or delete that folder and load again."
        ) from error
    except Exception as error:
        raise ArgumentError(
            f"Split {split!r} of {name} cannot be opened: {one_line(error)} Its splits are "
            f"{', '.join(builder.info.splits) or 'none: delete ' + str(folder)}. A part of a split "
            "is written as 'train[:10%]'."
        ) from error
    if not examples:
        raise ArgumentError(
            f"Split {split!r} of {name} has no examples: load another split, or a larger part of "
            "it."
        )
    parts = _parts(builder, split)
    return Source(f"{name}:{split}", folder, records, read_client_starts(folder, parts))


def _parts(builder: Any, split: str) -> list[tuple[str, int, int]]:
    """Return the split, the first example and the end of each part, as of `"train[:10%]+test"`."""
    import tensorflow_datasets as tfds

    splits = builder.info.splits
    parts = tfds.core.ReadInstruction.from_spec(split).to_absolute(splits)
    return [
        (part.splitname, part.from_ or 0, part.to or splits[part.splitname].num_examples)
        for part in parts
    ]


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[bool]:
    """Hold a lock between processes, which the system releases if the process is killed."""
    # Yields False if the system or file system has no locks. Then only TFDS's renaming of finished
    # folders protects data sets.
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        is_held = lock_file(file)
        if is_held is False:
            logging.getLogger(__name__).warning("Waiting for another process to prepare %s.", name)
            is_held = lock_file(file, wait=True)
        yield bool(is_held)


# stdout and the progress bars belong to all threads.
_QUIET = threading.Lock()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence TFDS's output and progress bars, for preparations that take about a second."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils import tqdm_utils

    with _QUIET:
        shown = tqdm_utils._active
        tfds.disable_progress_bar()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            tfds.display_progress_bar(shown)


def _how_to_copy(builder: Any, split: str, root: Path) -> str:
    """Return instructions to prepare a data set on another machine and copy it to this one."""
    name = "/".join(builder.info.full_name.split("/")[:-1])
    command = f"import fedpax.data; fedpax.data.load('{name}', '{split}', data_dir='prepared')"
    return (
        f'On a machine with a network run\n    python -c "{command}"\n'
        f"and copy its folder prepared/{builder.name} to {root / builder.name} on this machine, "
        "or pass the parent folder of the copy as data_dir."
    )


def _base_name(name: str) -> str:
    """Strip configuration and version: "mnist:3.0.1" gives "mnist", "c4/en" gives "c4"."""
    return name.partition("/")[0].partition(":")[0]


# The classes that the metadata of a prepared data set name: TFDS imports their modules.
FEATURES_FILE = "features.json"
_NAMES = ("type", "pythonClassName", "python_class_name")


def check_feature_classes(folder: Path) -> None:
    """Check that opening a prepared data set imports no module that its files name."""
    for pattern in (FEATURES_FILE, f"*/{FEATURES_FILE}", f"*/*/{FEATURES_FILE}"):
        for path in sorted(folder.glob(pattern)):
            for name in _class_names(read_json(path)):
                module = name.rpartition(".")[0]
                if module.partition(".")[0] == "tensorflow_datasets" or module in sys.modules:
                    continue
                raise ArgumentError(
                    f"{path} names the class {name}, expected classes of tensorflow_datasets, "
                    f"because TFDS would run the code of {module}. If you trust this code, import "
                    f"{module} before, in the file of your experiment."
                )


def _class_names(value: Any) -> Iterator[str]:
    """Yield the names of classes, with a dot, in the JSON of features; it can hold JSON as text."""
    if isinstance(value, list):
        for item in value:
            yield from _class_names(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _NAMES and isinstance(item, str) and "." in item:
                yield item
            elif key == "json" and isinstance(item, str):
                yield from _class_names(parse_json(item))
            else:
                yield from _class_names(item)


# A quick check whether hosts can be reached: a download without a network blocks for minutes.
def unreachable_hosts(urls: Iterable[str], *, timeout: float = 8.0) -> list[str]:
    """Return the hosts of some URLs if none of them answers within `timeout` seconds."""
    # HEAD requests to at most three hosts, through the proxies of the environment. An HTTP error
    # counts as an answer.
    parts = (urllib.parse.urlsplit(url) for url in urls)
    addresses = sorted({f"{p.scheme}://{p.netloc}/" for p in parts if p.scheme.startswith("http")})
    answered: list[str] = []

    def send_request(address: str) -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            # urlopen would use the proxies that were set when it was first called.
            urllib.request.build_opener().open(request, timeout=timeout).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass
        except OSError:
            return
        answered.append(address)

    # Threads, because the time that a name lookup takes cannot be limited.
    checked = addresses[:3]
    threads = [threading.Thread(target=send_request, args=(a,), daemon=True) for a in checked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout / len(threads))
    return [] if answered else [urllib.parse.urlsplit(a).hostname or a for a in checked]
