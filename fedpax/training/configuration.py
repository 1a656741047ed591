"""Experiments as JSON: ``config.json`` in a run's folder, read back as an equal dataclass."""

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VERSION = 1
FILE = "config.json"


class ConfigurationError(Exception):
    """A configuration that cannot be written, read, or continued; the message says what to do."""


def to_json(configuration: Any, path: str = "") -> Any:
    """Turns nested frozen dataclasses into what JSON can hold.

    A dataclass becomes an object with its fields and ``"class": "module:Name"``, which no field
    can be called; a tuple becomes a list.

    Args:
        configuration: a frozen dataclass of ints, floats, strings, bools, ``None``, tuples and
            further such dataclasses.
        path: where it stands, for messages.

    Returns:
        Dicts, lists and plain values.

    Raises:
        ConfigurationError: for a value of another type.

    Example:
        >>> from fedpax.training.experiment import TrainingConfig
        >>> to_json(TrainingConfig(rounds=5, evaluate_every=1, checkpoint_every=1))["rounds"]
        5
    """
    if dataclasses.is_dataclass(configuration) and not isinstance(configuration, type):
        kind = type(configuration)
        values = {
            field.name: to_json(getattr(configuration, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(configuration)
        }
        return {"class": f"{kind.__module__}:{kind.__qualname__}", **values}
    if isinstance(configuration, tuple):
        return [to_json(value, f"{path}[{i}]") for i, value in enumerate(configuration)]
    # A subclass, such as an IntEnum, would come back as something else.
    if configuration is None or type(configuration) in (bool, int, float, str):
        return configuration
    raise ConfigurationError(
        f"{path.lstrip('.') or 'The configuration'} = {configuration!r} is a "
        f"{type(configuration).__name__}: a configuration holds ints, floats, strings, bools, "
        "None, tuples and frozen dataclasses of these. Store a name or a number and build the "
        "object in Experiment.build."
    )


def from_json(value: Any) -> Any:
    """Rebuilds what :func:`to_json` took apart.

    Fields that the class has gained since take their defaults.

    Args:
        value: what :func:`to_json` returned.

    Returns:
        An equal configuration.

    Raises:
        ConfigurationError: if a class is gone, or lost a field that the value sets.

    Example:
        >>> from fedpax.training.experiment import TrainingConfig
        >>> training = TrainingConfig(rounds=5, evaluate_every=1, checkpoint_every=1)
        >>> from_json(to_json(training)) == training
        True
    """
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    module, _, name = value["class"].partition(":")
    try:
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        return kind(**{key: from_json(item) for key, item in value.items() if key != "class"})
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The configuration names {value['class']}, which cannot be made from it now: {error}. "
            "Run the version of the code that wrote it, or start in an empty folder."
        ) from error


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of :func:`to_json`'s result as ``("model.num_layers", 4)``.

    Example:
        >>> dict(flatten({"class": "m:C", "model": {"class": "m:D", "layers": 4}}))
        {'class': 'm:C', 'model.class': 'm:D', 'model.num_layers': 4}
    """
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from flatten(item, f"{path}.{key}" if path else key)


def differences(old: Any, new: Any) -> list[str]:
    """Lists the fields in which two configurations differ, one readable line each.

    Args:
        old: a configuration.
        new: another.

    Returns:
        Lines such as ``"model.num_layers: 4 -> 6"``; none if they are equal.

    Example:
        >>> from fedpax.training.experiment import TrainingConfig
        >>> short = TrainingConfig(rounds=5, evaluate_every=1, checkpoint_every=1)
        >>> differences(short, dataclasses.replace(short, rounds=9))
        ['rounds: 5 -> 9']
    """
    before, after = dict(flatten(to_json(old))), dict(flatten(to_json(new)))
    missing = "(not there)"

    def show(fields: Mapping[str, Any], key: str) -> str:
        return json.dumps(fields[key]) if key in fields else missing

    return [
        f"{key}: {show(before, key)} -> {show(after, key)}"
        for key in {**before, **after}
        if show(before, key) != show(after, key)
    ]


def write(folder: str | Path, configuration: Any, exp: str) -> None:
    """Writes ``config.json``, whole or not at all.

    Args:
        folder: the run's folder; made if it is not there.
        configuration: the experiment.
        exp: the name under which the command line found it.

    Example:
        >>> import tempfile
        >>> from fedpax.training.experiment import TrainingConfig
        >>> training = TrainingConfig(rounds=5, evaluate_every=1, checkpoint_every=1)
        >>> folder = tempfile.mkdtemp()
        >>> write(folder, training, exp="short")
        >>> read(folder) == ("short", training)
        True
    """
    content = {"version": VERSION, "exp": exp, "configuration": to_json(configuration)}
    write_atomically(Path(folder) / FILE, json.dumps(content, indent=2) + "\n")


def read(folder: str | Path) -> tuple[str, Any] | None:
    """Reads ``config.json``.

    Args:
        folder: a run's folder.

    Returns:
        The experiment's name and the configuration; ``None`` if the folder has no ``config.json``.

    Raises:
        ConfigurationError: if the file is damaged or of another version.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        version, exp, configuration = (content[k] for k in ("version", "exp", "configuration"))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a configuration ({error}). It is always written whole, so "
            "something else changed it. Delete it to go on with the configuration you give now, "
            "or start in an empty folder."
        ) from error
    if version != VERSION:
        raise ConfigurationError(
            f"{path} has version {version}; this fedpax reads version {VERSION}. "
            "Run the fedpax that wrote it, or start in an empty folder."
        )
    return exp, from_json(configuration)


def claim(
    folder: str | Path,
    configuration: Any,
    exp: str = "",
    *,
    accept_changes: bool = False,
    writes: bool = True,
) -> None:
    """Makes a folder the folder of one configuration, or checks that it already is.

    Args:
        folder: the run's folder.
        configuration: the experiment that is to be trained there.
        exp: the name under which the command line found it.
        accept_changes: go on in a folder of another configuration and record the new one: for
            another mesh, or for more rounds.
        writes: whether to record the configuration, or only to check.

    Raises:
        ConfigurationError: if the folder belongs to another configuration; the message lists
            the differences. If there cannot be such a folder.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot hold a run: {error.strerror}. Give another --job_log_dir."
        ) from error
    found = read(folder)
    if found is not None and not accept_changes:
        changes = differences(found[1], configuration)
        if changes:
            listing = "\n".join(f"  {line}" for line in changes)
            raise ConfigurationError(
                f"{folder} belongs to another configuration"
                f"{f' (--exp={found[0]})' if found[0] else ''}. What would change:\n{listing}\n"
                "Give the same settings to continue it, another --job_log_dir to start anew, or "
                "--accept_changes to continue it with the new settings."
            )
    if writes and (found is None or accept_changes):
        write(folder, configuration, exp)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a kill or a crash leaves the old one or the new one, never a part.

    Args:
        path: the file; its folder is made if it is not there.
        text: its new content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
