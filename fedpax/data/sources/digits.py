"""scikit-learn's handwritten digits as a TFDS data set: images that need no download.

1,797 images of 8 x 8 pixels from 13 writers. scikit-learn's pixel values 0 to 16 are scaled to 0 to
255 and rounded, with one channel, as is usual in TFDS. The split `test` has about one image in five
and `train` the rest. The SHA-256 of an image's index in scikit-learn's order decides, so both
splits have images of every writer.

Reference:
    Alpaydin, Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning
    Repository, 1998.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from fedpax.data.sources._dataset_info import LocalDatasetInfo


def is_test(index: int) -> bool:
    """Return whether an image, by its index in scikit-learn's order, is in the split `test`."""
    return int.from_bytes(hashlib.sha256(b"%d" % index).digest()[:8], "big") % 5 == 0


class Digits(tfds.core.GeneratorBasedBuilder):
    """Builder of scikit-learn's handwritten digits: `image` uint8 [8, 8, 1] and `label`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return LocalDatasetInfo(
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
        for index, (image, label) in enumerate(zip(images, digits.target, strict=True)):
            if is_test(index) == test:
                yield index, {"image": image, "label": int(label)}
