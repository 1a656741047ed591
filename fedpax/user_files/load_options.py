"""LoadOptions: how files become a source, checked and passed on as one value."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from fedpax.checks import check_distinct
from fedpax.errors import ArgumentError


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
    texts: Mapping[str, str] | None = None  # columns that need a text, by how to name another one

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a function that takes them by name."""
        return cls(**{name: arguments[name] for name in cls._fields if name in arguments})


def parse_types(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse the texts of a flag for `LoadOptions.types`.

    Example:
        >>> parse_types("--types", ["zip=string", "tokens=uint16"])
        {'zip': 'string', 'tokens': 'uint16'}
    """
    pairs = [text.rpartition("=") for text in texts]
    for text, (_, equals, _) in zip(texts, pairs, strict=True):
        if not equals:
            raise ArgumentError(
                f"{flag} has {text!r}, expected COLUMN=TYPE. Set for example {flag}=zip=string."
            )
    check_distinct(flag, [name for name, _, _ in pairs], remedy="Leave out all but one.")
    return {name: data_type for name, _, data_type in pairs}
