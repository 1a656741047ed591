"""CategoryValues: the values of a category, and the number of clients that have each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from fedpax.data.tables.treatments import Treatment
from fedpax.data.tables.values import encode_texts


class CategoryValues:
    """The values of a category, and the number of clients that have each."""

    def __init__(self, treatment: Treatment) -> None:
        self._stated = treatment.values
        self._clients: dict[str, int] = {}
        self._last: tuple[int, set[str]] = (-1, set())  # a client, and its values until now

    def add(self, column: Any, clients: Int[np.ndarray, " examples"]) -> None:
        """Add examples, in which the examples of a client follow one another."""
        distinct, codes = encode_texts(column)
        if self._stated is not None:
            self._clients |= dict.fromkeys(distinct, 1)
            return
        # Each value of each client once: a client says which values it has, not how often.
        present = codes >= 0
        count = max(len(distinct), 1)
        pairs = np.unique(clients[present] * count + codes[present])
        having = np.bincount(pairs % count, minlength=len(distinct)).tolist()
        last, before = self._last
        again = {distinct[pair % count] for pair in pairs[pairs // count == last].tolist()} & before
        for value, number in zip(distinct, having, strict=False):
            self._clients[value] = self._clients.get(value, 0) + number - (value in again)
        if len(clients):
            own = int(clients[-1])
            values = {distinct[pair % count] for pair in pairs[pairs // count == own].tolist()}
            self._last = own, values | (before if own == last else set())

    def choose(self, min_clients: int) -> tuple[tuple[str, ...], bool]:
        """Return the categories, and whether a client has another value."""
        if self._stated is not None:
            return self._stated, not self._clients.keys() <= {*self._stated}
        return common_values(self._clients, min_clients)

    def to_json(self) -> dict[str, Any]:
        """Return what a site tells others: the numbers, or whether it has a value not stated."""
        if self._stated is not None:
            return {"other": self.choose(1)[1]}
        return {"values": self._clients}


def common_values(clients: Mapping[str, int], min_clients: int) -> tuple[tuple[str, ...], bool]:
    """Return the values that enough clients have, in order, and whether there are others."""
    kept = sorted(value for value, n in clients.items() if n >= min_clients)
    return tuple(kept), len(kept) < len(clients)
