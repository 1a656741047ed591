"""The handwritten digits of scikit-learn: images that need no download.

1,797 images of 8 x 8 pixels from 13 writers. scikit-learn's pixel values 0 to 16 are scaled to 0 to
255 and rounded, with one channel, as is usual in TFDS. The split `test` has about one image in five
and `train` the rest. The SHA-256 of an image's index in scikit-learn's order decides, so both
splits have images of every writer.

`digits.npz` has labels in scikit-learn's order, and pixels `[8, 8, images]` sorted by label: this
order compresses best.

Reference:
    Alpaydin, Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning
    Repository, 1998, CC BY 4.0.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def is_test(index: int) -> bool:
    """Return whether an image, by its index in scikit-learn's order, is in the split `test`."""
    return int.from_bytes(hashlib.sha256(b"%d" % index).digest()[:8], "big") % 5 == 0


def digit_examples(split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the examples of the split `train` or `test`, each with its key in TFDS."""
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        labels = digits["labels"]
        images = np.empty((len(labels), 8, 8, 1), np.uint8)
        images[np.argsort(labels, kind="stable"), ..., 0] = np.moveaxis(
            np.rint(digits["pixels"] * (255 / 16)), -1, 0
        )
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        if is_test(index) == (split == "test"):
            yield index, {"image": image, "label": int(label)}
