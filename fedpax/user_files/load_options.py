"""LoadOptions: how files become a source, checked and passed on as one value."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self


class LoadOptions(NamedTuple):
    """How files become a source; `fedpax.data.load` describes each option."""

    split: str | None = None
    client: str | None = None
    label: str | None = None
    partition: str | None = None
    columns: Sequence[str] = ()
    optional_columns: Sequence[str] = ()
    types: Mapping[str, str] | None = None
    delimiter: str | None = None
    decimal_point: str | None = None
    image_size: tuple[int, int] | None = None
    heldout_fraction: float = 0.0
    heldout_by: str = "example"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a function that takes them by name."""
        return cls(**{name: arguments[name] for name in cls._fields if name in arguments})
