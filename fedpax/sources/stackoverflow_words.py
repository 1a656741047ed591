"""The words of Stack Overflow by frequency, as TensorFlow Federated publishes them."""

import itertools
import os
import tarfile
from pathlib import Path

import tensorflow_datasets as tfds

from fedpax.errors import ArgumentError
from fedpax.sources.data_sets import data_folder, unreachable_hosts
from fedpax.sources.federated_archive import ARCHIVES_URL, Archive, check

ARCHIVE = Archive(
    f"{ARCHIVES_URL}/stackoverflow.word_count.tar.bz2",
    sha256="1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
)
_MEMBER = "stackoverflow.word_count"


def stackoverflow_words(
    count: int, *, data_dir: str | os.PathLike[str] | None = None
) -> list[bytes]:
    """Return the most frequent words in the training split of Stack Overflow, in their order."""
    # The frequency of a word is the number of users who have used it. The archive is downloaded
    # once. On a machine without a network, put it into `<data_dir>/downloads/manual`. Address,
    # SHA-256 and format, a word and its count per line: TensorFlow Federated,
    # tensorflow_federated/python/simulation/datasets/stackoverflow.py, `load_word_counts`.
    if count < 1:
        raise ArgumentError(f"count is {count}, expected at least 1.")
    path = _find(data_folder(data_dir))
    try:
        check(path, ARCHIVE)
        with tarfile.open(path) as archive:
            lines = archive.extractfile(_MEMBER) or ()  # (): a folder
            words = [line.split()[0] for line in itertools.islice(lines, count)]
    except PermissionError:
        raise
    except (OSError, EOFError, KeyError, IndexError, tarfile.TarError) as error:
        raise OSError(
            f"{path} {error}: replace it with a new copy of {ARCHIVE.url}, or delete it and load "
            "again."
        ) from None
    if len(words) < count:
        raise ArgumentError(f"{path} has {len(words)} words, expected {count}: ask for fewer.")
    return words


def _find(root: Path) -> Path:
    """Return the archive's path, after a download if necessary."""
    manual = root / "downloads" / "manual" / ARCHIVE.filename
    if manual.exists():
        return manual
    downloads = tfds.download.DownloadManager(download_dir=root / "downloads")
    if unreachable_hosts([ARCHIVE.url]):
        raise ConnectionError(
            f"The words of Stack Overflow are not in {root} and cannot be downloaded, because "
            f"their host cannot be reached. Put {ARCHIVE.url} into {manual.parent} and load again."
        )
    return Path(downloads.download(ARCHIVE.url))
