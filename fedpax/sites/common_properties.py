"""What sites must have in common: by the coordinator's own contract, or as most sites have it."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

Properties = Mapping[str, str]
"""Properties of a site that must be equal at all sites, in words, by name."""

_MOST_WORDS = 200


class Outcome(NamedTuple):
    """The sites that differ.

    Attributes:
        refused: for each site that differs, what differs.
        undecided: a property that is not stated and whose values tie among the sites. None: there
            is none.
    """

    refused: dict[str, str]
    undecided: str | None


def count_votes(sites: Mapping[str, Properties], stated: Properties) -> Outcome:
    """Return the sites that differ from what the coordinator states, or from most other sites.

    A site without a property differs from none. No site counts more for being the first.
    """
    refused: dict[str, str] = {}
    undecided = None
    while True:
        left = {name: vote for name, vote in sites.items() if name not in refused}
        undecided, before = None, len(refused)
        for property_name in dict.fromkeys(p for vote in left.values() for p in vote):
            having = {n: vote[property_name] for n, vote in left.items() if property_name in vote}
            if property_name in stated:
                expected, whose = stated[property_name], "as the syncer states it"
            else:
                first, *others = Counter(having.values()).most_common()
                if others and others[0][1] == first[1]:
                    undecided = _describe_tie(property_name, having)
                    continue
                expected = first[0]
                whose = f"as {first[1]} of {len(having)} sites have it"
            for name, value in having.items():
                if value != expected and name not in refused:
                    refused[name] = (
                        f"{property_name} is {_shorten(value)} at this site, expected "
                        f"{_shorten(expected)}, {whose}"
                    )
        if len(refused) == before:
            return Outcome(refused, undecided)


def _describe_tie(property_name: str, having: Mapping[str, str]) -> str:
    shown = ", ".join(f"{_shorten(value)} at {name}" for name, value in list(having.items())[:5])
    return f"{property_name} is {shown}"


def _shorten(value: str) -> str:
    return repr(value if len(value) <= _MOST_WORDS else f"{value[:_MOST_WORDS]}...")
