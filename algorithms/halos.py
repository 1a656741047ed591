"""HALoS: islands in regions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.arrivals import (
    ArrivingUpdates,
    Combined,
    DelayedNesterov,
    DelayedNesterovState,
    arrivals_aggregator,
    check_delayed_nesterov,
    is_at,
    outer_gradients,
    process_in_order,
)
from fedpax.algorithms.parts.inner_steps import make_outer_gradient, start_islands
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.participation import with_reported
from fedpax.algorithms.parts.tree_arithmetic import select, subtract, weighted_sum
from fedpax.checks import FRACTION
from fedpax.clients import RegionalOrder
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import (
    federated_map,
    federated_max,
)
from fedpax.transforms.program import program

LOCAL_SERVER = DelayedNesterov(learning_rate=3.2, momentum=0.9, period=16)
"""The optimizer of a regional server: 0.2 times an island's update, momentum every 16."""

GLOBAL_SERVER = DelayedNesterov(learning_rate=0.3, momentum=0.5, period=2)
"""The optimizer of the global server: 0.15 times a region's update, momentum every 2."""


class Region(NamedTuple):
    """The state of a region's server."""

    params: Params
    optimizer_state: DelayedNesterovState  # momentum and accumulated updates of its islands
    # the model that the region's update is measured from; once that is sent, the update and then
    # the global model in transit
    exchanged: Params


class HALoSState(NamedTuple):
    """The state of HALoS: the global server's, and in `regions` each region's."""

    params: Params
    global_optimizer_state: DelayedNesterovState
    regions: tuple[Region, ...]
    local_params: Params
    inner_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree | None


def halos(
    loss_fn: LossFn,
    *,
    regions: Sequence[int],
    inner_optimizer: optax.GradientTransformation,
    local_server: DelayedNesterov = LOCAL_SERVER,
    global_server: DelayedNesterov = GLOBAL_SERVER,
    merge_weight: float = 0.25,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[HALoSState]:
    """Update a region's model at each arrival of an island, and the global model at exchanges.

    Island i of region r trains from the x_r of its last arrival, up to y_i. With the model a_r of
    the last merge, the global model x, and the optimizers `local` and `global` (delayed Nesterov):

        island i arrives:               x_r <- local(x_r, start - y_i)
        K arrivals after a merge:       u_r = a_r - x_r is sent to the global server
        u_r arrives there:              x <- global(x, u_r), which is sent back
        x arrives at the region:        x_r <- (1 - alpha) x_r + alpha x;  a_r <- x_r

    The island continues from the new x_r with its inner optimizer's state. Of updates that arrive
    during an exchange, x_r keeps 1 - alpha, and the next K arrivals count from the merge.

    As in `async_diloco`, a round's islands train at the same time, then the servers process the
    events of `cohort.schedule`, from `fedpax.simulation.regional_arrivals`.

    The `aggregator`, with one state for all regions, is used as in `async_diloco`.

    Memory: four models per region more than `async_diloco`. `jax.grad` through a round with a
    schedule raises.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        regions: the region of each island, numbers from 0.
        inner_optimizer: any optax optimizer; the paper uses AdamW.
        local_server: the optimizer of the regions' servers. Default: learning rate 3.2, momentum
            0.9, period 16.
        global_server: the optimizer of the global server. Default: learning rate 0.3, momentum 0.5,
            period 2.
        merge_weight: alpha, share of the global model in a merge, from 0 to 1. Default 0.25.
        aggregator: combines the updates that arrive at a region at the same time. Default None:
            their sum.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `async_diloco`, with `cohort.schedule` a
        `RegionalOrder` or None. With a schedule, the metric `"exchanges"` is the number of regions'
        updates that the global server applies.

    Raises:
        TypeError: a server is no `DelayedNesterov`, or `inner_optimizer` is not optax's; in a
            round, a schedule of another type.
        ValueError: a setting is out of range, or a region has no island; an aggregator that
            `needs_all`; in a round, batches without an axis of size `len(regions)`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = halos(
        ...     loss_fn,
        ...     regions=(0, 0, 1),
        ...     inner_optimizer=optax.sgd(0.5),
        ...     local_server=DelayedNesterov(learning_rate=1.0, momentum=0.0, period=1),
        ...     global_server=DelayedNesterov(learning_rate=0.5, momentum=0.0, period=1),
        ... )
        >>> state, step = algorithm.init(jnp.float32(0.0)), jax.jit(algorithm.round)
        >>> batches = jnp.array([[[1.0]], [[5.0]], [[8.0]]])  # H = 1; y_i is the example
        >>> order = fedpax.clients.RegionalOrder(
        ...     position=jnp.array([0, 1, 0]),  # the first and the third island, then the second
        ...     sends=jnp.array([1, 1, -1]),  # region 0 sends after two arrivals
        ...     applies=jnp.array([2, 2, -1]),
        ...     merges=jnp.array([3, 3, -1]),
        ... )
        >>> state, metrics = step(state, fedpax.Cohort(batches, schedule=order))
        >>> state.params.item()  # 0.5 * (1 + 5)
        3.0
        >>> [region.params.item() for region in state.regions]  # 0.75 * 6 + 0.25 * 3, and 8
        [5.25, 8.0]

    Reference:
        Kim et al., HALoS, arXiv:2506.04531, algorithm 1. Settings: github.com/utnslab/halos.
    """
    check_optimizer("halos", "inner_optimizer", inner_optimizer)
    region_of = check_regions(regions)
    num_regions, islands = max(region_of) + 1, len(region_of)
    check_delayed_nesterov("halos", "local_server", local_server)
    check_delayed_nesterov("halos", "global_server", global_server)
    remedy = "Pass 0.25, as the authors."
    check_setting("halos", "merge_weight", merge_weight, FRACTION, remedy=remedy)
    combine = arrivals_aggregator("halos", aggregator, inner_optimizer)

    servers = _Servers(local_server, global_server, merge_weight)

    @program(islands=islands)
    def init(params: Params) -> HALoSState:
        local_params, inner_state = start_islands(params, inner_optimizer)
        return HALoSState(
            params,
            global_server.init(params),
            tuple(Region(params, local_server.init(params), params) for _ in range(num_regions)),
            local_params,
            inner_state,
            None if combine is None else combine.init(params),
        )

    @program(islands=islands)
    def halos_round(state: HALoSState, cohort: Cohort) -> tuple[HALoSState, Metrics]:
        check_cohort("halos", cohort, islands, RegionalOrder, size_argument=None)
        arrivals, inner_state, sends, metrics = outer_gradients(
            make_outer_gradient(loss_fn, inner_optimizer),
            state.local_params,
            state.inner_optimizer_state,
            cohort,
            combine,
        )
        schedule = _make_schedule(cohort.schedule, jnp.array(region_of), num_regions)
        if schedule.exchanges is not None:
            applied = [
                (exchange.applies >= 0).astype(jnp.float32) for exchange in schedule.exchanges
            ]
            metrics |= {"exchanges": sum(applied, start=jnp.float32(0))}
        x, global_state, region_states, local_params, combined = process_in_order(
            functools.partial(servers.process, schedule, arrivals, sends),
            (
                state.params,
                state.global_optimizer_state,
                state.regions,
                state.local_params,
                arrivals.start(state.aggregator_state),
            ),
            schedule.last(),
        )
        after = HALoSState(
            x, global_state, region_states, local_params, inner_state, combined.state
        )
        return after, with_reported(metrics, combined.mean_metrics())

    return FederatedAlgorithm(init, halos_round)


class _RegionEvents(NamedTuple):
    """When a region sends, is applied and merges: positions, or whether it does now."""

    sends: Any
    applies: Any
    merges: Any


class _Schedule(NamedTuple):
    """The events of a round. Inside a program."""

    region: Int[Array, " islands"]
    # the position at which each island arrives, placed. None: all arrive together.
    position: Int[Array, " islands"] | None
    # the positions of each region's exchange, server values. None without a schedule.
    exchanges: list[_RegionEvents] | None

    def last(self) -> Int[Array, ""] | None:
        """Return the last position; None without a schedule."""
        if self.position is None or self.exchanges is None:
            return None
        positions = [position for exchange in self.exchanges for position in exchange]
        return jnp.max(jnp.stack([federated_max(self.position), *positions]))

    def exchanges_at(
        self, k: Int[Array, ""] | None, counts: Sequence[Float[Array, ""]]
    ) -> list[_RegionEvents]:
        """Return what each region does at position k, after the arrival of `counts` islands."""
        if self.exchanges is None:  # a region without an update takes no part
            return [_RegionEvents(*(count > 0,) * 3) for count in counts]
        return [
            _RegionEvents(*(is_at(event, k) for event in exchange)) for exchange in self.exchanges
        ]


class _Servers(NamedTuple):
    """The servers of the regions, and the global one. Inside a program."""

    local_server: DelayedNesterov
    global_server: DelayedNesterov
    merge_weight: float

    def process(
        self,
        schedule: _Schedule,
        arrivals: ArrivingUpdates,
        sends: Bool[Array, " islands"],
        k: Int[Array, ""] | None,
        params: Params,
        global_state: DelayedNesterovState,
        regions: tuple[Region, ...],
        local_params: Params,
        combined: Combined,
    ) -> tuple[Params, DelayedNesterovState, tuple[Region, ...], Params, Combined]:
        """Process the events at position k; None: the events of all islands and regions."""
        arriving = federated_map(lambda s, at: s & is_at(at, k), sends, schedule.position)
        regions, counts, combined = self.arrive(
            regions, arrivals, arriving, schedule.region, combined
        )
        now = schedule.exchanges_at(k, counts)
        params, global_state, regions = self.exchange(params, global_state, regions, now)

        def receive(held: Params, home: Int[Array, ""], at: Int[Array, ""] | None) -> Params:
            for r, region in enumerate(regions):
                held = select(is_at(at, k) & (home == r), region.params, held)
            return held

        local_params = federated_map(receive, local_params, schedule.region, schedule.position)
        return params, global_state, regions, local_params, combined

    def arrive(
        self,
        regions: Sequence[Region],
        arrivals: ArrivingUpdates,
        arriving: Bool[Array, " islands"],
        own_regions: Int[Array, " islands"],
        combined: Combined,
    ) -> tuple[tuple[Region, ...], list[Float[Array, ""]], Combined]:
        """Update the model of each region by the islands that arrive; count them."""
        updated: list[Region] = []
        counts: list[Float[Array, ""]] = []
        for r, region in enumerate(regions):
            here = federated_map(lambda a, home, r=r: a & (home == r), arriving, own_regions)
            total, count, combined = arrivals.combine(here, combined)
            x, optimizer_state = self.local_server.update(
                total, count, region.optimizer_state, region.params
            )
            updated.append(Region(x, optimizer_state, region.exchanged))
            counts.append(count)
        return tuple(updated), counts, combined

    def exchange(
        self,
        params: Params,
        global_state: DelayedNesterovState,
        regions: Sequence[Region],
        now: Sequence[_RegionEvents],
    ) -> tuple[Params, DelayedNesterovState, tuple[Region, ...]]:
        """Send, apply and merge in the regions that `now` marks."""
        zeros = optax.tree.zeros_like(params)
        updates, arriving, merged = [], [], []
        for region, event in zip(regions, now, strict=True):
            update = subtract(region.exchanged, region.params)
            updates.append(select(event.sends, update, region.exchanged))
            arriving.append(select(event.applies, updates[-1], zeros))
        params, global_state = self.global_server.update(
            jax.tree.map(lambda *leaves: sum(leaves), *arriving),
            sum((event.applies.astype(jnp.float32) for event in now), start=jnp.float32(0)),
            global_state,
            params,
        )
        for region, update, event in zip(regions, updates, now, strict=True):
            sent_back = select(event.applies, params, update)
            mixed = weighted_sum(1 - self.merge_weight, region.params, self.merge_weight, sent_back)
            x = select(event.merges, mixed, region.params)
            merged.append(Region(x, region.optimizer_state, select(event.merges, mixed, sent_back)))
        return params, global_state, tuple(merged)


def check_regions(regions: Sequence[int]) -> tuple[int, ...]:
    """Check the regions of islands, and return them as integers."""
    numbers = tuple(int(region) for region in regions)
    if not numbers or set(numbers) != set(range(max(numbers) + 1)) or numbers != tuple(regions):
        raise ArgumentError(
            f"halos: regions is {tuple(regions)}, expected the region of each island, numbers "
            "from 0 without gaps, such as (0, 0, 1, 1). Number the regions anew."
        )
    return numbers


def _make_schedule(
    order: RegionalOrder | None, region_of: Int[Array, " islands"], num_regions: int
) -> _Schedule:
    if order is None:
        return _Schedule(region_of, None, None)

    def positions(region: Int[Array, ""], *events: Int[Array, ""]) -> list[_RegionEvents]:
        return [
            _RegionEvents(*(jnp.where(region == r, event, -1) for event in events))
            for r in range(num_regions)
        ]

    exchanges = federated_max(
        federated_map(positions, region_of, order.sends, order.applies, order.merges)
    )
    return _Schedule(region_of, jnp.asarray(order.position), exchanges)
