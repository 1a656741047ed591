"""The classes that the metadata of a prepared data set name: TFDS imports their modules."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError
from fedpax.files import parse_json, read_json

FILE = "features.json"
_NAMES = ("type", "pythonClassName", "python_class_name")


def check_feature_classes(folder: Path) -> None:
    """Check that opening a prepared data set imports no module that its files name."""
    for pattern in (FILE, f"*/{FILE}", f"*/*/{FILE}"):
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
