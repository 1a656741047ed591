"""Parameters that a run reads from a folder: its first ones, or frozen ones that rounds only read.

Frozen values are an argument of the round. A round that closed over the arrays would be compiled
with them as constants, in the host's memory as a whole. As an argument they stay on the devices,
sharded, and are in no checkpoint.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex

from fedpax.algorithm import FederatedAlgorithm, Metrics, State
from fedpax.clients.cohort import Cohort


class StoredParams(NamedTuple):
    """Parameters that a run reads from a folder."""

    # where they are, for messages, such as `"model.weights=models/llama"`. Empty if no folder is
    # given; `load` then raises.
    source: str
    # their shapes and dtypes, a tree of `jax.ShapeDtypeStruct` with shardings
    shapes: chex.ArrayTree
    # reads them onto these shardings. May be called several times.
    load: Callable[[], chex.ArrayTree]


def with_frozen_argument(
    make: Callable[[chex.ArrayTree], FederatedAlgorithm], shapes: chex.ArrayTree
) -> FederatedAlgorithm:
    """Make an algorithm whose round takes the frozen values of its loss as an argument.

    Returns:
        `init(params)` and `round(state, cohort, frozen)`. A `Run` with this algorithm has the
        frozen values as `Run.frozen`. The inner steps of its `parts`, if the method has some, take
        them as their last argument.
    """

    def round_with_frozen(
        state: State, cohort: Cohort, frozen: chex.ArrayTree
    ) -> tuple[State, Metrics]:
        return make(frozen).round(state, cohort)

    def inner_steps_with_frozen(*arguments: Any) -> Any:
        *inputs, frozen = arguments
        parts = make(frozen).parts
        assert parts is not None
        return parts.inner_steps(*inputs)

    frozen_round: Any = round_with_frozen
    algorithm = make(shapes)
    parts = algorithm.parts
    if parts is not None:
        parts = parts._replace(inner_steps=inner_steps_with_frozen)
    return algorithm._replace(round=frozen_round, parts=parts)
