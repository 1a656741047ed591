"""Streaming DiLoCo."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator, mean
from fedpax.aggregators.sent_values import several_releases
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import finite_steps
from fedpax.algorithms.parts.fragments import (
    FragmentFn,
    FragmentServer,
    layer_fragments,
    make_fragments,
)
from fedpax.algorithms.parts.inner_steps import InnerReport, average_reports, make_inner_steps
from fedpax.algorithms.parts.method_checks import check_no_keys, check_optimizer, check_setting
from fedpax.algorithms.parts.participation import (
    mean_metrics,
    participant_weights,
    with_reported,
    without_absent,
)
from fedpax.algorithms.parts.server import (
    as_floats,
    given_aggregator,
    outer_sgd,
)
from fedpax.algorithms.parts.streaming_diloco_blocks import Block, Phases, loop_at
from fedpax.checks import DECAY
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_broadcast, federated_map
from fedpax.transforms.program import program


class StreamingDiLoCoState(NamedTuple):
    """The state of Streaming DiLoCo: the outer model x, and each island's y_i, placed.

    Of the outer optimizer and the aggregator it has one state for each fragment.
    """

    params: Params
    outer_optimizer_state: tuple[optax.OptState, ...]
    local_params: Params
    inner_optimizer_state: optax.OptState
    aggregator_state: tuple[chex.ArrayTree, ...]


def streaming_diloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    fragments: int | FragmentFn,
    delay: int = 1,
    mixing: float = 0.0,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[StreamingDiLoCoState]:
    """Synchronize one fragment of the model at a time, while the islands train.

    A round of H steps has P blocks. Block p ends with the synchronization of fragment p, whose
    transfer starts tau steps earlier:

        after H / P - tau steps of the block:  start to average  Delta_p = mean_i (x_p - y_ip);
        after the other tau steps:             x_p <- Outer_p(x_p, Delta_p);
                                               y_ip <- alpha y_ip + (1 - alpha) x_p.

    y_i is the model of island i, and x the outer model. The peak bandwidth is P times lower than in
    DiLoCo, and the compiler can send while the islands compute.

    With one fragment, `delay=0` and `mixing=0.0` this is `diloco`.

    Delta_p is a difference to x, as in DiLoCo. The paper has theta^(t-H) instead, the island's
    model when it last sent the fragment; with it islands drift apart.

    Six or more consecutive fragments of equal shapes, as `layer_fragments` deals, share the body of
    a loop, but not in `fedpax.stages`. Otherwise the compile time grows with P.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        inner_optimizer: any optax optimizer; the paper uses AdamW.
        outer_optimizer: any optax optimizer, applied to each fragment with a separate state.
            Default None: Nesterov SGD, learning rate 0.4, momentum 0.9, as in the paper.
        fragments: P, the number of fragments, dealt by `layer_fragments(P)`. Or a function `(path,
            leaf) -> fragment`.
        delay: tau, number of inner steps between the start of a transfer and its use, at least 0
            and below H / P. With 0 nothing overlaps. With `mixing=0.0`, an island's last tau steps
            on the fragment are lost.
        mixing: alpha, share of an island's own fragment that it keeps, at least 0 and below 1.
        aggregator: combines the islands' outer gradients x_p - y_ip into Delta_p, with a state for
            each fragment; its `epsilon` counts a release for each. Default None: their mean in
            float32.

    Returns:
        `init(params)` and `round(state, cohort)`. The leaves of `cohort.batches` are `[islands, H,
        batch, ...]`. H is a multiple of P; or P is a multiple of H, and several fragments are
        synchronized at each step. Metrics as in `diloco`; the aggregator's are averaged over
        fragments. Padded steps count as steps of the schedule. An island without a valid step in a
        round has weight 0.

    Raises:
        TypeError: `islands`, an optimizer, `delay`, `fragments` or `aggregator` has another type.
        ValueError: `islands` below 1, `delay` below 0 or `mixing` out of range; in `init`,
            fragments that do not fit the parameters; in a round, batches without an axis of size
            `islands`, or whose number of steps does not fit `fragments` and `delay`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w["a"] + w["b"] - x) ** 2), {})
        >>> algorithm = streaming_diloco(
        ...     loss_fn,
        ...     islands=2,
        ...     inner_optimizer=optax.sgd(0.125),
        ...     outer_optimizer=optax.sgd(1.0),
        ...     fragments=lambda path, leaf: ["a", "b"].index(path),
        ...     delay=1,
        ... )
        >>> state = algorithm.init({"a": jnp.float32(0.0), "b": jnp.float32(0.0)})
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]] * 4, [[5.0]] * 4]))  # two islands, H = 4
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.params["a"].item()  # sent after one step: the mean of 0.25 and 1.25
        0.75
        >>> (state.local_params["b"] == state.params["b"]).tolist()
        [True, True]

    Reference:
        Douillard et al., Streaming DiLoCo, arXiv:2501.18512, algorithm 2.
    """
    check_optimizer("streaming_diloco", "inner_optimizer", inner_optimizer)
    _check_settings(fragments, delay, mixing)
    server = FragmentServer(
        outer_sgd("streaming_diloco", outer_optimizer, 0.4), given_aggregator(aggregator, mean())
    )
    inner_steps = finite_steps(make_inner_steps(loss_fn, inner_optimizer), server.aggregator)
    phases = Phases(inner_steps, server, mixing)

    @program(islands=islands)
    def init(params: Params) -> StreamingDiLoCoState:
        check_no_keys(params)
        local_params = federated_broadcast(params)
        outer_states, aggregator_states = server.init(
            params, make_fragments(fragments, params, inner_optimizer)
        )
        inner_state = federated_map(inner_optimizer.init, local_params)
        return StreamingDiLoCoState(
            params, outer_states, local_params, inner_state, aggregator_states
        )

    @program(islands=islands)
    def streaming_diloco_round(
        state: StreamingDiLoCoState, cohort: Cohort
    ) -> tuple[StreamingDiLoCoState, Metrics]:
        check_cohort("streaming_diloco", cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)
        parts = make_fragments(fragments, state.params, inner_optimizer)
        num_steps = jax.tree.leaves(cohort.batches)[0].shape[1]
        num_blocks = _number_of_blocks(num_steps, len(parts), delay)
        weights = as_floats(participant_weights(cohort))
        block = Block(phases, cohort, weights, num_steps // num_blocks, delay)
        per_block = len(parts) // num_blocks
        reports: list[InnerReport] = []
        aggregator_reports: list[Metrics] = []

        p = 0
        with several_releases(len(parts)):
            while p < len(parts):
                run = loop_at(state, parts, p) if per_block == 1 else None
                if run is None:
                    together = [(q, parts[q]) for q in range(p, p + per_block)]
                    state, during, of_aggregator = block.run(state, p // per_block, together)
                else:
                    state, during, of_aggregator = block.run_in_loop(state, p, run)
                p += per_block if run is None else run.length
                reports += during
                aggregator_reports += of_aggregator

        # Reduced once, and after the last transfer: the compiler would combine a transfer with the
        # metrics, and it would wait for the steps.
        state, reports = jax.lax.optimization_barrier((state, reports))
        averages = federated_map(lambda island: average_reports(island).metrics, reports)
        metrics = mean_metrics(averages, weights, server.aggregator)
        total = jax.tree.map(_sum, *aggregator_reports)
        means = jax.tree.map(lambda value: value / len(parts), total)
        return state, with_reported(metrics, means)

    return FederatedAlgorithm(init, streaming_diloco_round)


def _sum(*values: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, values)


def _number_of_blocks(num_steps: int, num_fragments: int, delay: int) -> int:
    """Return the number of blocks of a round: at the end of each, some fragments synchronize."""
    blocks = min(num_steps, num_fragments)
    if num_steps % blocks or num_fragments % blocks:
        raise ArgumentError(
            f"streaming_diloco(): a round of {num_steps} steps has {num_fragments} fragments, "
            f"which do not divide it. Make the number of steps (axis 1 of cohort.batches) a "
            f"multiple of {num_fragments}, or choose other fragments."
        )
    if delay >= num_steps // blocks:
        raise ArgumentError(
            f"streaming_diloco(): delay is {delay}, expected below {num_steps // blocks}, the "
            f"number of steps between the transfers of {num_fragments} fragments in {num_steps} "
            "steps. Reduce delay, or use fewer fragments or more steps in a round."
        )
    return blocks


def _check_settings(fragments: int | FragmentFn, delay: int, mixing: float) -> None:
    if not callable(fragments):
        layer_fragments(fragments)  # raises
    if isinstance(delay, bool) or not isinstance(delay, int):
        raise ArgumentTypeError(f"delay is {delay!r}, expected an int: a number of inner steps.")
    if delay < 0:
        raise ArgumentError(f"delay is {delay}, expected at least 0. Pass delay=0 for no overlap.")
    remedy = "With 1, islands would never receive the outer model. Pass 0.0 or 0.5, as the paper."
    check_setting("streaming_diloco", "mixing", mixing, DECAY, remedy=remedy)
