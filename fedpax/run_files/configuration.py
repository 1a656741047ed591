"""Configurations as JSON, `config.json` in a run's folder: their classes and their seeds."""

import dataclasses
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

from fedpax.errors import ArgumentTypeError, ConfigurationError
from fedpax.files import describe_no_permission, read_json
from fedpax.run_files.paths import CONFIGURATION, write_atomically
from fedpax.user_files.folders import is_files

VERSION = 1


def to_json(configuration: Any, path: str = "") -> Any:
    """Convert nested frozen dataclasses to JSON, with `module:Name` as `class`."""
    if dataclasses.is_dataclass(configuration) and not isinstance(configuration, type):
        check_is_dataclass(configuration)
        values = {
            field.name: to_json(getattr(configuration, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(configuration)
        }
        return {"class": class_name(configuration), **values}
    if isinstance(configuration, tuple):
        return [to_json(value, f"{path}[{i}]") for i, value in enumerate(configuration)]
    # A subclass, such as an IntEnum, would be read back as its base class.
    if configuration is None or type(configuration) in (bool, int, float, str):
        return configuration
    raise ConfigurationError(
        f"{path.lstrip('.') or 'The configuration'} = {configuration!r} is a "
        f"{type(configuration).__name__}, expected an int, float, string, bool, None, tuple or "
        "frozen dataclass of these. Store a name or a number, and build the object in "
        "Experiment.build."
    )


def check_is_dataclass(configuration: Any) -> None:
    """Check that no subclass of a dataclass declares fields without being one itself."""
    # `--FIELD=VALUE` cannot set such fields, and `config.json` does not hold them.
    for class_ in type(configuration).__mro__:
        if "__dataclass_fields__" in vars(class_):
            continue
        if names := [
            name
            for name, annotation in inspect.get_annotations(class_).items()
            if "ClassVar" not in str(annotation)
        ]:
            raise ConfigurationError(
                f"{class_.__module__}:{class_.__qualname__} declares {', '.join(names)} and is not "
                "a dataclass, expected a frozen one: the command line could not set these fields. "
                "Write @dataclasses.dataclass(frozen=True, kw_only=True) above the class."
            )


def class_name(configuration: Any) -> str:
    """Return `module:Name` of a configuration's class."""
    return name_of_class(type(configuration))


def from_json(value: Any, file: str | PurePath = CONFIGURATION, own: Collection[type] = ()) -> Any:
    """Rebuild a configuration from the result of `to_json`, and run no code that it names."""
    if isinstance(value, list):
        return tuple(from_json(item, file, own) for item in value)
    if not isinstance(value, dict):
        return value
    named = value.get("class")
    if isinstance(named, str) and not is_within_fedpax(named) and not find_class(named, own):
        raise ConfigurationError(
            f"{file} names the class {named!r}, expected a dataclass of fedpax or of the "
            "experiment's own module: code that a folder names is not run. Name the experiment "
            "itself: --exp=FILE.py:FUNCTION on the command line, or the argument `experiment` in "
            "Python."
        )
    try:
        class_ = find_class(named, own) or find_in_fedpax(str(named))
        fields = {key: from_json(item, file, own) for key, item in value.items() if key != "class"}
        for field in dataclasses.fields(class_):
            if field.name in fields and not _fits(fields[field.name], field.type):
                raise ArgumentTypeError(f"{field.name} is {fields[field.name]!r}")
        return class_(**fields)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{file} names {named}, expected a class that can be made from its fields: {error}. "
            "Run the version of the code that wrote it, or start in an empty folder."
        ) from error


def moved_out_of_main(value: Any, module: str) -> Any:
    """Name the classes that a notebook or a script defined as classes of a module."""
    if isinstance(value, list):
        return [moved_out_of_main(item, module) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: moved_out_of_main(item, module) for key, item in value.items()}
    if isinstance(name := value.get("class"), str) and name.startswith("__main__:"):
        moved["class"] = f"{module}:{name.partition(':')[2]}"
    return moved


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a field can have a value; only groups and texts are looked at."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return isinstance(value, annotation)
    if annotation == str | None:
        return value is None or isinstance(value, str)
    return annotation is not str or isinstance(value, str)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of `to_json`'s result with their paths."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from flatten(item, f"{path}.{key}" if path else key)


def differences(old: Any, new: Any) -> dict[str, str]:
    """Compare two configurations field by field."""

    def shown(configuration: Any) -> dict[str, str]:
        # As JSON, because Python takes 1, 1.0 and True for equal.
        return {path: json.dumps(value) for path, value in flatten(to_json(configuration))}

    before, after = shown(old), shown(new)
    missing = "(no such field)"
    return {
        path: f"{before.get(path, missing)} -> {after.get(path, missing)}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    }


def write_configuration(folder: str | Path, configuration: Any, exp: str) -> None:
    """Write `config.json`, either completely or not at all.

    Example:
        >>> import tempfile
        >>> from fedpax.training.training_config import TrainingConfig
        >>> training = TrainingConfig(rounds=5, evaluate_every=1, checkpoint_every=1)
        >>> folder = tempfile.mkdtemp()
        >>> write_configuration(folder, training, exp="short")
        >>> read_configuration(folder) == ("short", training)
        True
    """
    content = {"version": VERSION, "exp": exp, "configuration": to_json(configuration)}
    if code := code_hashes(configuration, exp):
        content["code"] = code
    write_atomically(Path(folder) / CONFIGURATION, json.dumps(content, indent=2) + "\n")


def code_hashes(configuration: Any, exp: str) -> dict[str, str]:
    """Return the hashes of files outside of fedpax that define an experiment."""
    named = exp.partition(":")[0]
    modules = {type(part).__module__ for part in _parts(configuration)} | {named}
    own = [sys.modules.get(name) for name in modules if not is_within_fedpax(name)]
    files = {getattr(module, "__file__", None) for module in own}
    files.add(named if named.endswith(".py") else None)
    paths = sorted({Path(file).resolve() for file in files if file})
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in paths if p.is_file()}


def changed_code(folder: str | Path, configuration: Any, exp: str) -> list[str]:
    """Return the names of files that `config.json` has, and that now define other code."""
    path = Path(folder) / CONFIGURATION
    before = read_json(path).get("code") if path.exists() else None
    if not isinstance(before, dict):  # of an earlier version
        return []
    now = code_hashes(configuration, exp)
    return [name for name, text in now.items() if before.get(name, text) != text]


def read_configuration(folder: str | Path, experiment: Any = None) -> tuple[str, Any] | None:
    """Read `config.json` and rebuild the configuration; code that the file names is not run."""
    named = read_configuration_json(folder)
    classes = own_classes(experiment)
    return named and (named[0], from_json(named[1], f"{folder}/{CONFIGURATION}", classes))


def read_configuration_json(folder: str | Path) -> tuple[str, dict[str, Any]] | None:
    """Read `config.json` without rebuilding the configuration: no code of its classes runs."""
    path = (folder if isinstance(folder, PurePath) else Path(folder)) / CONFIGURATION
    try:
        if not path.exists():
            return None
        content = read_json(path)
        version, exp, configuration = (content[k] for k in ("version", "exp", "configuration"))
        for value in (exp, configuration["class"]):  # as to_json writes them
            if not isinstance(value, str):
                raise ArgumentTypeError(f"{value!r} in place of a name")
    except PermissionError as error:
        raise ConfigurationError(describe_no_permission(path)) from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}: {error}), expected a configuration as "
            "fedpax writes it. Another program has changed it. Restore it from a copy, or delete "
            "it and start the run's former command again, which writes it."
        ) from error
    if version != VERSION:
        raise ConfigurationError(
            f"{path} has version {version}, expected version {VERSION}. Run the fedpax that wrote "
            "it, or start in an empty folder."
        )
    return exp, configuration


# ---- the classes that a configuration of others may name: fedpax's and the experiment's


def name_of_class(class_: type) -> str:
    """Return `module:Name` of a class."""
    return f"{class_.__module__}:{class_.__qualname__}"


def is_within_fedpax(name: str) -> bool:
    """Return whether `module:name` is in a module of fedpax."""
    return name.partition(":")[0].startswith("fedpax.")


def own_classes(experiment: Any) -> frozenset[type]:
    """Return the dataclasses outside of fedpax that an experiment's configuration may name."""
    # Those of the experiment, its fields, and the modules that define them, imports included.
    used = {type(part) for part in _parts(experiment)}
    names = {class_.__module__ for class_ in used if not is_within_fedpax(class_.__module__)}
    modules = [sys.modules[name] for name in names if name in sys.modules]
    beside = [value for module in modules for value in vars(module).values()]
    # By name: a module that was imported again has other classes than an older experiment.
    kinds = {name_of_class(class_): class_ for class_ in beside if isinstance(class_, type)}
    kinds |= {name_of_class(class_): class_ for class_ in used}
    return frozenset(
        class_
        for class_ in kinds.values()
        if dataclasses.is_dataclass(class_) and not is_within_fedpax(class_.__module__)
    )


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))


def find_class(named: Any, classes: Collection[type]) -> Any:
    """Return the class with this `module:Name`, or None."""
    return next((class_ for class_ in classes if name_of_class(class_) == named), None)


def find_in_fedpax(named: str) -> Any:
    """Return the dataclass of fedpax with this `module:Name`; other attributes are not used."""
    module, _, name = named.partition(":")
    if not is_within_fedpax(named):
        raise ArgumentTypeError("the class has no name")
    package, _, last = module.rpartition(".")
    former = getattr(importlib.import_module(package), "FORMER_MODULES", {})
    class_: Any = importlib.import_module(former.get(last, module))
    for part in name.split("."):
        class_ = getattr(class_, part)
    is_class = isinstance(class_, type) and dataclasses.is_dataclass(class_)
    if not is_class or not is_within_fedpax(class_.__module__):
        raise ArgumentTypeError(f"{named} is not a dataclass of fedpax")
    return class_


# ---- one seed for a whole experiment: its model, its data and its cohorts

Configuration = TypeVar("Configuration")


def with_seed(configuration: Configuration, seed: int) -> Configuration:
    """Set every seed of a configuration, whatever group of fields it is in.

    A seed is an int, or None, of a field named `seed`, or whose name ends with `_seed`.

    Example:
        >>> from fedpax.experiments.fedavg_images import fedavg_digits
        >>> experiment = with_seed(fedavg_digits(), 3)
        >>> experiment.training.seed, experiment.cohort.seed
        (3, 3)
    """
    if isinstance(configuration, tuple):
        items = (with_seed(item, seed) for item in configuration)
        return tuple(items)  # type: ignore[return-value]  # of the same type
    if not dataclasses.is_dataclass(configuration) or isinstance(configuration, type):
        return configuration
    changes = {
        field.name: seed if _is_seed(field.name, value) else with_seed(value, seed)
        for field in dataclasses.fields(configuration)
        if field.init
        for value in [getattr(configuration, field.name)]
    }
    return dataclasses.replace(configuration, **changes)


def seed_paths(configuration: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the seeds of a configuration, such as `"training.seed"`."""
    if isinstance(configuration, tuple):
        for i, item in enumerate(configuration):
            yield from seed_paths(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(configuration) and not isinstance(configuration, type):
        for field in dataclasses.fields(configuration):
            item = getattr(configuration, field.name)
            inner = f"{path}.{field.name}" if path else field.name
            if _is_seed(field.name, item):
                yield inner
            else:
                yield from seed_paths(item, inner)


def _is_seed(name: str, value: Any) -> bool:
    is_number = value is None or (isinstance(value, int) and not isinstance(value, bool))
    return is_number and (name == "seed" or name.endswith("_seed"))


_PLACES = ("files", "data_dir", "heldout_sets", "begin_from", "checkpoint_dir")
_NAMED = ("weights", "tokenizer", "chat_template", "file")


def without_paths(configuration: Any) -> Any:
    """Return a configuration without the paths of this machine."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(configuration):
        value = getattr(configuration, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = without_paths(value)
        elif field.name in _NAMED and isinstance(value, str):
            changes[field.name] = Path(value).name
        elif field.default is dataclasses.MISSING:
            continue
        elif field.name in _PLACES or (
            field.name in ("dataset", "mixture") and _names_files(value or ())
        ):
            changes[field.name] = field.default
    return dataclasses.replace(configuration, **changes)


def _names_files(names: str | Sequence[str]) -> bool:
    """Return whether one of the data sets, or of a mixture's "NAME=WEIGHT", is files."""
    names = (names,) if isinstance(names, str) else names
    return any(is_files((name.rpartition("=")[0] or name).partition("#")[0]) for name in names)
