"""Finds experiments by the names that the command line takes."""

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Any

import fedpax.experiments
from fedpax.training.experiment import Experiment


class UnknownExperimentError(ValueError):
    """There is no experiment of this name; the message offers names that are near."""


def experiments() -> dict[str, Callable[[], Experiment]]:
    """Finds the experiments that come with fedpax.

    They are the public functions of the modules in ``fedpax.experiments`` that take no arguments
    and whose annotation says that they return an :class:`Experiment`. A function whose name
    another module has used is called ``module:function``.

    Returns:
        The functions by name.
    """
    found: dict[str, Callable[[], Experiment]] = {}
    package = fedpax.experiments
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for name, function in vars(module).items():
            if (
                inspect.isfunction(function)
                and function.__module__ == info.name
                and not name.startswith("_")
                and not inspect.signature(function).parameters
                and _returns_experiment(function)
            ):
                found[name if name not in found else f"{info.name}:{name}"] = function
    return found


def find_experiment(exp: str) -> Callable[[], Experiment]:
    """Finds an experiment by the name that ``--exp`` takes.

    Args:
        exp: a name from :func:`experiments`, or ``my_package.my_module:function``, whose module
            is also looked for in the current folder.

    Returns:
        The function.

    Raises:
        UnknownExperimentError: if there is no such function.
    """
    if ":" not in exp:
        found = experiments()
        if exp not in found:
            raise UnknownExperimentError(
                f"there is no experiment {exp!r}.{did_you_mean(exp, found)} `fedpax list` shows "
                "all of them; my_package.my_module:function names one of yours."
            )
        return found[exp]
    module_name, _, name = exp.partition(":")
    if not module_name or not name:
        raise UnknownExperimentError(
            f"--exp={exp}: write my_package.my_module:function, or a name that `fedpax list` shows."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the experiment's own module misses is another matter.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UnknownExperimentError(
            f"--exp={exp}: there is no module {error.name}. It must be installed, on PYTHONPATH, "
            f"or below the current folder, {os.getcwd()}."
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownExperimentError(
            f"--exp={exp}: {module_name} has no function {name!r}.{did_you_mean(name, functions)}"
        )
    needed = [p.name for p in _parameters(function) if p.default is p.empty]
    if needed:
        raise UnknownExperimentError(
            f"--exp={exp}: {name} needs {' and '.join(needed)}, but is called without arguments. "
            "Write a function around it that gives them."
        )
    return function


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """A function's parameters but for *args and **kwargs; none of what does not tell them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _returns_experiment(function: Callable[..., Any]) -> bool:
    returned = typing.get_type_hints(function).get("return")
    return isinstance(returned, type) and issubclass(returned, Experiment)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Offers the names that are near one that is not there: a sentence, or nothing.

    Example:
        >>> did_you_mean("diloco_test", ["diloco_text", "fedavg_digits"])
        ' Did you mean diloco_text?'
    """
    close = difflib.get_close_matches(name, list(names), n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""
