"""The updates of islands: what they carry, and which ones the syncer drops."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from fedpax.algorithm import AlgorithmParts
from fedpax.islands.fragment_format import describe_other_arrays
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import MalformedError

LARGEST_NORM, LARGEST_LOSS = 1e18, 1e38
"""Beyond them an update is dropped in any case: its square, or the sum of losses, overflows."""


class Update(NamedTuple):
    """An update of a fragment that waits for its merge."""

    island: str
    incarnation: str
    sequence: int  # its number, which grows with each update of the process
    merge: int  # the merge that the island sent it for
    # the island's number of merges of the fragment when it encoded the update
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing uses
    base: int  # the island's number of merges of the fragment at the update's first step
    tokens: float  # tokens of its steps
    steps: int
    loss: float  # mean loss of the island's last S steps; NaN if it is not finite
    arrays: Mapping[str, np.ndarray]  # the encoded outer gradient
    shard: int  # the island's shard when it encoded the update

    def counting(self, steps: int) -> "Update":
        """Return the update with fewer steps, and tokens in proportion."""
        return self._replace(steps=steps, tokens=self.tokens * (steps / self.steps))


def read_update(
    request: CheckedHeader, arrays: Mapping[str, np.ndarray], shard: int, num_shards: int
) -> Update:
    """Read an update from the message that brings it."""
    # An update that was encoded for another shard than the island has now names it.
    stated = request.optional_count("shard")
    if stated is not None and stated >= num_shards:
        raise MalformedError(
            f"the update is encoded for shard {stated}, expected a number below {num_shards}. Use "
            "the same version of fedpax on both sides."
        )
    return Update(
        request.text("island"),
        request.text("incarnation"),
        request.count("sequence", least=1),
        request.count("merge"),
        request.count("count"),
        request.count("base"),
        request.number("tokens"),
        request.count("update_steps", least=1),
        request.number("loss"),
        arrays,
        shard if stated is None else stated,
    )


def check_update(
    update: Update,
    p: int,
    version: int,
    tokens_per_step: float,
    wire_shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Refuse an update that no island of this run can have sent."""
    if not update.base <= update.count <= version:
        raise MalformedError(
            f"the update of fragment {p} begins at merge {update.base} and is encoded for "
            f"{update.count}, but the fragment has {version}. Stop this island; start it in "
            "an empty --job_log_dir."
        )
    if not 0 < update.tokens <= tokens_per_step * update.steps:
        raise MalformedError(
            f"the update claims {update.tokens:g} tokens in {update.steps} steps, expected at "
            f"most {tokens_per_step:g} per step. Use the same data settings everywhere."
        )
    if difference := describe_other_arrays(update.arrays, wire_shapes):
        raise MalformedError(
            f"the update of fragment {p} has other parameters: {difference}. Use the same "
            "model and the same version of fedpax on both sides."
        )


def why_dropped(update: Update, norm: float, version: int, parts: AlgorithmParts) -> str:
    """Return why an update of this L2 norm is dropped, a count of `Totals`; "" if it is not."""
    if not math.isfinite(norm) or not abs(update.loss) < LARGEST_LOSS:
        return "not_finite"
    if norm > min(parts.max_norm or math.inf, LARGEST_NORM):
        return "too_large"
    return "stale" if version - update.base > parts.max_staleness else ""
