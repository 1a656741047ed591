"""MuLoCo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms.diloco import DiLoCoState, diloco
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.algorithms.parts.server import outer_sgd
from fedpax.checks import NON_NEGATIVE


def muloco(
    loss_fn: LossFn,
    *,
    islands: int,
    learning_rate: optax.ScalarOrSchedule = 0.02,
    weight_dimension_numbers: Any = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[DiLoCoState]:
    """Train islands as DiLoCo does, with Muon inside.

    Muon replaces the momentum M = U S V^T of a matrix by U V^T. Outer gradients can be compressed
    to 2 bits with error feedback:

        muloco(loss_fn, islands=4,
               aggregator=compressed_mean(codecs.sign(bits=2), error_feedback=True))

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        learning_rate: of Muon, and of Adam for parameters that Muon does not update. A number, or a
            schedule of the inner step. Default 0.02.
        weight_dimension_numbers: which parameters are matrices, and which of their axes, as
            `optax.contrib.muon` takes them: a tree of `optax.contrib.MuonDimensionNumbers`, or None
            for a parameter that Adam updates. Default None: every parameter of two axes. Stacked
            layers and embeddings need it.
        outer_optimizer: any optax optimizer. Default None: SGD with Nesterov momentum, learning
            rate 0.7 and momentum 0.6.
        aggregator: as in `diloco`. Default None: the mean in float32.

    Returns:
        As in `diloco`, with its state.

    Raises:
        TypeError: as in `diloco`.
        ValueError: `learning_rate` below 0; and as in `diloco`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((x @ w) ** 2), {})
        >>> algorithm = muloco(loss_fn, islands=2, outer_optimizer=optax.sgd(1.0))
        >>> state = algorithm.init(jnp.eye(2))
        >>> x = jax.random.normal(jax.random.key(0), (2, 3, 4, 2))  # islands, steps, batch
        >>> state, metrics = jax.jit(algorithm.round)(state, fedpax.Cohort(x))
        >>> bool(jnp.all(jnp.diag(state.params) < 0.97))  # three steps of about 0.02
        True

    Reference:
        Therien et al., MuLoCo, arXiv:2505.23725, algorithm 1.
    """
    if not callable(learning_rate):
        remedy = "Pass 0.02, as the authors' code."
        check_setting("muloco", "learning_rate", learning_rate, NON_NEGATIVE, remedy=remedy)
    muon = functools.partial(
        optax.contrib.muon, muon_weight_dimension_numbers=weight_dimension_numbers
    )
    inner = _on_automatic_axes(muon, learning_rate)
    return diloco(
        loss_fn,
        islands=islands,
        inner_optimizer=inner,
        outer_optimizer=outer_sgd("muloco", outer_optimizer, 0.7, momentum=0.6),
        aggregator=aggregator,
    )


def _on_automatic_axes(
    muon: Callable[..., optax.GradientTransformation], learning_rate: Any
) -> optax.GradientTransformation:
    """Let the compiler shard an optimizer's matmuls. Results are sharded as their arguments."""
    # On explicit mesh axes, JAX raises for a matmul of a sharded matrix with its transpose, and for
    # a traced learning rate that is not an argument.
    optimizer = muon(learning_rate)
    traced = (learning_rate,) if isinstance(learning_rate, jax.Array) else ()

    def update(
        gradient: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (gradient, state))
        axes = {axis for spec in jax.tree.leaves(specs) for axis in _axes(spec)}
        if not axes:
            return optimizer.update(gradient, state, params)

        def run(
            gradient: Params,
            state: optax.OptState,
            params: Params | None,
            rate: Any = learning_rate,
        ) -> tuple[Params, optax.OptState]:
            return muon(rate).update(gradient, state, params)

        on_automatic_axes = jax.sharding.auto_axes(
            run, axes=tuple(sorted(axes)), out_sharding=specs
        )
        return on_automatic_axes(gradient, state, params, *traced)

    return optax.GradientTransformation(optimizer.init, update)


def _axes(spec: P) -> set[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return {axis for entry in entries for axis in entry if axis is not None}
