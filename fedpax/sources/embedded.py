"""The embedded data sets: scikit-learn's digits and the Python standard library's sources.

The SHA-256 of an image's index or a file's path decides its split, equal on every machine; the
texts depend on the version of Python, `cpython-3.11.7`.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.files import is_utf8
from fedpax.sources.source import Source

# Tests are larger than the library, and many distributions do not install them. The other ones are
# installed packages, and files that describe the build machine.
_EXCLUDED_FOLDERS = (
    "__pycache__",
    "dist-packages",
    "idle_test",
    "lib-dynload",
    "site-packages",
    "test",
    "tests",
)
_EXCLUDED_FILES = ("_sysconfigdata_", "sitecustomize.py", "usercustomize.py")


def source_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the library's files as pairs of a path relative to `root` and the contents."""
    for folder, folders, files in os.walk(root):
        folders[:] = [  # os.walk enters the folders that stay in this list, in its order
            name
            for name in sorted(folders)
            if name not in _EXCLUDED_FOLDERS and not name.startswith("config-")
        ]
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith(_EXCLUDED_FILES):
                continue
            path = Path(folder, name)
            text = path.read_bytes()
            if text and is_utf8(text):
                yield path.relative_to(root).as_posix(), text


def is_heldout(path: str) -> bool:
    """Return whether a file, by its path in the library, is in the split `heldout`."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 10 == 0


def text_examples(split: str) -> Iterator[tuple[str, dict[str, str | bytes]]]:
    """Yield the examples of the split `train` or `heldout`, each with its key in TFDS."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in source_files(root) if is_heldout(file[0]) == (split == "heldout")]
    if not files:
        raise FileNotFoundError(
            f"{root} has no Python sources of the standard library, perhaps because Python was "
            "installed as an archive or without sources: use another Python, or another "
            "data set."
        )
    for path, text in files:
        client = path.partition("/")[0].removesuffix(".py")
        yield path, {"client": client, "path": path, "text": text}


def configuration() -> str:
    """Return the name of the running Python's configuration."""
    return f"{sys.implementation.name}-{platform.python_version()}"


def is_test(index: int) -> bool:
    """Return whether an image, by its index in scikit-learn's order, is in the split `test`."""
    return int.from_bytes(hashlib.sha256(b"%d" % index).digest()[:8], "big") % 5 == 0


def digit_examples(split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the examples of the split `train` or `test`, each with its key in TFDS."""
    # Alpaydin, Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0. Pixels `[8, 8, images]`
    # from 0 to 16 are sorted by label, to compress well.
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        labels = digits["labels"]
        images = np.empty((len(labels), 8, 8, 1), np.uint8)
        images[np.argsort(labels, kind="stable"), ..., 0] = np.moveaxis(
            np.rint(digits["pixels"] * (255 / 16)), -1, 0
        )
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        if is_test(index) == (split == "test"):
            yield index, {"image": image, "label": int(label)}


_SPLITS: dict[str, tuple[str, tuple[str, str], Callable[[str], Iterator[Any]]]] = {
    "digits": ("digits/1.0.0", ("train", "test"), digit_examples),
    "stdlib_text": (f"stdlib_text/{configuration()}/1.0.0", ("train", "heldout"), text_examples),
}


def is_whole_split(name: str, split: str) -> bool:
    """Return whether `open_in_memory` can open a split; TFDS can open parts of them too."""
    return name in _SPLITS and split in _SPLITS[name][1]


def open_in_memory(name: str, split: str) -> Source:
    """Open a split of an embedded data set."""
    full_name, _, examples = _SPLITS[name]
    hashed = hashlib.md5(split.encode(), usedforsecurity=False)

    def order(item: tuple[Any, Any]) -> bytes:  # as in TFDS's `core/hashing.py`
        of_item = hashed.copy()
        of_item.update(str(item[0]).encode())
        return of_item.digest()

    records = [_as_tfds(example) for _, example in sorted(examples(split), key=order)]
    return Source(f"{full_name}:{split}", Path(__file__).parent, records)


def _as_tfds(example: dict[str, Any]) -> dict[str, Any]:
    """Return an example as TFDS gives it: texts are bytes."""
    return {k: v.encode() if isinstance(v, str) else v for k, v in example.items()}
