"""Lists that users separate by commas, of names that can have commas."""

import re
from collections.abc import Callable


def split_list(text: str, exists: Callable[[str], bool]) -> list[str]:
    """Split a list at its commas, but for the commas in a name that exists."""
    parts, names = text.split(","), []
    while parts:
        joined = (n for n in range(len(parts), 1, -1) if exists(",".join(parts[:n])))
        count = next(joined, 1)
        names.append(",".join(parts[:count]))
        parts = parts[count:]
    return [name for name in names if name]


def split_names(text: str) -> list[str]:
    r"""Split a list of columns at its commas; `\,` is a comma in a name."""
    names = re.split(r"(?<!\\),", text)
    return [name.replace(r"\,", ",") for name in names if name]


def split_treatments(text: str) -> list[str]:
    """Split a list of treatments at its commas, but for commas in a name or in parentheses."""
    whole = r"[^=]+=\w+(?:\(.*\))?(?::\w+)?"
    treatments = list[str]()
    for part in split_names(text):
        if treatments and not re.fullmatch(whole, treatments[-1], re.DOTALL):
            treatments[-1] += "," + part
        else:
            treatments.append(part)
    return treatments


def escape_commas(name: str) -> str:
    """Write a name for `split_names`."""
    return name.replace(",", r"\,")
