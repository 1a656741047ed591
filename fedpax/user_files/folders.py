"""find_in_folder: the files of a data set that is saved as a folder, by its layout."""

import re
from collections.abc import Sequence
from pathlib import Path

from fedpax.errors import ArgumentError
from fedpax.files import check_fetched, read_json
from fedpax.user_files.finding import PLACEHOLDER, DataFile, is_url
from fedpax.user_files.formats import FIRST_SUFFIXES, FORMATS
from fedpax.user_paths import expand_home

PREPARED = "prepared.json"  # of `fedpax.data.prepare`
STATE, SPLITS = "state.json", "dataset_dict.json"  # of Hugging Face's save_to_disk
_SUFFIXES = [  # the first that a folder has is read
    FIRST_SUFFIXES[form]
    for form in sorted(FIRST_SUFFIXES, key=lambda form: form.in_folder)
    if form.in_folder
]
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}$")
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def is_data_folder(folder: Path) -> bool:
    """Return whether a folder has the layout of a data set."""
    if not folder.is_dir():
        return False
    if (folder / PREPARED).is_file():
        return True
    return (folder / STATE).is_file() or (folder / SPLITS).is_file() or bool(_data_files(folder))


def is_files(name: str) -> bool:
    """Return whether a name for `load`, such as `./photos`, is files, and no data set of TFDS."""
    file = DataFile(name, {})
    is_pattern = "*" in name or PLACEHOLDER.search(name) is not None
    if file.suffix in FORMATS or is_pattern or is_url(name) or name.startswith((".", "/", "~")):
        return True
    path = expand_home(name)
    # A folder without data whose name could be TFDS's is another matter, such as a run's.
    return path.is_file() or is_data_folder(path) or ("/" in name and path.is_dir())


def find_in_folder(folder: Path, split: str | None) -> tuple[list[DataFile], bool]:
    """Return the files of a split, and whether the folder has several splits."""
    if (folder / SPLITS).is_file():
        names = _names(folder / SPLITS, "splits")
        return _saved_files(folder / _choose(folder, names, split)), True
    if (folder / STATE).is_file():
        return _saved_files(folder), False
    by_split: dict[str, list[DataFile]] = {}
    stated = [f"split={split}"] if split else []
    for path in _data_files(folder):
        check_fetched(path)
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(
            DataFile(str(path), {}, is_shard=True).with_folder_values(len(folder.parts), stated)
        )
    if not by_split:
        raise FileNotFoundError(
            f"The folder {folder} has no data set, expected {STATE} or {SPLITS} (Hugging Face's "
            f"save_to_disk), or files that end with {', '.join(_SUFFIXES)}. Name the files, with "
            f"patterns such as '{folder}/{{client}}/*.jpg'."
        )
    if [*by_split] == ["train"] and split != "train":
        return by_split["train"], False
    splits_in_order = sorted(by_split, key=lambda name: (name != "train", name))
    return by_split[_choose(folder, splits_in_order, split)], True


def _choose(folder: Path, splits: Sequence[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        raise ArgumentError(
            f"The folder {folder} has the splits {', '.join(splits)}, but split is {split!r}, "
            f"expected one of them. Give one, such as split={splits[0]!r}."
        )
    return split


def _saved_files(folder: Path) -> list[DataFile]:
    names = _names(folder / STATE, "_data_files", "filename")
    for name in names:
        check_fetched(folder / name)
    return [DataFile(str(folder / name), {}, is_shard=True) for name in names]


def _names(path: Path, field: str, of: str | None = None) -> list[str]:
    """Read a list of names from a JSON file that others wrote."""
    content = read_json(path)
    items = content.get(field) if isinstance(content, dict) else None
    names = []
    for item in items if isinstance(items, list) else []:
        name = item.get(of) if of and isinstance(item, dict) else item
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise ArgumentError(
                f"{path} names {name!r}, expected a file or folder beside it. Save the data set "
                "again."
            )
        names.append(name)
    if not names:
        raise ArgumentError(f"{path} has no list {field!r}. Save the data set again.")
    return names


def _data_files(folder: Path) -> list[Path]:
    for suffix in _SUFFIXES:
        if paths := sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file()):
            return [path for path in paths if not _is_hidden(path.relative_to(folder))]
    return []


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _split_of(path: Path) -> str:
    """Return the split of a file, such as data/test-00000-of-00001.parquet or dev/0.parquet."""
    if match := _SHARD.match(path.stem):
        return match["split"]
    parts = [part for part in path.with_suffix("").parts if re.match(r"split=|[^=]*$", part)]
    words = [word for part in parts for word in re.split(r"[^a-z]+", part)]
    for split, keywords in _KEYWORDS.items():
        if any(word in keywords for word in words):
            return split
    return "train"
