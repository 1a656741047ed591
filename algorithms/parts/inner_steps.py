"""Inner steps of an island between synchronizations; finite states, and leaves that are frozen."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Num

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import Weights
from fedpax.algorithm import LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.participation import valid_steps
from fedpax.algorithms.parts.tree_arithmetic import select, subtract
from fedpax.clients.cohort import NumSteps
from fedpax.primitives import federated_map
from fedpax.primitives.jaxpr_analysis import zero_results
from fedpax.primitives.layout import unplaced_aval


class InnerReport(NamedTuple):
    """The metrics of an island, averaged over inner steps, and the number of these steps."""

    metrics: Metrics
    num_steps: Float[Array, ""]


InnerSteps: TypeAlias = Callable[
    [Params, optax.OptState, chex.ArrayTree, NumSteps],
    tuple[Params, optax.OptState, InnerReport],
]
"""`(params, inner_state, batches, num_steps) -> (params, inner_state, report)`, on one island."""

OuterGradient: TypeAlias = Callable[
    [Params, optax.OptState, chex.ArrayTree, NumSteps],
    tuple[Params, optax.OptState, Metrics],
]
"""`(params, inner_state, batches, num_steps) -> (outer gradient, inner_state, metrics)`."""


def make_inner_steps(loss_fn: LossFn, inner_optimizer: optax.GradientTransformation) -> InnerSteps:
    """Make the function that takes an island's inner steps, one per batch."""
    # The methods of the DiLoCo family map it over their islands. An island with a runtime of its
    # own (`fedpax.islands`) compiles it without a map. Both take the same steps.

    def inner_steps(
        params: Params, inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
    ) -> tuple[Params, optax.OptState, InnerReport]:
        params, inner_state, metrics = local_steps(
            loss_fn, inner_optimizer, params, inner_state, batches, num_steps
        )
        valid = valid_steps(batches, num_steps)
        total = jax.tree.leaves(batches)[0].shape[0]
        taken = jnp.full((), total) if valid is None else jnp.sum(valid)
        return params, inner_state, InnerReport(metrics, taken.astype(jnp.float32))

    return inner_steps


def keep_step_together(inner_steps: InnerSteps) -> InnerSteps:
    """Keep the operations of a phase of one step together in a program for a TPU."""
    # XLA inlines the loop of such a phase. A transfer between slices that should be in flight
    # during the step can then start after it, or complete before it. XLA inlines no conditional
    # whose predicate it does not know.

    def one_step(
        params: Params, inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
    ) -> tuple[Params, optax.OptState, InnerReport]:
        def step(state: tuple[Params, optax.OptState], batches: chex.ArrayTree) -> tuple:
            return inner_steps(*state, batches, num_steps)

        def step_together(state: tuple[Params, optax.OptState], batches: chex.ArrayTree) -> tuple:
            report = jax.eval_shape(step, state, batches)[-1]
            no_report = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), report)
            always = jax.lax.optimization_barrier(jnp.bool_(True))
            return jax.lax.cond(always, step, lambda state, _: (*state, no_report), state, batches)

        state = params, inner_state
        return jax.lax.platform_dependent(state, batches, tpu=step_together, default=step)

    return one_step


def make_outer_gradient(
    loss_fn: LossFn, inner_optimizer: optax.GradientTransformation
) -> OuterGradient:
    """Make the function that takes an island's inner steps and returns its outer gradient."""
    inner_steps = make_inner_steps(loss_fn, inner_optimizer)

    def outer_gradient(
        params: Params, inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
    ) -> tuple[Params, optax.OptState, Metrics]:
        trained, inner_state, report = inner_steps(params, inner_state, batches, num_steps)
        return subtract(params, trained), inner_state, report.metrics

    return outer_gradient


def average_reports(reports: Sequence[InnerReport]) -> InnerReport:
    """Average an island's metrics over its steps, and count these steps."""
    if len(reports) == 1:
        return reports[0]
    steps = sum((report.num_steps for report in reports), start=jnp.float32(0))
    shares = [report.num_steps / jnp.maximum(steps, 1) for report in reports]
    metrics = jax.tree.map(
        lambda *values: sum(share * value for share, value in zip(shares, values, strict=True)),
        *[report.metrics for report in reports],
    )
    return InnerReport(metrics, steps)


def add_reports(total: InnerReport, reports: Sequence[InnerReport]) -> InnerReport:
    """Add an island's reports to a total, whose metrics are sums over steps."""
    for metrics, steps in reports:
        sums = jax.tree.map(lambda t, m, n=steps: t + n * m, total.metrics, metrics)
        total = InnerReport(sums, total.num_steps + steps)
    return total


def average_total(total: InnerReport) -> InnerReport:
    """Average the metrics of a total over its steps."""
    steps = jnp.maximum(total.num_steps, 1)
    return InnerReport(jax.tree.map(lambda m: m / steps, total.metrics), total.num_steps)


# ---- states of participants that stay finite beside an aggregator that leaves participants out

Tree = TypeVar("Tree", bound=chex.ArrayTree)


def keep_finite(aggregator: Aggregator, before: Tree, after: Tree) -> Tree:
    """Return what a participant keeps; `before` if it is non-finite beside a robust aggregator."""
    if not aggregator.tolerates_non_finite:
        return after
    turned = [
        jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if jnp.issubdtype(new.dtype, jnp.inexact)
    ]
    return select(jnp.any(jnp.array(turned)), before, after) if turned else after


def finite_steps(inner_steps: InnerSteps, aggregator: Aggregator) -> InnerSteps:
    """Return inner steps after which an island keeps its model and state as in `keep_finite`."""
    if not aggregator.tolerates_non_finite:
        return inner_steps

    def steps(
        params: Params, inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
    ) -> tuple[Params, optax.OptState, InnerReport]:
        *after, report = inner_steps(params, inner_state, batches, num_steps)
        params, inner_state = keep_finite(aggregator, (params, inner_state), tuple(after))
        return params, inner_state, report

    return steps


def weights_of_finite(aggregator: Aggregator, values: chex.ArrayTree, weights: Weights) -> Weights:
    """Return the weights of a mean beside an aggregator, 0 for values that it leaves out."""
    return finite_weights(values, weights) if aggregator.tolerates_non_finite else weights


def finite_weights(values: chex.ArrayTree, weights: Weights) -> Num[Array, " n"]:
    """Return the weights of a mean, 0 for participants with a value that is not finite."""

    def of_finite(value: chex.ArrayTree, weight: Num[Array, ""] | None) -> Float[Array, ""]:
        finite: Bool[Array, ""] = jnp.all(
            jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(value)])
        )
        return jnp.where(finite, jnp.float32(1) if weight is None else weight, 0)

    return federated_map(of_finite, values, weights)


# ---- parameters that a client optimizer never moves: they are not sent, and get no noise

# Raised by an optimizer whose update takes further arguments, or whose masks and labels belong to
# other parameters. Other errors are defects in its code.
UNSUITABLE = (TypeError, ValueError, LookupError, AttributeError)


def frozen_leaves(optimizer: optax.GradientTransformation, params: Params) -> list[bool]:
    """Return for each parameter whether an optimizer leaves it as it is, whatever the gradient."""
    # This is read from the graph of `optimizer.update`: an update is 0 if it is computed from zeros
    # alone, as by `optax.set_to_zero`.
    types = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)
    count = len(jax.tree.leaves(types))

    def update(state: optax.OptState, gradient: Params, params: Params) -> tuple[Any, Any]:
        return optimizer.update(gradient, state, params)

    try:
        init = jax.make_jaxpr(optimizer.init)(types)
        state = jax.eval_shape(optimizer.init, types)
        step = jax.make_jaxpr(update)(state, types, types)
    except UNSUITABLE:
        return [False] * count
    zeros, moving = zero_results(init, [False] * count), [False] * 2 * count
    while True:
        are_zero = zero_results(step, [*zeros, *moving])  # of the updates, then of the state
        kept = [a and b for a, b in zip(zeros, are_zero[count:], strict=True)]
        if kept == zeros:
            return are_zero[:count]
        zeros = kept


def without_frozen_leaves(
    aggregator: Aggregator, optimizer: optax.GradientTransformation
) -> Aggregator:
    """Aggregate only the parameters that the participants' optimizer moves."""

    def moved(types: Params) -> Aggregator:
        return without_leaves(aggregator, frozen_leaves(optimizer, types))

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        types = jax.tree.map(lambda u: unplaced_aval(jax.typeof(u)), updates)
        return moved(types).aggregate(state, updates, weights)

    return aggregator._replace(init=lambda params: moved(params).init(params), aggregate=aggregate)


def without_leaves(aggregator: Aggregator, frozen: Sequence[bool]) -> Aggregator:
    """Aggregate all leaves but the frozen ones, whose aggregate is 0."""
    # They are not sent, and an aggregator that adds noise or rounds does not move them. If all are
    # frozen, the aggregator has its usual state and metrics.
    if not any(frozen):
        return aggregator
    sent = [True] * len(frozen) if all(frozen) else [not x for x in frozen]

    def split(tree: Params) -> list[Any]:
        return [x for x, is_sent in zip(jax.tree.leaves(tree), sent, strict=True) if is_sent]

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        types, tree = jax.tree.flatten(
            jax.tree.map(lambda u: unplaced_aval(jax.typeof(u)), updates)
        )
        aggregates, state, metrics = aggregator.aggregate(state, split(updates), weights)
        rest = iter(aggregates)
        sent_aggregates = [next(rest) if is_sent else None for is_sent in sent]
        filled = [
            jnp.zeros(leaf.shape, leaf.dtype) if is_frozen else x
            for leaf, is_frozen, x in zip(types, frozen, sent_aggregates, strict=True)
        ]
        return jax.tree.unflatten(tree, filled), state, metrics

    return aggregator._replace(
        init=lambda params: aggregator.init(split(params)), aggregate=aggregate
    )


def keep_leaves(frozen: Sequence[bool], params: Params, before: Params) -> Params:
    """Keep frozen parameters as before a step: weight decay or momentum would move them."""
    if not any(frozen):
        return params
    leaves, tree = jax.tree.flatten(params)
    kept = zip(leaves, jax.tree.leaves(before), frozen, strict=True)
    return jax.tree.unflatten(tree, [old if is_frozen else new for new, old, is_frozen in kept])
