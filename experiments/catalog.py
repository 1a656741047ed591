"""The catalog of experiments: find one by the name that the command line takes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpax.errors import FedpaxError, did_you_mean
from fedpax.experiments.listing import EXPERIMENTS, GROUPS

if TYPE_CHECKING:
    from fedpax.training.experiment import Experiment


class UnknownExperimentError(FedpaxError, ValueError):
    """An experiment that does not exist; the message lists similar names."""


class ExperimentGroup(NamedTuple):
    """Experiments to compare with each other. `--exp=GROUP:NAME` is one of them.

    Attributes:
        experiments: the experiments by name.
        target: the `--target` of `fedpax compare`. Default None: none.
    """

    experiments: Mapping[str, Experiment]
    target: str | None = None


def experiments() -> dict[str, Callable[[], Experiment]]:
    """Import the experiments that come with fedpax; return their functions by name."""
    return {name: find_experiment(name) for name in EXPERIMENTS}


def find_group(name: str) -> ExperimentGroup:
    """Return a group of experiments.

    Args:
        name: a name in `GROUPS`, or a function as in `find_experiment`.

    Raises:
        UnknownExperimentError: no group has the name.

    Example:
        >>> list(find_group("methods_digits").experiments)[:3]
        ['fedavg', 'fedavgm', 'fedadagrad']
    """
    if (group := group_or_none(name)) is None:
        raise UnknownExperimentError(
            f"--exp={name} returns no ExperimentGroup, expected one. Leave out what follows the "
            "function's name if it returns an experiment."
        )
    return group


def group_or_none(name: str) -> ExperimentGroup | None:
    """Return the group of experiments that a name on the command line names, if any."""
    if name in GROUPS:
        made = _import_shipped(name)()
    elif ":" not in name or _is_group_name(name.rpartition(":")[0]):
        return None
    else:
        made = find_experiment(name)()
    if not isinstance(made, ExperimentGroup):
        return None
    _check_group(name, made)
    return made


def _is_group_name(text: str) -> bool:
    """Return whether `text:NAME` can only be an experiment of a group."""
    return text in GROUPS or ":" in text


def _check_group(exp: str, group: ExperimentGroup) -> None:
    """Check that a group has experiments, and that their names can name folders."""
    from fedpax.training.experiment import Experiment

    if not isinstance(group.experiments, Mapping):
        raise UnknownExperimentError(
            f"--exp={exp} is a group of a {type(group.experiments).__name__}, expected a dict of "
            "experiments by name. Return ExperimentGroup({'name': experiment})."
        )
    if not group.experiments:
        raise UnknownExperimentError(
            f"--exp={exp} is a group of 0 experiments, expected at least one. Add one to it."
        )
    for name, experiment in group.experiments.items():
        if not (isinstance(name, str) and re.fullmatch(r"\w[\w.+-]*", name)):
            raise UnknownExperimentError(
                f"--exp={exp}: the group has an experiment of the name {name!r}, expected letters, "
                "digits and any of _ . + -, because it names a folder. Rename the experiment."
            )
        if not isinstance(experiment, Experiment):
            raise UnknownExperimentError(
                f"--exp={exp}: {name!r} of the group is a {type(experiment).__name__}, expected a "
                "fedpax.training.experiment.Experiment. If it is a function, add its result."
            )


def describe_group(exp: str, group: ExperimentGroup) -> str:
    """Return the message where a group is named and one experiment is expected."""
    members = group.experiments
    return (
        f"--exp={exp} is a group of {len(members)} experiments, expected one of them: "
        f"{', '.join(members)}. Set for example --exp={exp}:{next(iter(members))}. "
        "`fedpax compare` takes the whole group."
    )


def expand_groups(names: Iterable[str]) -> list[str]:
    """Replace the name of each group by the names of its experiments."""
    expanded: list[str] = []
    for name in names:
        group = group_or_none(name)
        expanded += [name] if group is None else [f"{name}:{entry}" for entry in group.experiments]
    return expanded


def is_shipped(exp: str) -> bool:
    """Return whether an experiment comes with fedpax, or its name is empty."""
    module = exp.rpartition(":")[0]
    is_module = module.startswith("fedpax.") and not module.endswith(".py")
    return not exp or exp in EXPERIMENTS or module in GROUPS or is_module


def find_experiment(exp: str) -> Callable[[], Experiment]:
    """Find an experiment by the name that `--exp` takes.

    Args:
        exp: a name from `EXPERIMENTS`; `my_package.my_module:function`, of a module that is
            installed, on `PYTHONPATH` or below the current folder; `path/to/file.py:function`; or
            `group:name`, with a group from `GROUPS` or such a function.

    Returns:
        The function that makes the experiment.

    Raises:
        UnknownExperimentError: there is no such function.
    """
    group, _, member = exp.rpartition(":")
    if _is_group_name(group):
        return _find_member(group, member)
    if ":" not in exp:
        if found_group := group_or_none(exp):
            raise UnknownExperimentError(describe_group(exp, found_group))
        if exp not in EXPERIMENTS:
            raise UnknownExperimentError(
                f"there is no experiment {exp!r}.{did_you_mean(exp, [*EXPERIMENTS, *GROUPS])} Run "
                "`fedpax list` to "
                "see all names, or give my_package.my_module:function or path/to/file.py:function."
            )
        return _import_shipped(exp)
    module_name, _, name = exp.rpartition(":")
    if not module_name or not name:
        raise UnknownExperimentError(
            f"--exp={exp} has no module or no function, expected a name from `fedpax list`, "
            "my_package.my_module:function or path/to/file.py:function. Add what is missing."
        )
    if module_name.endswith(".py"):
        module = _import_file(exp, Path(module_name))
    else:
        module = _import_module(exp, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        functions = {key: f for key, f in vars(module).items() if inspect.isfunction(f)}
        hint = did_you_mean(name, functions) or _list_own_functions(module, functions)
        raise UnknownExperimentError(f"--exp={exp}: {module_name} has no function {name!r}.{hint}")
    needed = [p.name for p in _parameters(function) if p.default is p.empty]
    if needed:
        raise UnknownExperimentError(
            f"--exp={exp}: {name} needs {' and '.join(needed)}, but is called without arguments. "
            "Write a function around it that gives them."
        )
    return function


def _import_shipped(name: str) -> Callable[[], Any]:
    module = {**EXPERIMENTS, **GROUPS}[name].module
    function: Callable[[], Any] = getattr(
        importlib.import_module(f"fedpax.experiments.{module}"), name
    )
    return function


def _list_own_functions(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> str:
    """Return a sentence with up to ten public functions that a module defines."""
    public_names = [
        name
        for name, function in functions.items()
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not public_names:
        return " It defines no public function. Add one that returns an experiment."
    more = " and others" if len(public_names) > 10 else ""
    return f" Use one of its functions: {', '.join(public_names[:10])}{more}."


def _find_member(group: str, name: str) -> Callable[[], Experiment]:
    """Return a function that makes an experiment of a group."""
    members = find_group(group).experiments
    if name not in members:
        raise UnknownExperimentError(
            f"--exp={group}:{name}: the group {group} has no experiment {name!r}, expected one of "
            f"{', '.join(members)}.{did_you_mean(name, members)}"
        )

    def make() -> Experiment:
        return members[name]

    summary = GROUPS[group].summary if group in GROUPS else ""
    make.__doc__ = f"{name}: one of the group {group}.\n\n{summary}".rstrip()
    return make


def _import_module(exp: str, module_name: str) -> ModuleType:
    """Import a module that is installed, on PYTHONPATH or below the current folder."""
    importlib.invalidate_caches()  # the file can be new
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        folder = folder_of_module(module_name)
        if folder is None:
            return importlib.import_module(module_name)
        return import_newest(module_name, folder)
    except ModuleNotFoundError as error:
        # If another module is missing, the experiment's own module imports it: keep the traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UnknownExperimentError(
            f"--exp={exp}: there is no module {error.name}. It must be installed, on PYTHONPATH, "
            f"or below the current folder, {os.getcwd()}. A file needs its ending: "
            "path/to/file.py:function."
        ) from None


def _import_file(exp: str, path: Path) -> ModuleType:
    """Import a file as the module of its name, with its folder on the path."""
    # A file that was edited since is imported again.
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UnknownExperimentError(
            f"--exp={exp}: there is no file {path}, expected a Python file. Set its path from the "
            f"current folder, {os.getcwd()}, or its full path."
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules.get(path.stem)
    is_free = module is None or Path(getattr(module, "__file__", None) or "").resolve() == path
    if is_free and "." not in path.stem:
        # Another thread may still import a known module.
        module = import_newest(path.stem, path.parent)
    if module is None or Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise UnknownExperimentError(
            f"--exp={exp}: another module has the file's name, {path.stem}, expected a name "
            "that no imported module has, without dots. Rename the file."
        )
    return module


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters except *args and **kwargs; none for some built-in ones."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


# ---- import the module of a user's experiment, and import it again when it was edited
#
# A notebook's kernel runs many commands in one process. Python itself imports a module once.


class _Imports(NamedTuple):
    """The modules of a folder that experiments have imported."""

    former: frozenset[str]  # modules that other code had imported
    when: float  # time of the last import; modules that were imported later have no digest
    digests: dict[str, bytes]  # of the files by module


_IMPORTS: dict[Path, _Imports] = {}
_LOCK = threading.RLock()  # threads can run commands, and see no half of an import


def import_newest(name: str, folder: Path) -> ModuleType:
    """Import a module; if it or a module beside it was edited since, import all of them again."""
    # Installed modules and modules that other code had imported stay as they are.
    with _LOCK:
        seen = _IMPORTS.get(folder)
        if seen is None:
            seen = _Imports(frozenset(sys.modules) - {name}, _process_start(), {})
        files = {n: file for n, file in _files_below(folder).items() if n not in seen.former}
        if any(_is_edited(n, file, seen) for n, file in files.items()):
            for n, file in files.items():
                del sys.modules[n]
                # Its bytecode counts as newer than an edit in the same second of the same length.
                with contextlib.suppress(OSError, NotImplementedError):
                    os.unlink(importlib.util.cache_from_source(file))
        importlib.invalidate_caches()
        when = time.time()
        module = importlib.import_module(name)
        digests = {
            n: _digest(file) for n, file in _files_below(folder).items() if n not in seen.former
        }
        _IMPORTS[folder] = _Imports(seen.former, when, digests)
        return module


def folder_of_module(name: str) -> Path | None:
    """Return the folder on the path in which a module is found; None if it is installed."""
    with contextlib.suppress(ValueError):  # a module without a specification, such as __main__
        if (spec := importlib.util.find_spec(name.partition(".")[0])) is not None:
            folders = spec.submodule_search_locations
            place = next(iter(folders), None) if folders is not None else spec.origin
            if place and not _is_installed(place):
                return Path(place).resolve().parent
    return None


def _files_below(folder: Path) -> dict[str, str]:
    """Return the files of the imported modules below a folder; installed ones are left out."""
    imported = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_below = file.startswith(f"{folder}{os.sep}") and not _is_installed(file)
        if (
            is_below
            and file.endswith(".py")
            and name.partition(".")[0] not in ("fedpax", "__main__")
        ):
            imported[name] = file
    return imported


def _is_installed(place: str) -> bool:
    return "site-packages" in place or place.startswith(sys.base_prefix + os.sep)


def _is_edited(name: str, file: str, seen: _Imports) -> bool:
    if name in seen.digests:
        return _digest(file) != seen.digests[name]
    try:
        return os.stat(file).st_mtime > seen.when - 1.0  # clocks of file systems are coarse
    except OSError:
        return True


def _digest(file: str) -> bytes:
    try:
        return hashlib.sha256(Path(file).read_bytes()).digest()
    except OSError:
        return b""


def _process_start() -> float:
    """Return when this process started: a file that is older was imported as it is."""
    # Where this is unknown, return 0: then a module that other code has imported is imported again.
    try:
        status = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(status.rpartition(")")[2].split()[19])
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
