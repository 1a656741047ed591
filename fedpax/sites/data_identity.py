"""The identity of an island's data, equal for all islands of a run, which divide one corpus."""

import hashlib
from collections.abc import Mapping

from fedpax.sites.transport.requests import MAX_TEXT

MAX_DATA_SETS = 1000


def shorten(data: Mapping[str, str]) -> dict[str, str]:
    """Shorten a fingerprint of a stream of cohorts so that it fits a message."""
    sets = {_short(name): _short(text) for name, text in data.items()}
    if len(sets) > MAX_DATA_SETS:
        return {f"{len(sets)} data sets": hashlib.sha256(repr(sets).encode()).hexdigest()}
    return sets


def describe_other_data(
    name: str, own: Mapping[str, str], other_name: str, other: Mapping[str, str]
) -> str | None:
    """Describe the first difference between the data of two islands; None if there is none."""
    # An empty fingerprint is unknown: nothing is compared.
    if not own or not other or own == other:
        return None
    found = next(one for one in sorted({**own, **other}) if own.get(one) != other.get(one))
    return (
        f"island {name!r} has other data than island {other_name!r}: {found!r} has "
        f"{own.get(found, 'no documents')}, and at {other_name!r} "
        f"{other.get(found, 'no documents')}. The islands of a run divide one corpus, and each "
        "reads its shard alone: with a corpus of its own, each would leave out most of its "
        "documents. Give all islands the same files (--data.data_dir names their folder)."
    )


def _short(text: str) -> str:
    if 0 < len(text) <= MAX_TEXT and text.isprintable():
        return text
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
