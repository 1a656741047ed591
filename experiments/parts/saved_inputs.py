"""table.json: the label and the columns of a model, saved when its run begins."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpax.data.tables import Label, TableFeatures
from fedpax.errors import ArgumentError
from fedpax.experiments.client_files import FilesConfig
from fedpax.run_files.paths import write_atomically

INPUTS = "table.json"
"""The file's name, in the folder of a run and of an exported model."""

# Settings of what is saved. The settings of files and of held-out parts may change.
_SETTINGS = ("label", "task", "columns", "max_categories", "category_clients", "standardize")


def saved_content(
    data: FilesConfig,
    label: Label,
    features: TableFeatures | None = None,
    image_shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the inputs of a model as JSON: label, columns or images, and their settings."""
    content: dict[str, Any] = {"settings": _settings(data), "label": label.to_json()}
    if features is not None:
        content["columns"] = features.to_json()
    if image_shape is not None:
        content["image_shape"] = list(image_shape)
    return content


def write_saved_inputs(path: Path, content: Mapping[str, Any]) -> None:
    """Write the inputs of a model, as `saved_content` makes them."""
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_saved_inputs(path: Path, data: FilesConfig) -> Mapping[str, Any]:
    """Read what `write_saved_inputs` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        saved = content["settings"]
        _ = content["label"]["classes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} is damaged ({type(error).__name__}: {error}), expected the file as `fedpax "
            "train` writes it. Restore it from a copy."
        ) from error
    for name, value in _settings(data).items():
        if saved.get(name) != value:
            raise ArgumentError(
                f"data.{name}={value!r}, but the model was trained with {saved.get(name)!r}, "
                f"expected the same. Leave --data.{name} out, or train in another folder."
            )
    inputs: Mapping[str, Any] = content
    return inputs


def _settings(data: FilesConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(data)
    settings = {name: fields[name] for name in _SETTINGS if name in fields}
    return {n: list(value) if isinstance(value, tuple) else value for n, value in settings.items()}
