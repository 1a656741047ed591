"""find_files: the files that a pattern names, and the values of its {client} and {label}."""

import contextlib
import fnmatch
import glob
import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from fedpax.errors import ArgumentError
from fedpax.files import check_fetched
from fedpax.user_paths import existing_head, expand_home, find_paths

PLACEHOLDER = re.compile(r"\{(client|label|split)\}")
CLIENT = "client"
"""The column that names a client after its file, or after a part of its path."""

COMPRESSIONS = (".gz", ".zst", ".bz2")


class DataFile(NamedTuple):
    """One file of a data set."""

    path: str  # its path, or its URL in a bucket
    # the values of the path's placeholders, such as `{"client": "Århus"}`, and of its folders
    fields: dict[str, str | None]
    # the file is a part of a data set that is saved as a folder, so it is not a client
    is_shard: bool = False

    @property
    def name(self) -> str:
        """The file's name without its suffixes: `"a/Århus.csv.gz"` has the name `"Århus"`."""
        path = PurePosixPath(self.path.replace("\\", "/"))
        if path.suffix in COMPRESSIONS:
            path = path.with_suffix("")
        return path.stem

    @property
    def suffix(self) -> str:
        """The suffix of the format, in lower case and without a compression's suffix."""
        path = PurePosixPath(self.path.replace("\\", "/").lower())
        return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix

    @property
    def is_compressed(self) -> bool:
        """Whether `open` decompresses the file."""
        return self.path.lower().endswith(COMPRESSIONS)

    def with_folder_values(self, start: int, stated: Sequence[str]) -> "DataFile":
        """Add the values of folders such as `day=2026-01-01`, Hive's names of a table's parts."""
        folders = PurePosixPath(self.path.replace("\\", "/")).parts[start:-1]
        values = {}
        for folder in folders:
            name, equals, text = folder.partition("=")
            value = None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text)
            if name and equals and not any(fnmatch.fnmatchcase(folder, part) for part in stated):
                values[unquote(name)] = value
        return self._replace(fields=values | self.fields)

    def open(self) -> Any:
        """Open the file for reading bytes, decompressed, as a `pyarrow.NativeFile`."""
        import pyarrow

        if not is_url(self.path):
            return pyarrow.input_stream(self.path, compression=self._compression())
        opened, compression = self.open_seekable(), self._compression()
        return pyarrow.CompressedInputStream(opened, compression) if compression else opened

    def open_seekable(self) -> Any:
        """Open the file for reading bytes at any position; it is not decompressed."""
        import pyarrow

        if not is_url(self.path):
            return pyarrow.OSFile(self.path)
        import fsspec

        return pyarrow.PythonFile(fsspec.open(self.path).open(), mode="r")

    def _compression(self) -> str | None:
        suffix = PurePosixPath(self.path.lower()).suffix
        return {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}.get(suffix)


def is_url(path: str) -> bool:
    """Return whether a path is in a bucket, such as `"gs://bucket/data.csv"`."""
    return re.match(r"[a-z][a-z0-9+.-]+://", path, re.IGNORECASE) is not None


@contextlib.contextmanager
def _bucket_errors(url: str) -> Iterator[None]:
    """Name the URL in errors of a bucket's package, which has types of its own."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:
        raise OSError(
            f"{url} cannot be read: {error}. Check the name, the network and the credentials of "
            "the bucket."
        ) from error


def find_files(patterns: Sequence[str], split: str | None) -> list[DataFile]:
    """Return the files that patterns match, each once, in the order of their paths."""
    data_files: dict[str, DataFile] = {}
    for pattern in patterns:
        matches = [file for file in _find(pattern, split) if is_url(file.path) or _is_file(file)]
        if not matches:
            if unknown := re.findall(r"\{\w*\}", PLACEHOLDER.sub("", pattern)):
                raise FileNotFoundError(
                    f"No file matches {pattern!r}: {unknown[0]} is no placeholder and no name in "
                    "the folder. Write *, or {client}, {label} or {split}, in its place, such as "
                    f"{pattern.replace(unknown[0], '*')!r}."
                )
            if missing := _missing_part(pattern):
                raise FileNotFoundError(
                    f"No file matches {pattern!r}: there is no {missing}. Check it with ls."
                )
            of_any = _find(pattern, split, any_split=True) if "{split}" in pattern else []
            if names := sorted({str(file.fields["split"]) for file in of_any}):
                raise FileNotFoundError(
                    f"No file of {pattern!r} is of the split {split!r}, expected one of "
                    f"{', '.join(map(repr, names))}, the names in the place of {{split}}. Rename "
                    "one, or set split=, --split or --data.heldout_split to one of them."
                )
            raise FileNotFoundError(
                f"No file matches {pattern!r}. Quote a pattern on the command line, and check it "
                "with ls; {client}, {label} and {split} each stand for a part of the path."
            )
        data_files |= {absolute(file.path): file for file in matches}
    parts = zip(*map(_known_parts, patterns), strict=False)
    start = len([*itertools.takewhile(lambda same: len({*same}) == 1, parts)])
    folders = (part for pattern in patterns for part in pattern.split("/") if "=" in part)
    stated = [PLACEHOLDER.sub("*", part) for part in folders if PLACEHOLDER.search(part)]
    files = [file.with_folder_values(start, stated) for file in data_files.values()]
    return sorted(files, key=lambda file: file.path)


def _known_parts(pattern: str) -> tuple[str, ...]:
    """Return the first parts of a pattern, which are parts of all its paths."""
    head = re.split(r"[*?{\[]", pattern)[0].rpartition("/")[0]
    return PurePosixPath(head if is_url(pattern) else existing_head(pattern)[0]).parts


def _missing_part(pattern: str) -> str:
    """Describe the first part of a path that does not exist; "" if it stands for other names."""
    if is_url(pattern):
        return ""
    head, tail = existing_head(pattern)
    first, slash, _ = tail.partition("/")
    is_pattern = glob.has_magic(first) or PLACEHOLDER.search(first)
    return "" if is_pattern else f"{'folder' if slash else 'file or folder'} {Path(head) / first}"


def absolute(path: str) -> str:
    """Return the full path of a file; a URL is one."""
    return path if is_url(path) else os.path.abspath(path)


def _is_file(file: DataFile) -> bool:
    path = Path(file.path)
    if path.is_dir():
        return False
    check_fetched(path)
    return True


def _find(pattern: str, split: str | None, any_split: bool = False) -> list[DataFile]:
    """Return what a pattern matches, folders included."""
    if not is_url(pattern) and Path(expand_home(pattern)).exists():
        return [DataFile(str(expand_home(pattern)), {})]
    head, tail = ("", pattern) if is_url(pattern) else existing_head(pattern)
    if "{split}" in tail and not any_split:
        if split is None:
            raise ArgumentError(
                f"The path {pattern!r} has {{split}}, but split is None, expected a split's name. "
                'Give one, such as split="train".'
            )
        tail = tail.replace("{split}", glob.escape(split))
    plain = head + PLACEHOLDER.sub("*", tail)
    if "**" in tail.split("/") and PLACEHOLDER.search(tail.partition("**")[0]):
        raise ArgumentError(
            f"The path {pattern!r} has ** behind a name in braces, which could then be any folder, "
            "expected ** before it. Write the folders as *."
        )
    if is_url(pattern):
        import fsspec

        with _bucket_errors(pattern):
            system, path = fsspec.core.url_to_fs(plain)
            paths = [system.unstrip_protocol(match) for match in system.glob(path)]
    else:
        paths = [str(path) for path in find_paths(plain)]
    if not PLACEHOLDER.search(tail):
        return [DataFile(path, {}) for path in paths]
    parts = [_PatternPart(part) for part in tail.split("/") if part]
    files = []
    for path in paths:
        # From the end: a URL's scheme and a relative path's folder are not in the pattern.
        own = [part for part in re.split(r"[/\\]", path) if part][-len(parts) :]
        fields: dict[str, str | None] = {}
        if all(
            part.match(text, fields) for part, text in zip(parts[-len(own) :], own, strict=True)
        ):
            files.append(DataFile(path, fields))
    return files


class _PatternPart:
    """A part of a pattern with placeholders, between two slashes."""

    def __init__(self, text: str) -> None:
        pieces = PLACEHOLDER.split(text)  # text, name, text, name, ..., text
        self._names = set(pieces[1::2])
        expression = ""
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                expression += fnmatch.translate(piece)[4:-3]  # without "(?s:" and ")\Z"
            elif piece in pieces[1:number:2]:
                expression += f"(?P={piece})"
            else:
                expression += f"(?P<{piece}>.+?)"
        self._expression = re.compile(expression, re.DOTALL)

    def match(self, text: str, fields: dict[str, str | None]) -> bool:
        """Match a part of a path, and add its placeholders to `fields`; they must agree."""
        if not self._names:
            return True  # glob has matched it
        match = self._expression.fullmatch(text)
        if match is None or any(fields.get(k, v) != v for k, v in match.groupdict().items()):
            return False
        fields |= match.groupdict()
        return True


_SHARD = re.compile(r"((?:.*\D)?)(\d{5})(-of-(\d{5}))(?!\d)(.*)", re.DOTALL)


def is_numbered(name: str) -> bool:
    """Return whether a file has the name of a shard, such as `train-00000-of-00003`."""
    return _SHARD.fullmatch(name) is not None


def check_shards(files: Sequence[DataFile], patterns: Sequence[str]) -> None:
    """Raise for missing shards that no pattern leaves out, or log those of a list."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.path):
            found.setdefault((match[1], match[3], match[5]), set()).add(int(match[2]))
    for (start, of, end), numbers in found.items():
        total = int(of[-5:])
        missing = sorted({*range(total)} - numbers)
        if not missing or (patterns and all(map(_chooses, patterns))):
            continue
        name = f"{start}{missing[0]:05d}{of}{end}"
        told = f"{name} is missing: {len(numbers)} of {total} shards are there"
        if patterns and not any(re.search(r"[*?{]", pattern) for pattern in patterns):
            if len(patterns) > 1:
                logging.getLogger(__name__).warning("%s.", told)
            continue
        raise ArgumentError(
            f"{told}, expected all. Fetch it, or name the numbers to read, such as "
            f"'{start}{min(numbers):05d}*'."
        )


def _chooses(pattern: str) -> bool:
    """Return whether a pattern states numbers of shards, such as data-0001*-of-00100.csv."""
    name = re.split(r"[/\\]", pattern)[-1]
    return re.search(r"\d[*?]|\[", name) is not None
