"""One seed for a whole experiment: its model, its data and its cohorts."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

Configuration = TypeVar("Configuration")


def with_seed(configuration: Configuration, seed: int) -> Configuration:
    """Set every seed of a configuration, whatever group of fields it is in.

    A seed is an int, or None, of a field named `seed`, or whose name ends with `_seed`.

    Args:
        configuration: a frozen dataclass, such as an experiment.
        seed: the seed.

    Returns:
        A new configuration.

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
