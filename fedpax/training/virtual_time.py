"""Training over virtual time: cohorts with schedules, and rounds that report their second."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedpax.algorithm import FederatedAlgorithm, Metrics, Params, State
from fedpax.chips import chip_of
from fedpax.clients.cohort import Cohort, CohortStream, fingerprint
from fedpax.models.transformer_config import model_flops_utilization
from fedpax.training.experiment import Run

VIRTUAL_SECONDS = "virtual_seconds"
"""Name of the metric: the second of simulated time at which a round ends."""


class TimedSchedule(NamedTuple):
    """The schedule of a round, and when the round ends."""

    schedule: chex.ArrayTree  # the method's schedule, such as `fedpax.clients.ArrivalOrder`
    # float32 `[participants]`, the second of simulated time at which the round ends, the same for
    # all of them
    seconds: Float[jax.Array | np.ndarray, " participants"]


def with_virtual_seconds(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Report the simulated time of each round, as the metric `"virtual_seconds"`.

    Example:
        >>> import optax
        >>> from fedpax.algorithms import async_diloco
        >>> from fedpax.clients import ArrivalOrder
        >>> algorithm = with_virtual_seconds(async_diloco(
        ...     lambda w, x: (jnp.mean((w - x) ** 2), {}),
        ...     islands=2,
        ...     inner_optimizer=optax.sgd(0.5),
        ... ))
        >>> order = ArrivalOrder(np.array([0, 1]))
        >>> cohort = Cohort(jnp.ones((2, 1, 3)), schedule=TimedSchedule(order, np.full(2, 7.5)))
        >>> _, metrics = algorithm.round(algorithm.init(jnp.float32(0.0)), cohort)
        >>> metrics["virtual_seconds"].item()
        7.5
    """

    def timed_round(state: State, cohort: Cohort, *frozen: Any) -> tuple[State, Metrics]:
        timed: Any = cohort.schedule
        state, metrics = algorithm.round(state, cohort._replace(schedule=timed.schedule), *frozen)
        return state, metrics | {VIRTUAL_SECONDS: jnp.max(timed.seconds).astype(jnp.float32)}

    return algorithm._replace(round=timed_round)


class ScheduledRounds:
    """A stream of cohorts, each changed by a function of the cohort and its round.

    Args:
        cohorts: the stream of cohorts.
        attach: `(cohort, round) -> cohort`, with rounds counted from 0. It adds a schedule, sets
            weights or augments images, for example.

    Example:
        >>> from fedpax.data import token_rounds
        >>> sizes = dict(islands=1, local_steps=2, batch_size=1, seq_len=4)
        >>> stream = ScheduledRounds(
        ...     token_rounds([{"text": "to be"}], **sizes),
        ...     lambda cohort, r: cohort._replace(num_steps=np.array([r])),
        ... )
        >>> [next(stream).num_steps.item() for _ in range(3)]
        [0, 1, 2]
    """

    def __init__(self, cohorts: CohortStream, attach: Callable[[Cohort, int], Cohort]) -> None:
        self._cohorts, self._attach = cohorts, attach
        self.num_clients: int | None = getattr(cohorts, "num_clients", None)
        self._round = 0

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of the data: see `IdentifiedStream`."""
        return fingerprint(self._cohorts)

    def __next__(self) -> Cohort:
        """Return the cohort of the next round."""
        cohort = self._attach(next(self._cohorts), self._round)
        self._round += 1
        return cohort

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last round, as JSON values."""
        return {"round": self._round, "cohorts": self._cohorts.get_state()}

    def set_state(self, state: Any) -> None:
        """Move to a position from `get_state`."""
        cohorts = state["cohorts"]
        if isinstance(cohorts, dict) and "round" in cohorts:
            cohorts = cohorts | {"round": state["round"]}
        self._cohorts.set_state(cohorts)
        self._round = int(state["round"])


# ---- what rounds cost: bytes of asynchronous rounds from their schedules, and the use of the chips
#
# The loop over the arrivals of a round is as long as its schedule says, so the compiled text does
# not tell how often its collectives run. These collectives also belong to a simulation: a server
# would exchange values with the participants that arrive, and with no others.

UPLOADED_BYTES = "uploaded_bytes"
"""Name of the metric: bytes of the updates that participants send to the server in a round."""

BROADCAST_BYTES = "broadcast_bytes"
"""Name of the metric: bytes of the models that the server sends to participants in a round."""

Count = Callable[[Any, Metrics], tuple[Any, Any]]
"""`(schedule, metrics) -> (number of updates, number of models)` of a round."""


def with_exchanged_bytes(
    algorithm: FederatedAlgorithm,
    count: Count,
    *,
    update_bytes: Callable[[Params], float] | None = None,
) -> FederatedAlgorithm:
    """Report the bytes of each round, as the metrics `uploaded_bytes` and `broadcast_bytes`.

    They are sums over all participants. Where the compiled round leaves its bytes unknown, the
    training loop logs `uploaded_bytes` divided by the number of participants: as the operand of an
    all-reduce, what one participant sends.

    Example:
        >>> import optax
        >>> from fedpax.algorithms import async_diloco
        >>> from fedpax.clients import ArrivalOrder
        >>> algorithm = with_exchanged_bytes(
        ...     async_diloco(
        ...         lambda w, x: (jnp.mean((w - jnp.mean(x)) ** 2), {}),
        ...         islands=2,
        ...         inner_optimizer=optax.sgd(0.5),
        ...     ),
        ...     lambda schedule, metrics: (metrics["arrivals"], jnp.sum(schedule.position >= 0)),
        ... )
        >>> cohort = Cohort(jnp.ones((2, 1, 3)), schedule=ArrivalOrder(jnp.array([0, -1])))
        >>> _, metrics = algorithm.round(algorithm.init(jnp.zeros(100)), cohort)
        >>> metrics["uploaded_bytes"].item(), metrics["broadcast_bytes"].item()
        (400.0, 400.0)
    """
    size = tree_bytes if update_bytes is None else update_bytes

    def counted_round(state: State, cohort: Cohort, *frozen: Any) -> tuple[State, Metrics]:
        after, metrics = algorithm.round(state, cohort, *frozen)
        updates, models = count(cohort.schedule, metrics)
        uploaded = jnp.float32(size(state.params)) * updates
        broadcast = jnp.float32(tree_bytes(state.params)) * models
        return after, metrics | {UPLOADED_BYTES: uploaded, BROADCAST_BYTES: broadcast}

    return algorithm._replace(round=counted_round)


def tree_bytes(tree: chex.ArrayTree) -> int:
    """Return the bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# ---- model FLOPs utilization (MFU) of a run, where the peak of its chips is known


class Utilization(NamedTuple):
    """The terms of MFU = items/s x FLOPs per item / (chips x peak FLOPs per second)."""

    flops_per_item: float  # FLOPs of the model per item, as `Run.flops_per_item` counts them
    convention: str  # what `flops_per_item` counts, in words
    num_chips: int  # chips of the mesh
    chip: str  # name of the chip
    peak_flops: float  # dense bfloat16 matmul FLOPs per second of one chip

    def mfu(self, items_per_second: float) -> float:
        """Return the fraction of the peak that the model uses."""
        return model_flops_utilization(
            items_per_second, self.flops_per_item, self.num_chips, self.peak_flops
        )

    def describe(self, item_unit: str) -> str:
        """Describe the convention in one line."""
        return (
            f"MFU counts {self.flops_per_item:.4g} FLOPs per {item_unit.removesuffix('s')} "
            f"({self.convention}), of {self.num_chips} {self.chip} with "
            f"{self.peak_flops / 1e12:.4g} bfloat16 TFLOP/s each"
        )


def utilization_of(run: Run) -> Utilization | None:
    """Return the terms of a run's MFU; None if its FLOPs or its chips' peak are unknown."""
    chip = chip_of(run.mesh.devices.flat[0].device_kind)
    if run.flops_per_item is None or chip is None:
        return None
    return Utilization(
        run.flops_per_item,
        run.flops_convention,
        run.mesh.size // chip.devices_per_chip,
        chip.name,
        chip.peak_flops,
    )
