"""The mark `each_value`: of a product of parameters, few cases are fast."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest


def fewest_with_each_value(cases: Sequence[Mapping[str, object]]) -> set[int]:
    """Choose the cases, by index, that together have each value of each parameter."""
    pairs = [{(name, id(value)) for name, value in case.items()} for case in cases]
    used, chosen = Counter[tuple[str, int]](), set[int]()
    while any(pair not in used for case in pairs for pair in case):

        def rank(k: int) -> tuple[int, int]:
            return sum(pair in used for pair in pairs[k]), sum(used[pair] for pair in pairs[k])

        best = min(set(range(len(cases))) - chosen, key=rank)
        chosen.add(best)
        used.update(pairs[best])
    return chosen


def mark_repeated_values(items: list[pytest.Item]) -> None:
    """Mark as slow what `each_value` leaves to `make test-all`."""
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_value") and not item.get_closest_marker("slow"):
            products[item.path, item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        chosen = fewest_with_each_value([item.callspec.params for item in cases])
        for k in set(range(len(cases))) - chosen:
            cases[k].add_marker(pytest.mark.slow)
