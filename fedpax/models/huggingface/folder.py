"""The files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError
from fedpax.files import check_fetched, open_regular, read_json
from fedpax.path_patterns import expand_home

CONFIG, SINGLE_FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
AGAIN = "Copy or download the folder again."
_SHORT_INDEX = 2**20  # bytes, which are parsed in no time
_MOST_PER_HEADER = 100  # times: of a folder that is still downloading, not all files are there


def read_entries(folder: str | Path) -> tuple[dict[str, Any], str]:
    """Return the entries of a folder's config.json, and the name of that file."""
    path = existing_folder(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: expected a Hugging Face folder with {CONFIG}. Copy the file "
            "there, or give another folder."
        )
    return _json_object(path), str(path)


def listed(names: Collection[str]) -> str:
    """Join names; of many only the first five."""
    shown, more = list(names)[:5], len(names) - 5
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def existing_folder(folder: str | Path) -> Path:
    """Return the path of a Hugging Face folder, which must exist."""
    path = expand_home(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder: expected a Hugging Face folder. Give a folder with {CONFIG} "
            "and safetensors files."
        )
    return path


def _json_object(path: Path) -> dict[str, Any]:
    check_fetched(path)
    try:
        value = read_json(path)
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ArgumentError(f"{path} is damaged: {error}. {AGAIN}") from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{path} is damaged: expected a JSON object. {AGAIN}")
    return value


def weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Return the tensors of each file of weights; None: all that the file has."""
    # In this order, as transformers does.
    if (folder / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = f"Convert {listed(pickled)} to safetensors first." if pickled else AGAIN
        raise FileNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}. {remedy}")
    _check_length(folder)
    names = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ArgumentError(
            f"{folder / INDEX} is damaged: expected weight_map, a file per tensor. {AGAIN}"
        )
    files: dict[str, set[str]] = {}
    for name, file in names.items():
        files.setdefault(file, set()).add(name)
    if outside := sorted(file for file in files if Path(file).name != file):
        raise ArgumentError(f"{folder / INDEX}: {listed(outside)} is not a file of this folder.")
    return dict(files)


def _check_length(folder: Path) -> None:
    """Raise if an index is far longer than the headers of the files, before it is parsed."""
    length = (folder / INDEX).stat().st_size
    if length <= _SHORT_INDEX:
        return
    total = 0
    for path in folder.glob("*.safetensors"):
        with open_regular(path) as file:
            total += min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
    if length > _MOST_PER_HEADER * total:
        raise ArgumentError(
            f"{folder / INDEX} has {length:,} bytes, but the headers of the safetensors files, "
            f"which name the same tensors, have {total:,}. {AGAIN}"
        )
