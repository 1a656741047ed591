"""Methods in parts for a syncer and islands in one process."""

import functools

from islands.site_problem import (
    Sites,
    make_parts,
)

from fedpax.aggregators import codecs, mean

ISLANDS, STEPS = 3, 2


@functools.cache
def parts(kind="two fragments"):
    """Return a method: "two fragments" merged by direction, "plain" or "compressed" in one."""
    if kind == "two fragments":
        return make_parts(2)
    codec = codecs.e3m0() if kind == "compressed" else None
    return make_parts(1, aggregator=mean(), codec=codec, error_feedback=codec is not None)


def three(kind="two fragments", **settings):
    sites = Sites(parts(kind), **settings)
    for name in "abc":
        sites.add(name)
    return sites
