"""Decoupled DiLoCo."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators import Aggregator
from fedpax.aggregators.sent_values import several_releases
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.decoupled_parts import directional_mean
from fedpax.algorithms.parts.finite_states import finite_steps
from fedpax.algorithms.parts.fragments import (
    Fragment,
    FragmentFn,
    FragmentServer,
    make_fragments,
    with_entry,
)
from fedpax.algorithms.parts.inner_steps import (
    InnerReport,
    InnerSteps,
    average_reports,
    make_inner_steps,
)
from fedpax.algorithms.parts.method_checks import check_optimizer
from fedpax.algorithms.parts.participation import mean_metrics, with_reported
from fedpax.algorithms.parts.server import given_aggregator, outer_sgd
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.algorithms.streaming_diloco import StreamingDiLoCoState, streaming_diloco
from fedpax.clients import Syncs
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_sum
from fedpax.transforms.program import program


def decoupled_diloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    fragments: int | FragmentFn = 1,
    delay: int = 0,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[StreamingDiLoCoState]:
    """Merge one fragment of the model at a time, from the islands that are up.

    A syncer holds the outer model x. When it merges fragment p, island i has taken c_i steps, on
    t_i tokens, since its last merge of p. With w_i = t_i^2 / c_i, 0 for an island that sends
    nothing,

        Delta_i = x_p - y_ip;   Delta = merge(w, Delta);   x_p <- Outer_p(x_p, Delta),

    and each island that is up takes the new x_p `delay` steps after it has sent y_ip. `merge` is
    the `directional_mean`, for embeddings the plain mean. An island that returns takes the whole
    outer model.

    A round merges each fragment once. `cohort.schedule`, from `fedpax.simulation.island_arrivals`,
    holds which islands take part, their weights and numbers of steps. Without a schedule, this is
    `streaming_diloco` with the same aggregator.

    `delay` is below S, the largest number of steps between merges. An island sends after S -
    `delay` steps.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        inner_optimizer: any optax optimizer; the paper uses AdamW.
        outer_optimizer: any optax optimizer, applied to each fragment with a separate state.
            Default None: as in `streaming_diloco`.
        fragments: P, or a function `(path, leaf) -> fragment`, as in `streaming_diloco`. Default 1:
            the whole model.
        delay: tau, as in `streaming_diloco`. Default 0: nothing overlaps.
        aggregator: merges the Delta_i, with a state per fragment. Default None: `directional_mean`.

    Returns:
        `init(params)` and `round(state, cohort)`, with the state of `streaming_diloco`. The leaves
        of `cohort.batches` are `[islands, P * S, batch, ...]`: for each merge the S steps that an
        island may take before it, `max_steps_per_sync` of `fragment_syncs`. A schedule replaces
        `cohort.num_examples` and `cohort.num_steps`. Metrics, all float32 scalars: `"loss"` and the
        metrics of `loss_fn`, averaged over all steps; with a schedule `"participants"`, the islands
        in a merge, averaged over merges; and the aggregator's.

    Raises:
        TypeError: a setting has another type; in a round, the schedule has another type.
        ValueError: as in `streaming_diloco`; in a round, a schedule for another number of
            fragments.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = decoupled_diloco(
        ...     loss_fn,
        ...     islands=3,
        ...     inner_optimizer=optax.sgd(0.5),
        ...     outer_optimizer=optax.sgd(1.0),
        ...     aggregator=fedpax.aggregators.mean(),
        ... )
        >>> state, step = algorithm.init(jnp.float32(0.0)), jax.jit(algorithm.round)
        >>> batches = jnp.array([[[1.0]], [[5.0]], [[9.0]]])  # y_i is the example
        >>> up = jnp.array([[True], [True], [False]])  # the third island is down
        >>> syncs = fedpax.clients.Syncs(
        ...     num_steps=up.astype(int), weights=3.0 * up, receives=up, rejoins=~up & False
        ... )
        >>> state, metrics = step(state, fedpax.Cohort(batches, schedule=syncs))
        >>> state.params.item(), state.local_params.tolist(), metrics["participants"].item()
        (3.0, [3.0, 3.0, 0.0], 2.0)

    Reference:
        Douillard et al., Decoupled DiLoCo, arXiv:2604.21428.
    """
    check_optimizer("decoupled_diloco", "inner_optimizer", inner_optimizer)
    server = FragmentServer(
        outer_sgd("decoupled_diloco", outer_optimizer, 0.4),
        given_aggregator(aggregator, directional_mean()),
    )
    inner_steps = finite_steps(make_inner_steps(loss_fn, inner_optimizer), server.aggregator)
    synchronous = streaming_diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=inner_optimizer,
        outer_optimizer=server.optimizer,
        fragments=fragments,
        delay=delay,
        aggregator=server.aggregator,
    )

    @program(islands=islands)
    def scheduled_round(
        state: StreamingDiLoCoState, cohort: Cohort
    ) -> tuple[StreamingDiLoCoState, Metrics]:
        check_cohort("decoupled_diloco", cohort, islands, Syncs, size_argument="islands")
        parts = make_fragments(fragments, state.params, inner_optimizer)
        schedule: Any = cohort.schedule
        most = _steps_per_merge(cohort.batches, schedule, len(parts), delay)
        inner_reports: list[InnerReport] = []
        present: list[Float[Array, ""]] = []
        reports: list[Metrics] = []
        for p, fragment in enumerate(parts):
            num_steps, weights, receives, rejoins = _merge_of(schedule, p)
            state = _rejoin(state, rejoins)

            begin, pause, end = p * most, (p + 1) * most - delay, (p + 1) * most
            state, inner = _train(inner_steps, state, _steps(cohort, begin, pause), num_steps)
            inner_reports.append(inner)
            with several_releases(len(parts)):
                delta, aggregator_state, report = server.average(state, p, fragment, weights)
            reports.append(report)
            states = with_entry(state.aggregator_state, p, aggregator_state)
            state = state._replace(aggregator_state=states)
            participants = federated_sum(
                federated_map(lambda w: (w > 0).astype(jnp.float32), weights)
            )
            present.append(participants)
            if delay:  # nothing here needs delta
                rest = federated_map(lambda n: jnp.maximum(n - (most - delay), 0), num_steps)
                state, inner = _train(inner_steps, state, _steps(cohort, pause, end), rest)
                inner_reports.append(inner)
            # Without a participant nothing moves, not even by momentum.
            after = select(participants > 0, *server.step(state, p, fragment, delta))
            state = _receive(state, p, fragment, after, receives)

        # Reduced once, after the last transfer, as in streaming_diloco.
        state, inner_reports = jax.lax.optimization_barrier((state, inner_reports))
        metrics = mean_metrics(*federated_map(average_reports, inner_reports), server.aggregator)
        metrics["participants"] = sum(present[1:], start=present[0]) / len(present)
        means = jax.tree.map(lambda *m: sum(m) / len(m), *reports)
        return state, with_reported(metrics, means)

    def decoupled_diloco_round(
        state: StreamingDiLoCoState, cohort: Cohort
    ) -> tuple[StreamingDiLoCoState, Metrics]:
        if isinstance(cohort, Cohort) and cohort.schedule is not None:
            return scheduled_round(state, cohort)
        return synchronous.round(state, cohort)

    return FederatedAlgorithm(synchronous.init, decoupled_diloco_round)


def _rejoin(state: StreamingDiLoCoState, rejoins: Bool[Array, " islands"]) -> StreamingDiLoCoState:
    """Give the outer model to the islands that return."""
    local_params = federated_map(
        lambda y, back: select(back, state.params, y), state.local_params, rejoins
    )
    return state._replace(local_params=local_params)


def _train(
    inner_steps: InnerSteps,
    state: StreamingDiLoCoState,
    batches: chex.ArrayTree,
    num_steps: Int[Array, " islands"],
) -> tuple[StreamingDiLoCoState, InnerReport]:
    params, inner_state, report = federated_map(
        inner_steps, state.local_params, state.inner_optimizer_state, batches, num_steps
    )
    return state._replace(local_params=params, inner_optimizer_state=inner_state), report


def _receive(
    state: StreamingDiLoCoState,
    p: int,
    fragment: Fragment,
    after: tuple[Params, optax.OptState],
    receives: Bool[Array, " islands"],
) -> StreamingDiLoCoState:
    """Replace fragment p of the outer model, and give it to the islands that are up."""
    x, outer_state = after

    def take(y: Params, takes: Bool[Array, ""]) -> Params:
        return select(takes, fragment.put(y, x), y)

    return state._replace(
        params=fragment.put(state.params, x),
        outer_optimizer_state=with_entry(state.outer_optimizer_state, p, outer_state),
        local_params=federated_map(take, state.local_params, receives),
    )


def _steps_per_merge(
    batches: chex.ArrayTree, schedule: Syncs, num_fragments: int, delay: int
) -> int:
    shape = jnp.shape(schedule.num_steps)[1:]
    num_steps = jax.tree.leaves(batches)[0].shape[1]
    if shape != (num_fragments,):
        raise ArgumentError(
            f"decoupled_diloco(): cohort.schedule has arrays [islands, "
            f"{', '.join(map(str, shape))}], expected [islands, {num_fragments}]: the model has "
            f"{num_fragments} fragments. Pass num_fragments={num_fragments} to "
            "fedpax.simulation.island_arrivals."
        )
    if num_steps % num_fragments or delay >= num_steps // num_fragments:
        raise ArgumentError(
            f"decoupled_diloco(): a round has {num_steps} steps for {num_fragments} fragments and "
            f"a delay of {delay}, expected a multiple of {num_fragments} and more than delay for "
            "each. Give cohort.batches num_fragments * max_steps_per_sync steps (axis 1)."
        )
    return num_steps // num_fragments


def _merge_of(schedule: Syncs, p: int) -> tuple[Any, ...]:
    """Return the four arrays of the merge of fragment p, `[islands]`."""
    return tuple(federated_map(lambda row: row[p], jnp.asarray(array)) for array in schedule)


def _steps(cohort: Cohort, start: int, stop: int) -> chex.ArrayTree:
    return federated_map(
        lambda batches: jax.tree.map(lambda batch: batch[start:stop], batches), cohort.batches
    )
