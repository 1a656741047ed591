"""FedAvg on users' images: files in folders, or a column of images."""

import dataclasses
import functools
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedpax.checks import Count
from fedpax.data import load
from fedpax.data.open_client_files import PreparedFiles
from fedpax.data.rounds.labeled_examples import Arrays, Preprocess, preprocess_images
from fedpax.data.tables import Label, infer_label, parse_treatment
from fedpax.data.tables.shared_treatment import (
    CLASSES,
    LABEL,
    agree_on_label,
    describe_label,
    label_properties,
)
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_files import FedAvgFiles
from fedpax.experiments.parts.file_experiments import HELD_OUT_BY, saved_content
from fedpax.experiments.parts.received_inputs import check_label
from fedpax.models.classifiers import CNNConfig, cnn
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.models.resnet import ResNetConfig, resnet
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.function_settings import documented_by
from fedpax.settings.table_data import FilesConfig
from fedpax.sites.agreement import Remedied
from fedpax.sites.site_experiment import Question
from fedpax.training.training_config import TrainingConfig

MOST_PIXELS = 1 << 14
"""The largest height, width or number of channels of a site's images."""
MOST_NUMBERS = 1 << 26
"""The largest image that a site can name, in numbers."""

SIZE = Remedied(
    "the height and width of images",
    "set --data.image_size HEIGHT WIDTH at the syncer and at each site",
)
CHANNELS = Remedied(
    "the number of channels of images",
    "set --data.channels=3 at the syncer and at each site, which repeats gray values",
)
"""Properties of images that all sites must share."""


@dataclasses.dataclass(frozen=True)
@documented_by(load)
class ImagesConfig(FilesConfig):
    """Files of images that have clients and labels.

    Attributes:
        label: the column to predict, or `{label}` in the path.
        image: the column with the images.
        channels: the number of channels to which images are converted. Default None: they are not
            converted.
        columns: the classes of the label, as "LABEL=category(A|B)". Default (): the distinct
            values.
    """

    label: str | None = "label"
    image: str = "image"
    image_size: tuple[int, int] | None = None
    channels: Count | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        stated = [parse_treatment(text) for text in self.columns]
        if len(stated) > 1 or any(t.name != self.label or t.values is None for t in stated):
            raise ArgumentError(
                f"data.columns={' '.join(self.columns)}, expected only the classes of the label. "
                f"Set for example --data.columns '{self.label}=category(A|B)'."
            )


def _to_images(column: Any, data: ImagesConfig) -> NDArray[Any]:
    """Decode images of a prepared folder, and give gray ones that are rows of numbers axes."""
    from fedpax.user_files.arrow_numpy import to_numpy
    from fedpax.user_files.formats import ReadOptions
    from fedpax.user_files.image_hashes import has_encoded_images
    from fedpax.user_files.readers.image_files import decode_features

    size = data.image_size
    if has_encoded_images(column):
        import pyarrow as pa

        options = ReadOptions((), {}, None, size, image=data.image)
        files = " ".join(data.files)
        column = decode_features(pa.table({data.image: column}), options, files).column(0)
    values = to_numpy(column)
    if np.ma.isMaskedArray(values):
        return values
    if values.dtype == object and len({np.shape(value) for value in values}) == 1:
        values = np.stack([*values])  # lists of equal length
    if size is not None and values.ndim == 2 and values.shape[1] == math.prod(size):
        return values.reshape(len(values), *size, 1)
    return values


def _shape_words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _with_channels(images: NDArray[Any], channels: int | None) -> NDArray[Any]:
    """Repeat gray values, or make images gray by the weights of ITU-R BT.601, as Pillow does."""
    images = images[..., None] if images.ndim == 3 else images
    if channels in (None, images.shape[-1]):
        return images
    if (images.shape[-1], channels) == (1, 3):
        return np.repeat(images, 3, axis=-1)
    if (images.shape[-1], channels) != (3, 1):
        raise ArgumentError(
            f"data.channels={channels}, but the images have {images.shape[-1]}, expected the same "
            "number, or 1 and 3. Convert the images, or leave --data.channels out."
        )
    gray = images @ np.array([0.299, 0.587, 0.114], np.float32)
    return (np.rint(gray) if images.dtype.kind in "iu" else gray).astype(images.dtype)[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgImageFiles(FedAvgFiles):
    """An image classifier on users' images, whose network has the size of the images.

    Integers of images are scaled to 0 to 1.

    Attributes:
        data: the files.
        network: "cnn", two convolutions and a hidden layer, or "resnet", ResNet-18.
        filters: output channels of the two convolutions of "cnn".
        hidden_dim: features of the hidden layer of "cnn".
    """

    data: ImagesConfig = dataclasses.field(default_factory=ImagesConfig)
    network: Literal["cnn", "resnet"] = "cnn"
    filters: tuple[int, int] = (32, 64)
    hidden_dim: Count = 128
    field = "image"

    @functools.cached_property
    def images(self) -> NDArray[Any]:
        """The images, uint8 or float32 `[examples, height, width, channels]`."""
        columns, data = self.opened.columns, self.data
        if data.image not in columns:
            raise ArgumentError(
                f"data.image={data.image!r} is not a column of {' '.join(data.files)}, expected "
                f"one of {', '.join(map(repr, columns))}. Set --data.image to the images' column."
            )
        images = _to_images(columns[data.image], data)
        if images.ndim == 2 and data.image_size is not None:
            raise ArgumentError(
                f"A row of the column {data.image!r} has {images.shape[1]} numbers, expected "
                f"{math.prod(data.image_size)}, a gray image of {_shape_words(data.image_size)} "
                "pixels. Set --data.image_size to the height and width of the images."
            )
        if np.ma.isMaskedArray(images) or images.ndim not in (3, 4):
            raise ArgumentError(
                f"The column {data.image!r} has {images.dtype}{list(images.shape)}, expected "
                "images of one size without missing ones, [examples, height, width, channels]. Set "
                "--data.image_size 32 32 to resize image files, or for the height and width of "
                "gray images that are rows of numbers."
            )
        if data.image_size is not None and images.shape[1:3] != tuple(data.image_size):
            raise ArgumentError(
                f"data.image_size={tuple(data.image_size)}, but the column {data.image!r} of "
                f"{' '.join(data.files)} has pixels of {_shape_words(images.shape[1:3])}, and only "
                "encoded images are resized. Leave --data.image_size out, or name the files of the "
                "images."
            )
        return _with_channels(images, data.channels)

    def _infer_label(self, min_classes: int) -> Label:
        """Return the stated classes, or the distinct labels of the examples."""
        name = self.data.label or "label"
        stated = " ".join(self.data.columns)
        values = self.opened.columns[name]
        return infer_label(name, values, "classification", stated, min_classes=min_classes)

    @functools.cached_property
    def prepared(self) -> PreparedFiles:
        """The images, `[examples, height, width, channels]`, and the labels, int32, as arrays."""
        images, saved = self.images, self.saved_inputs
        made = self._infer_label(2) if saved is None else Label.from_json(saved["label"])
        if tuple(self.image_shape) != images.shape[1:]:
            raise ArgumentError(
                f"The images are {_shape_words(images.shape[1:])}, but the model takes "
                f"{_shape_words(self.image_shape)}, expected the same. Set --data.image_size "
                f"{self.image_shape[0]} {self.image_shape[1]} and --data.channels="
                f"{self.image_shape[2]}, or convert the images."
            )
        height, width = images.shape[1:3]
        note = f"{len(made.classes):,} classes, images of {height} x {width}"
        labels = made.encode(self.opened.columns[made.name])
        examples = {"image": images, "label": labels}
        return PreparedFiles(examples, labels, made, (note,), self._caution_of_version())

    def _caution_of_version(self) -> Sequence[str]:
        """Tell of a model from before held-out images were chosen by their bytes."""
        from fedpax.user_files.image_hashes import can_be_encoded, hash_column

        data, saved, stored = self.data, self.saved_inputs, self.opened.columns.stored
        by_bytes = hash_column(data.image) in stored.column_names
        by_bytes |= can_be_encoded(stored.schema.field(data.image).type)
        if saved is None or HELD_OUT_BY in saved or not by_bytes or data.has_split:
            return ()
        return (
            "the model is of an earlier version, which chose held-out images by their pixels and "
            "by names, and did not turn images by their EXIF orientation: images that are held out "
            "now can have been trained on, so that metrics are too good. Train in a new folder",
        )

    def make_preprocess(self) -> Preprocess:
        """Make the function that scales integers of images to 0 to 1."""
        return preprocess_images

    @property
    def image_shape(self) -> Sequence[int]:
        """Height, width and channels, which a coordinator without data knows from its sites."""
        saved = self.saved_inputs
        if saved is not None and "image_shape" in saved:
            known: Sequence[int] = saved["image_shape"]
            return known
        return self.images.shape[1:]

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The classes and the shape, as `saved_content` has them."""
        return saved_content(self.data, self.prepared.label, image_shape=self.image_shape)

    def describe_inputs(self) -> dict[str, Any]:
        """Return what a site tells of its images: their shape, and the classes that it has."""
        label = self._infer_label(1)
        described = describe_label(label, self.opened.columns[label.name], self.data.columns)
        return {**described, "image_shape": list(self.image_shape)}

    def with_inputs(self, inputs: Mapping[str, Any]) -> Self:
        """Return the experiment with the classes that sites share; a site checks the label."""
        if "_at_site" in self.__dict__:
            check_label(inputs, self._infer_label(1), has_classes=bool(self.data.columns))
        return super().with_inputs(inputs)

    def shared_properties(self, description: Mapping[str, Any]) -> Mapping[str, str | None]:
        """Return the label, and the shape of images."""
        size = tuple(description["image_shape"])
        whole = len(size) == 3 and all(type(n) is int and 0 < n <= MOST_PIXELS for n in size)
        if not whole or math.prod(size) > MOST_NUMBERS:
            raise ArgumentError(
                f"image_shape is {size!r:.100}, expected height, width and channels of 1 to "
                f"{MOST_PIXELS:,}, and at most {MOST_NUMBERS:,} numbers."
            )
        return {
            **label_properties(description),
            SIZE: _shape_words(size[:2]),
            CHANNELS: str(size[2]),
        }

    def stated_properties(self) -> Mapping[str, str]:
        """Return the label, and the classes and the shape of images if they are stated."""
        data = self.data
        classes = parse_treatment(data.columns[0]).values if data.columns else None
        return {
            LABEL: data.label or "label",
            CLASSES: "|".join(classes) if classes else "none",
            **({SIZE: _shape_words(data.image_size)} if data.image_size else {}),
            **({CHANNELS: str(data.channels)} if data.channels else {}),
        }

    @property
    def disclosures(self) -> Sequence[str]:
        """Lines on the classes and the shape of images, which clients disclose."""
        data, (height, width, channels) = self.data, self.image_shape
        lines = []
        if not data.columns:
            lines.append(
                f"not private: the classes of {self.label.name!r}, which clients disclose; state "
                f"them: --data.columns '{self.label.name}=category(A|B)'"
            )
        if data.image_size is None:
            lines.append(
                f"not private: the size of images; state it: --data.image_size {height} {width}"
            )
        if data.channels is None:
            lines.append(
                "not private: the number of channels of images; state it: "
                f"--data.channels={channels}"
            )
        return lines

    def blank_example(self) -> Arrays:
        """Return one image and its label."""
        shape = (1, *self.image_shape)
        return {"image": np.zeros(shape, np.uint8), "label": np.zeros(1, np.int32)}

    def agree(
        self, descriptions: Sequence[Mapping[str, Any]]
    ) -> Generator[Question, Any, Mapping[str, Any]]:
        """Agree on the classes of all sites together, and on the shape of images."""
        label = agree_on_label(descriptions, "classification")
        shape = descriptions[0]["image_shape"]  # the votes have compared all of them
        content = saved_content(self.data, label, image_shape=shape)
        yield from ()  # without a question
        return content | {"sites": len(descriptions)}

    def make_model(self) -> FunctionalModel:
        """Make the network for the images."""
        (height, width, channels), classes = self.image_shape, len(self.label.classes)
        if self.network == "resnet":
            return resnet(ResNetConfig(num_channels=channels, num_classes=classes))
        return cnn(
            CNNConfig(
                image_height=height,
                image_width=width,
                num_channels=channels,
                filters=self.filters,
                hidden_dim=self.hidden_dim,
                num_classes=classes,
            )
        )


def fedavg_images() -> FedAvgImageFiles:
    """FedAvg on images of your own, such as photos/{client}/{label}/*.jpg. Needs files.

    Set `--data.files`. A client is `{client}` in the path, or `--data.client` names a column.
    """
    return FedAvgImageFiles(
        cohort=CohortConfig(size=100, batch_size=20),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=100, evaluate_every=10, checkpoint_every=50),
    )
