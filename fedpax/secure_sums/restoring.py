"""Restore secrets from shares of which some can be wrong."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fedpax.secure_sums.shamir import combine

MOST_SUBSETS = 500


class Restored(NamedTuple):
    """A secret, and the places of wrong shares: none if the first shares restore the secret."""

    secret: bytes
    wrong: frozenset[int] = frozenset()


def restore(
    shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]
) -> Restored | None:
    """Restore a secret from any `threshold` shares whose secret fits; None without such shares."""
    for number, chosen in enumerate(_subsets(sorted(shares), threshold)):
        secret = combine({place: shares[place] for place in chosen})
        if secret and fits(secret):
            if not number:
                return Restored(secret)
            # A share of the same polynomial can take the place of any other one.
            rest = {place: shares[place] for place in chosen[1:]}
            others = shares.keys() - set(chosen)
            wrong = {x for x in others if combine({**rest, x: shares[x]}) != secret}
            return Restored(secret, frozenset(wrong))
    return None


def _subsets(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield all subsets or, if they are many, the first one and random ones."""
    if math.comb(len(places), size) <= MOST_SUBSETS:
        yield from itertools.combinations(places, size)
        return
    yield places[:size]
    draw = random.SystemRandom()  # no site can foresee the subsets
    for _ in range(MOST_SUBSETS):
        yield sorted(draw.sample(places, size))
