"""Texts in array_record files that TFDS did not prepare."""

from collections.abc import Sequence
from typing import Any

from fedpax.files import check_fetched
from fedpax.path_patterns import find_paths

SUFFIX = ".array_record"


class TextRecords(Sequence[dict[str, Any]]):
    """The records of array_record files, in the order of the files' names, as dicts."""

    # A record is a text in UTF-8, which becomes the field `"text"` (as bytes), or a serialized
    # `tf.train.Example`, whose features become fields. A feature of one value becomes this value, a
    # text as bytes and a number as Python's; any other feature becomes a list. The first record
    # decides for all. A folder or file that exists as the pattern is written is itself.

    def __init__(self, pattern: str) -> None:
        paths = find_paths(pattern)
        self.paths = [str(path) for path in paths]
        if not self.paths:
            raise FileNotFoundError(
                f"No file matches {pattern!r}: name files that end with {SUFFIX}. {{split}} in the "
                "name stands for the split, such as 'corpus/{split}-*.array_record'."
            )
        for path in paths:
            check_fetched(path)
        from grain.sources import ArrayRecordDataSource  # here because it is slow to import

        self._files = ArrayRecordDataSource(self.paths)
        self._are_examples = len(self._files) > 0 and bool(example_features(self._files[0]))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        """Return a record as a dict."""
        return self._decode(self._files[index])

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several records, read in parallel."""
        return [self._decode(record) for record in self._files.__getitems__(indices)]

    def _decode(self, record: bytes) -> dict[str, Any]:
        return (example_features(record) or {}) if self._are_examples else {"text": record}


def example_features(record: bytes) -> dict[str, Any] | None:
    """Return the features of a `tf.train.Example`; None if the record is not one."""
    from tensorflow_datasets.proto import tf_example_pb2

    example = tf_example_pb2.Example()
    try:
        example.ParseFromString(record)
    except Exception:  # protobuf's own type, which has no stubs
        return None
    fields: dict[str, Any] = {}
    for name, feature in example.features.feature.items():
        list_name = feature.WhichOneof("kind")
        values = getattr(feature, list_name).value if list_name else []
        fields[name] = values[0] if len(values) == 1 else list(values)
    return fields or None
