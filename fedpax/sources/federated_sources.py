"""Federated data sets: EMNIST, Shakespeare, Stack Overflow, CIFAR-100, with the papers' clients.

Without a network, put TensorFlow Federated's archive into `<data_dir>/downloads/manual`.
"""

import abc
import itertools
import math
import sqlite3
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils.tqdm_utils import tqdm

from fedpax.sources.embedded_builders import LocalDatasetInfo
from fedpax.sources.federated_archive import (
    ARCHIVES_URL,
    Archive,
    ArchiveError,
    Feature,
    check,
    count_examples,
    decompress,
    open_database,
    read_examples,
)
from fedpax.sources.source import write_client_starts


class FederatedSource(tfds.core.ShardBasedBuilder):
    """A data set prepared from an archive of TensorFlow Federated, client by client."""

    # A builder by shards writes examples as they are generated; TFDS's other builder sorts them.

    VERSION = tfds.core.Version("1.0.0")
    ARCHIVE: ClassVar[Archive]
    FEATURES: ClassVar[Mapping[str, Feature]]
    """The features to read from the archive's examples."""
    EXAMPLES_PER_SHARD: ClassVar[int] = 1 << 14
    """The largest number of examples in an output file, and in memory while it is written.
    array_record reads an example from a file of 2**14 in 0.06 ms, and from one of 2**18 in 1.1 ms.
    """
    _connection: sqlite3.Connection

    @property
    def manual_path(self) -> Path:
        """The file that is used, if it exists, in place of a download."""
        return Path(self.data_dir_root) / "downloads" / "manual" / self.ARCHIVE.filename

    def urls(self) -> list[str]:
        """Return the URLs that preparing downloads: none if the file `manual_path` exists."""
        return [] if self.manual_path.exists() else [self.ARCHIVE.url]

    def _splits(self) -> dict[str, str]:
        return {"train": "train", "test": "test"}

    @abc.abstractmethod
    def _example(self, values: dict[str, Any]) -> dict[str, Any]:
        """Make an example, without its client, from the features of the archive's example."""

    def _describe(
        self, description: str, fields: Mapping[str, Any], homepage: str
    ) -> tfds.core.DatasetInfo:
        return LocalDatasetInfo(
            builder=self,
            description=description,
            features=tfds.features.FeaturesDict({**fields, "client": tfds.features.Text()}),
            homepage=homepage,
            disable_shuffling=True,
        )

    def _download_and_prepare(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig | None = None,
    ) -> None:
        is_manual = self.manual_path.exists()
        path = self.manual_path if is_manual else Path(dl_manager.download(self.ARCHIVE.url))
        # In the folder that TFDS deletes if preparing fails.
        database = Path(self.data_dir) / "archive.sqlite"
        try:
            check(path, self.ARCHIVE)
            decompress(path, database)
            self._starts: dict[str, list[int]] = {}
            with open_database(database) as self._connection:
                super()._download_and_prepare(dl_manager, download_config)
            write_client_starts(Path(self.data_dir), self._starts)
        except ArchiveError as error:
            if is_manual:
                remedy = f"replace it with a new copy of {self.ARCHIVE.url}"
            else:  # delete TFDS's record of the download too, so that it is downloaded again
                path.unlink(missing_ok=True)
                path.with_name(f"{path.name}.INFO").unlink(missing_ok=True)
                remedy = "it was deleted; load again to download it again"
            raise OSError(f"{path} {error}: {remedy}.") from None
        finally:
            database.unlink(missing_ok=True)

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Sequence[Callable[[], Iterator[tuple[int, dict[str, Any]]]]]]:
        del dl_manager  # the archive has been downloaded already
        return {split: self._shards(split, name) for split, name in self._splits().items()}

    def _shards(
        self, split: str, name: str
    ) -> list[Callable[[], Iterator[tuple[int, dict[str, Any]]]]]:
        """Divide a split among output files of nearly equal size, written one after another."""
        count = count_examples(self._connection, name)
        shards = math.ceil(count / self.EXAMPLES_PER_SHARD)
        ends = [count * k // shards for k in range(shards + 1)]
        rest = self._examples(split, name, count)
        return [partial(itertools.islice, rest, b - a) for a, b in itertools.pairwise(ends)]

    def _examples(self, split: str, name: str, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield a split's examples with their indices, and show a progress bar."""
        starts, last = self._starts.setdefault(split, []), None
        rows = tqdm(
            read_examples(self._connection, name, self.FEATURES),
            desc=f"Writing {name}",
            total=count,
            unit=" examples",
            mininterval=1.0,
            leave=False,
        )
        for index, (client, values) in enumerate(rows):
            if client != last:
                starts.append(index)
                last = client
            yield index, {**self._example(values), "client": client}


class FederatedEmnist(FederatedSource):
    """Handwritten characters by writer: `all`, 62 classes of 3,400 writers, and `digits`, of 3,383.

    Fields: `image` uint8 [28, 28, 1], upright; `label`; `client`, the writer, in both splits.
    The background is 255 and ink is 0: MNIST and TFDS's `emnist` have the opposite.

    Reference:
        Cohen et al., arXiv:1702.05373. Caldas et al., LEAF, arXiv:1812.01097.
    """

    BUILDER_CONFIGS = [  # noqa: RUF012, the name and type are TFDS's
        tfds.core.BuilderConfig(name="all", description="62 classes"),
        tfds.core.BuilderConfig(name="digits", description="10 classes"),
    ]
    ARCHIVE = Archive(
        f"{ARCHIVES_URL}/emnist_all.sqlite.lzma",
        170_507_172,
        "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
    )
    FEATURES: ClassVar = {
        "pixels": Feature("float_list", 28 * 28),
        "label": Feature("int64_list"),
    }

    def _info(self) -> tfds.core.DatasetInfo:
        letters = "" if self._only_digits else string.ascii_uppercase + string.ascii_lowercase
        return self._describe(
            "EMNIST by writer, from TensorFlow Federated; the background is 255, ink is 0.",
            {
                "image": tfds.features.Tensor(shape=(28, 28, 1), dtype=np.uint8),
                "label": tfds.features.ClassLabel(names=[*string.digits, *letters]),
            },
            "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        )

    @property
    def _only_digits(self) -> bool:
        return self.builder_config.name == "digits"

    def _splits(self) -> dict[str, str]:
        prefix = "digits_only" if self._only_digits else "all"
        return {split: f"{prefix}_{split}" for split in ("train", "test")}

    def _example(self, values: dict[str, Any]) -> dict[str, Any]:
        pixels = values["pixels"]
        if not (pixels.min() >= 0 and pixels.max() <= 1):  # also true for NaN
            raise ArchiveError(
                f"has pixels from {pixels.min():g} to {pixels.max():g}, not from 0 to 1"
            )
        image = np.rint(pixels * 255).astype(np.uint8).reshape(28, 28, 1)
        return {"image": image, "label": int(values["label"][0])}


class FederatedShakespeare(FederatedSource):
    """Shakespeare's plays by role: 715 roles, 16,068 snippets in `train` and 2,356 in `test`.

    Fields: `text`, consecutive lines of a role; `client`, the play and the role, in both splits.

    Reference:
        McMahan et al., arXiv:1602.05629, section 3. Caldas et al., LEAF, arXiv:1812.01097.
    """

    ARCHIVE = Archive(
        f"{ARCHIVES_URL}/shakespeare.sqlite.lzma",
        1_329_828,
        "d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4",
    )
    FEATURES: ClassVar = {"snippets": Feature("bytes_list")}

    def _info(self) -> tfds.core.DatasetInfo:
        return self._describe(
            "Shakespeare's plays by role, from TensorFlow Federated.",
            {"text": tfds.features.Text(doc="consecutive lines of a role")},
            "https://leaf.cmu.edu",
        )

    def _example(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"text": values["snippets"]}


class FederatedStackoverflow(FederatedSource):
    """Questions and answers of Stack Overflow by user, one sentence per example.

    Fields: `text`, tokens in lower case; `title` and `tags` (separated by `|`) of the question;
    `score`; `creation_date`; `type`, `question` or `answer`; `client`, the user. `train` has
    342,477 users before 2018, `test` later users, and `heldout` other users.

    Reference:
        Reddi et al., arXiv:2003.00295. The texts are Stack Overflow's, licensed CC BY-SA 3.0.
    """

    ARCHIVE = Archive(f"{ARCHIVES_URL}/stackoverflow.sqlite.lzma")
    EXAMPLES_PER_SHARD = 1 << 18  # 519 files in train; many systems limit open files to 1,024
    FEATURES: ClassVar = {
        "creation_date": Feature("bytes_list"),
        "score": Feature("int64_list"),
        "tags": Feature("bytes_list"),
        "title": Feature("bytes_list"),
        "tokens": Feature("bytes_list"),
        "type": Feature("bytes_list"),
    }

    def _splits(self) -> dict[str, str]:
        return {split: split for split in ("train", "heldout", "test")}

    def _info(self) -> tfds.core.DatasetInfo:
        texts = ("text", "title", "tags", "creation_date", "type")
        return self._describe(
            "Stack Overflow by user, from TensorFlow Federated; CC BY-SA 3.0.",
            {
                **{name: tfds.features.Text() for name in texts},
                "score": tfds.features.Scalar(np.int64),
            },
            "https://www.kaggle.com/stackoverflow/stackoverflow",
        )

    def _example(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            **{name: values[name] for name in ("title", "tags", "creation_date", "type")},
            "text": values["tokens"],
            "score": values["score"][0],
        }


class FederatedCifar100(FederatedSource):
    """CIFAR-100 partitioned among clients by Pachinko allocation over its two levels of classes.

    Fields: `image` uint8 [32, 32, 3]; `label`, of 100 classes; `coarse_label`, of 20; `client`. The
    clients of `train` (500) and of `test` (100) have 100 examples, and are unrelated.

    Reference:
        Krizhevsky, 2009. Reddi et al., arXiv:2003.00295 (the allocation).
    """

    ARCHIVE = Archive(
        f"{ARCHIVES_URL}/cifar100.sqlite.lzma",
        153_019_920,
        "23d3916c9caa33395737ee560cc7cb77bbd05fc7b73647ee7be3a7e764172939",
    )
    FEATURES: ClassVar = {
        "image": Feature("int64_list", 32 * 32 * 3),
        "label": Feature("int64_list"),
        "coarse_label": Feature("int64_list"),
    }

    def _info(self) -> tfds.core.DatasetInfo:
        return self._describe(
            "CIFAR-100 by client, Pachinko allocation, from TensorFlow Federated.",
            {
                "image": tfds.features.Tensor(shape=(32, 32, 3), dtype=np.uint8),
                "label": tfds.features.ClassLabel(num_classes=100),
                "coarse_label": tfds.features.ClassLabel(num_classes=20),
            },
            "https://www.cs.toronto.edu/~kriz/cifar.html",
        )

    def _example(self, values: dict[str, Any]) -> dict[str, Any]:
        image = values["image"]
        if image.min() < 0 or image.max() > 255:
            raise ArchiveError(f"has pixels from {image.min()} to {image.max()}, not from 0 to 255")
        return {
            "image": image.astype(np.uint8).reshape(32, 32, 3),
            "label": int(values["label"][0]),
            "coarse_label": int(values["coarse_label"][0]),
        }
