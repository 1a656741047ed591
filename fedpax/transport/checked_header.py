"""Checked access to the header of a message from an untrusted process."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from fedpax.transport.calls import MalformedError

MAX_TEXT = 200


class CheckedHeader:
    """The header of a message, whose fields are checked when they are read."""

    # Every method raises a `MalformedError` if the field has another type, or is missing and not
    # optional.

    def __init__(self, header: Mapping[str, Any]) -> None:
        self._header = header

    def text(self, name: str) -> str:
        """Return a short text without control characters, which would reach the user's terminal."""
        value = self._header.get(name)
        fits = isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()
        if not isinstance(value, str) or not fits:
            raise self._error(name, f"a printable text of 1 to {MAX_TEXT} characters")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a short text, or None."""
        return None if self._header.get(name) is None else self.text(name)

    def count(self, name: str, least: int = 0) -> int:
        """Return an integer that is not below `least`."""
        value = self._header.get(name)
        if type(value) is not int or not least <= value < 2**53:
            raise self._error(name, f"an integer of at least {least} and below 2^53")
        return value

    def optional_count(self, name: str) -> int | None:
        """Return an integer of at least 0, or None."""
        return None if self._header.get(name) is None else self.count(name)

    def number(self, name: str) -> float:
        """Return a finite number, or NaN for null: JSON has no NaN."""
        value = self._header.get(name, "")
        if value is None:
            return math.nan
        # Integers of JSON can be larger than any float.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise self._error(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a bool; False if the field is missing."""
        value = self._header.get(name, False)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a dict."""
        value = self._header.get(name)
        if not isinstance(value, dict):
            raise self._error(name, "a dict")
        return value

    def texts(self, name: str, most: int) -> dict[str, str]:
        """Return short texts by short names, at most `most`; empty if the field is missing."""
        value = self._header.get(name, {})
        if not isinstance(value, dict) or len(value) > most:
            raise self._error(name, f"at most {most} texts by name")
        for key in value:
            CheckedHeader({"name": key}).text("name"), CheckedHeader(value).text(key)
        return value

    def fragment(self, num_fragments: int) -> int:
        """Return the fragment's number."""
        value = self.count("fragment")
        if value >= num_fragments:
            raise self._error("fragment", f"a number below {num_fragments}")
        return value

    def versions(self, num_fragments: int) -> list[int]:
        """Return one integer for each fragment."""
        value = self._header.get("versions")
        if not isinstance(value, list) or len(value) != num_fragments:
            raise self._error("versions", f"{num_fragments} integers")
        if not all(type(version) is int and version >= -1 for version in value):
            raise self._error("versions", f"{num_fragments} integers of at least -1")
        return value

    def _error(self, name: str, expected: str) -> MalformedError:
        return MalformedError(
            f"the message's field {name!r} is {repr(self._header.get(name))[:100]}, expected "
            f"{expected}. Use the same version of fedpax on both sides."
        )
