"""An aggregator whose result is checked when a round is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import Weights
from fedpax.algorithm import Metrics, describe_value, is_scalar
from fedpax.errors import ArgumentError, ArgumentTypeError


def checked_aggregator(aggregator: Aggregator) -> Aggregator:
    """Return an aggregator that checks what `aggregate` returns, by types and shapes alone."""

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        returned = aggregator.aggregate(state, updates, weights)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise ArgumentTypeError(
                f"aggregator.aggregate returned {describe_value(returned)}, expected (aggregated, "
                "state, metrics). Return {} as metrics if there are none."
            )
        _check_aggregated(returned[0], updates)
        _check_metrics(returned[2])
        return returned

    return aggregator._replace(aggregate=aggregate)


def _check_aggregated(aggregated: Any, updates: chex.ArrayTree) -> None:
    expected: Any = jax.tree.structure(updates)
    actual: Any = jax.tree.structure(aggregated)
    if actual != expected:
        raise ArgumentTypeError(
            f"aggregator.aggregate returned an aggregate of the structure {actual}, expected that "
            f"of the updates, {expected}. Return one array for each array of the updates."
        )
    leaves = zip(jax.tree.leaves_with_path(aggregated), jax.tree.leaves(updates), strict=True)
    for (path, leaf), update in leaves:
        shape, wanted = list(jnp.shape(leaf)), list(jnp.shape(update)[1:])
        if shape != wanted:
            at = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ArgumentError(
                f"aggregator.aggregate returned an aggregate of shape {shape}{at}, expected "
                f"{wanted}: the shape of the updates without their axis of participants. Reduce "
                "the updates, as in fedpax.federated_mean(updates, weights)."
            )


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError(
            f"aggregator.aggregate returned {describe_value(metrics)} as metrics, expected a dict "
            "of scalars. Return {} if there are none."
        )
    if "loss" in metrics:
        raise ArgumentError(
            "aggregator.aggregate returned a metric called 'loss', the name of the training loss. "
            "Rename it."
        )
    for name, value in metrics.items():
        if not is_scalar(value):
            raise ArgumentTypeError(
                f"aggregator.aggregate returned a metric {name!r} of {describe_value(value)}, "
                "expected a scalar. Reduce it, as in fedpax.federated_mean(values, weights)."
            )
