"""The embedded data sets as builders of TFDS, which registers them when this module is imported."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from fedpax.sources.embedded import configuration, digit_examples, text_examples


class LocalDatasetInfo(tfds.core.DatasetInfo):
    """Information about a data set that TFDS's own bucket does not have."""

    # TFDS looks every unprepared data set up in that bucket, and leaves an empty temporary folder
    # behind each time.

    def initialize_from_bucket(self) -> None:
        """Skip the look-up."""


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
        return {split: digit_examples(split) for split in ("train", "test")}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        return digit_examples(split)


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """Builder of the Python standard library's sources: one file per example."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012, the name and type are TFDS's
        tfds.core.BuilderConfig(name=configuration())
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return LocalDatasetInfo(
            builder=self,
            description="The source files of the Python standard library, without its tests.",
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
        return {split: text_examples(split) for split in ("train", "heldout")}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str | bytes]]]:
        return text_examples(split)
