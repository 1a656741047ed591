"""Runs of a secure sum in one process, with sites that drop out."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedpax.secure_sums import CoordinatorSide, SiteSide
from fedpax.transport.message import Message, decode, encode

NAMES = ("a", "b", "c", "d", "e")
PHASES = ("keys", "share", "mask", "confirm", "reveal")
SHAPES = {"x": (3, 2), "y": (), "z": (0, 4)}


def random_values(seed: int, shapes: Mapping[str, Any] = SHAPES) -> dict[str, np.ndarray]:
    """Return int32 arrays with values of the whole range."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        for name, shape in shapes.items()
    }


def true_sum(values: Mapping[str, Mapping[str, np.ndarray]], names: Any) -> dict[str, np.ndarray]:
    """Return the sum modulo 2^32, as int32."""
    total = {}
    for key in next(iter(values.values())):
        parts = [values[name][key].astype(np.int64) for name in names]
        total[key] = (np.sum(parts, axis=0) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    return total


def make_sites(
    values: Mapping[str, Any], session: str = "s", **options: Any
) -> dict[str, SiteSide]:
    return {name: SiteSide(name, session, value, **options) for name, value in values.items()}


def over_the_wire(message: Message) -> Message:
    """Return the message as it arrives at the other side."""
    return decode(encode(message, 1 << 24), 1 << 24)


def run(
    sites: Mapping[str, SiteSide],
    drops: Mapping[str, str] = {},
    coordinator: CoordinatorSide | None = None,
) -> CoordinatorSide:
    """Run a sum; `drops` has the phase from which a site answers no more."""
    coordinator = coordinator or CoordinatorSide("s", list(sites))
    requests: dict[str, Message | None] = dict.fromkeys(sites)
    gone: set[str] = set()
    while not coordinator.done:
        gone |= {name for name, phase in drops.items() if phase == coordinator.phase}
        assert coordinator.waiting == set(requests)
        for name in set(requests) - gone:
            request = requests[name]
            answer = sites[name].answer(request and over_the_wire(request))
            assert coordinator.receive(name, over_the_wire(answer))
        requests = dict(coordinator.advance())
    return coordinator


def fixed_bytes(seed: str) -> Callable[[int], bytes]:
    """Return a function for `random` that returns the same bytes in each run."""
    count = 0

    def random(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(json.dumps([seed, count]).encode()).digest(size)

    return random
