"""The identity of an island's data, equal for all islands of a run, which divide one corpus."""

import hashlib
from collections.abc import Mapping

from fedpax.transport.checked_header import MAX_TEXT

MAX_DATA_SETS = 1000


def shorten(data: Mapping[str, str]) -> dict[str, str]:
    """Shorten a fingerprint of a stream of cohorts so that it fits a message."""
    sets = {_short(name): _short(text) for name, text in data.items()}
    if len(sets) > MAX_DATA_SETS:
        return {f"{len(sets)} data sets": hashlib.sha256(repr(sets).encode()).hexdigest()}
    return sets


def describe_other_data(
    name: str, data: Mapping[str, str], other_name: str, other_data: Mapping[str, str]
) -> str | None:
    """Describe the first difference between the data of two islands; None if there is none."""
    # An empty fingerprint is unknown: nothing is compared.
    if not data or not other_data or data == other_data:
        return None
    names = sorted({**data, **other_data})
    differing = next(name for name in names if data.get(name) != other_data.get(name))
    return (
        f"island {name!r} has other data than island {other_name!r}: {differing!r} has "
        f"{data.get(differing, 'no documents')}, and at {other_name!r} "
        f"{other_data.get(differing, 'no documents')}. The islands of a run divide one corpus, "
        "and each reads its shard alone: with a corpus of its own, each would leave out most of "
        "its documents. Give all islands the same files (--data.data_dir names their folder)."
    )


def _short(text: str) -> str:
    if 0 < len(text) <= MAX_TEXT and text.isprintable():
        return text
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
