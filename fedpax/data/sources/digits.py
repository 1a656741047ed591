"""scikit-learn's handwritten digits as a TFDS data set: images that need no download.

1,797 images of 8 x 8 pixels from 13 writers. scikit-learn has the pixels from 0 to 16; here they
are 0 to 255 (16 becomes 255, rounded between), with one channel, as images in TFDS are. About one
image in five is in the split ``test``, the others in ``train``; the SHA-256 of its number in
scikit-learn's order decides, so that both have every writer.

Reference:
    Alpaydin, Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning
    Repository, 1998.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds


def is_test(number: int) -> bool:
    """Whether an image, by its number in scikit-learn's order, is in the split ``test``."""
    return int.from_bytes(hashlib.sha256(b"%d" % number).digest()[:8], "big") % 5 == 0


class Digits(tfds.core.GeneratorBasedBuilder):
    """scikit-learn's handwritten digits: images of 8 x 8 pixels and their labels."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # there is nothing to download
        return {"train": self._generate_examples(False), "test": self._generate_examples(True)}

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn import datasets

        digits = datasets.load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
        for number, (image, label) in enumerate(zip(images, digits.target, strict=True)):
            if is_test(number) == test:
                yield number, {"image": image, "label": int(label)}
