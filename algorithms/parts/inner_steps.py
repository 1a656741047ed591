"""Inner steps of an island between synchronizations, and their reports."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.algorithm import LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.method_checks import check_no_keys
from fedpax.algorithms.parts.participation import valid_steps
from fedpax.algorithms.parts.tree_arithmetic import subtract
from fedpax.clients.cohort import NumSteps
from fedpax.primitives import federated_broadcast, federated_map


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
    # XLA inlines the loop of such a phase, and a transfer that should be in flight during the step
    # may start after it or complete before it. It inlines no conditional of unknown predicate.

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


def start_islands(
    params: Params, optimizer: optax.GradientTransformation
) -> tuple[Params, optax.OptState]:
    """Give each island the parameters, and an optimizer's state for them. Inside a program."""
    check_no_keys(params)
    local_params = federated_broadcast(params)
    return local_params, federated_map(optimizer.init, local_params)


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
