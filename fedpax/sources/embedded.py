"""The embedded data sets without TFDS: the same examples, in the same order, in memory."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedpax.sources.digits import digit_examples
from fedpax.sources.source import Source
from fedpax.sources.stdlib_text import configuration, text_examples

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
