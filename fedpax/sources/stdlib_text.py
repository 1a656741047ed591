"""The Python standard library's source files: text that every machine has.

Each example is one source file: its `text`, its `path` in the library, and its `client`, the
top-level module or package. These files are excluded:

- installed packages (site-packages, dist-packages, sitecustomize.py);
- the library's tests (folders test, tests and idle_test): they are larger than the library itself,
  and many distributions of Python do not install them;
- files that describe the build machine (_sysconfigdata_*.py, the folder config-*);
- empty files, and files that are not UTF-8.

The split `heldout` has about one file in ten and `train` the rest. The SHA-256 of a file's path
decides, so a file is in the same split on every machine and in every version of Python. Held-out
text comes both from clients in `train` and from unseen clients.

The configuration is the version of the running Python: `stdlib_text/cpython-3.11.7/1.0.0`. Some
distributions package parts of the library separately (tkinter, idlelib) and have less text for the
same version, so compare results of two machines only if their data are equal.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

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
            if text and _is_utf8(text):
                yield path.relative_to(root).as_posix(), text


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


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
