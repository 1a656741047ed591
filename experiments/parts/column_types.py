"""parse_types: types of columns as experiments' configurations have them."""

from collections.abc import Sequence

from fedpax.errors import ArgumentError


def parse_types(texts: Sequence[str]) -> dict[str, str]:
    """Parse `data.types` for `fedpax.data.load`.

    Example:
        >>> parse_types(["zip=string", "tokens=uint16"])
        {'zip': 'string', 'tokens': 'uint16'}
    """
    types = {}
    for text in texts:
        name, equals, data_type = text.rpartition("=")
        if not equals:
            raise ArgumentError(
                f"data.types has {text!r}, expected COLUMN=TYPE. Set for example --data.types "
                "zip=string."
            )
        types[name] = data_type
    return types
