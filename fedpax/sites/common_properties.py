"""Compare sites with what the coordinator states, or else with most sites."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

Properties = Mapping[str, str | None]
"""Properties of a site that must be equal at all sites, in words, by name; None differs from none.
"""

ABSENT = "absent"


class Needed(str):
    """The name of a property that no site lacks, and how a site can do without it."""

    remedy: str

    def __new__(cls, name: str, remedy: str) -> "Needed":
        """Make a name."""
        self = super().__new__(cls, name)
        self.remedy = remedy
        return self


_MOST_WORDS = 200


class Outcome(NamedTuple):
    """The sites that differ.

    Attributes:
        refused: for each site that differs, what differs.
        undecided: the properties that are not stated and whose values tie among the sites, at most
            three. None: there is none.
    """

    refused: dict[str, str]
    undecided: str | None


def count_votes(sites: Mapping[str, Properties], stated: Mapping[str, str]) -> Outcome:
    """Return the sites that differ from what the coordinator states, or from most other sites.

    A site without a property differs from none, unless the property is needed. No site counts more
    for being the first.
    """
    refused: dict[str, str] = {}
    while True:
        left = {name: vote for name, vote in sites.items() if name not in refused}
        ties, before = [], len(refused)
        names = [p for vote in left.values() for p in vote]
        needed = [p for p in names if isinstance(p, Needed)]
        for property_name in dict.fromkeys([*needed, *names]):
            having = _values(property_name, left)
            if not having:
                continue
            if property_name in stated:
                expected, whose = stated[property_name], "as the syncer states it"
            else:
                first, *others = Counter(having.values()).most_common()
                if others and others[0][1] == first[1]:
                    ties.append(_describe_tie(property_name, having))
                    continue
                expected = first[0]
                whose = f"as {first[1]} of {len(having)} sites have it"
            for name, value in having.items():
                if value != expected and name not in refused:
                    refused[name] = (
                        f"{property_name} is {_shorten(value)} at this site, expected "
                        f"{_shorten(expected)}, {whose}"
                    ) + _remedy(property_name, {value, expected})
        if len(refused) == before:
            return Outcome(refused, "; ".join(ties[:3]) or None)


def _values(property_name: str, sites: Mapping[str, Properties]) -> dict[str, str]:
    """Return the value of a property at each site that has one, or needs one."""
    lacking = ABSENT if isinstance(property_name, Needed) else None
    values = {name: vote.get(property_name, lacking) for name, vote in sites.items()}
    return {name: value for name, value in values.items() if value is not None}


def _describe_tie(property_name: str, having: Mapping[str, str]) -> str:
    shown = ", ".join(f"{_shorten(value)} at {name}" for name, value in list(having.items())[:5])
    return f"{property_name} is {shown}" + _remedy(property_name, having.values())


def _remedy(property_name: str, values: Collection[str]) -> str:
    if ABSENT in values and isinstance(property_name, Needed):
        return f" ({property_name.remedy})"
    return ""


def _shorten(value: str) -> str:
    return repr(value if len(value) <= _MOST_WORDS else f"{value[:_MOST_WORDS]}...")
