"""The Python standard library's own sources as a TFDS data set: text that every machine has.

Each example is one source file: its ``text``, its ``path`` within the library, and its
``client``, the top-level module or package that it belongs to. Left out are

- what was installed beside the library (site-packages, dist-packages, sitecustomize.py);
- the library's tests (folders test, tests and idle_test): there is more of them than of the
  library, and many distributions of Python do not install them, so machines would differ more;
- what the build wrote about the machine (_sysconfigdata_*.py, the folder config-*);
- files that are empty, or no UTF-8.

About one file in ten is in the split ``heldout``, the others in ``train``. The SHA-256 of a
file's path decides, so a file is on the same side on every machine and in every version of
Python, and held-out text comes from clients that were trained on as well as from unseen ones.

The configuration is named after the running Python, as its sources are the data:
``stdlib_text/cpython-3.11.7/1.0.0``. Distributions that split packages off (tkinter, idlelib)
give less for the same name, so figures of two machines compare only if their data do.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

_LEFT_OUT_FOLDERS = (
    "__pycache__",
    "dist-packages",
    "idle_test",
    "lib-dynload",
    "site-packages",
    "test",
    "tests",
)
_LEFT_OUT_FILES = ("_sysconfigdata_", "sitecustomize.py", "usercustomize.py")


def source_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (path relative to ``root``, contents) of the library's files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [  # os.walk enters those that stay in its list, in the list's order
            name
            for name in sorted(folders)
            if name not in _LEFT_OUT_FOLDERS and not name.startswith("config-")
        ]
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith(_LEFT_OUT_FILES):
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
    """Whether a file, by its path within the library, is in the split ``heldout``."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 10 == 0


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """The Python standard library's own sources, a file an example."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012, the name and type are TFDS's
        tfds.core.BuilderConfig(name=f"{sys.implementation.name}-{platform.python_version()}")
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="The Python standard library's own sources, without its tests.",
            features=tfds.features.FeaturesDict(
                {
                    "client": tfds.features.Text(doc="top-level module or package"),
                    "path": tfds.features.Text(doc="relative to the library's folder"),
                    "text": tfds.features.Text(doc="the file's contents, UTF-8"),
                }
            ),
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[str, dict[str, str | bytes]]]]:
        del dl_manager  # there is nothing to download
        return {"train": self._generate_examples(False), "heldout": self._generate_examples(True)}

    def _generate_examples(self, heldout: bool) -> Iterator[tuple[str, dict[str, str | bytes]]]:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in source_files(root) if is_heldout(file[0]) == heldout]
        if not files:
            raise FileNotFoundError(
                f"{root} holds no Python sources of the standard library, as when Python was "
                "installed in one archive or without sources: use another Python, or another "
                "data set."
            )
        for path, text in files:
            client = path.partition("/")[0].removesuffix(".py")
            yield path, {"client": client, "path": path, "text": text}
