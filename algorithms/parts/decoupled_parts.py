"""Decoupled DiLoCo in parts, for islands with runtimes of their own."""

from __future__ import annotations

import math

import optax

from fedpax.aggregators import Aggregator
from fedpax.aggregators.codecs import Codec
from fedpax.algorithm import AlgorithmParts, LossFn
from fedpax.algorithms.parts.directional_mean import directional_mean
from fedpax.algorithms.parts.fragments import FragmentFn, make_fragments
from fedpax.algorithms.parts.inner_steps import make_inner_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.server import given_aggregator, outer_sgd
from fedpax.checks import COUNT, NON_NEGATIVE_OR_INFINITE, Range, check_argument
from fedpax.errors import ArgumentError


def decoupled_diloco_parts(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    steps_per_sync: int,
    outer_optimizer: optax.GradientTransformation | None = None,
    fragments: int | FragmentFn = 1,
    aggregator: Aggregator | None = None,
    codec: Codec | None = None,
    error_feedback: bool = False,
    quorum: int = 1,
    grace_seconds: float = 0.0,
    max_steps_ahead: int | None = None,
    max_staleness: int = 4,
    max_norm: float | None = None,
) -> AlgorithmParts:
    """Make the parts of Decoupled DiLoCo, for `fedpax syncer` and `fedpax join`.

    The inner steps, the fragments, the outer optimizer and the merge are the same as in
    `decoupled_diloco`. That method reads the times of steps and failures from a schedule; here they
    are real. Three rules differ, so that a late island loses no step within `max_staleness`:

    - An island keeps the steps that it takes during the transfer of a fragment. They are added to
      the merged fragment, and are part of its next update.
    - An update that arrives after its merge is part of the next merge of its fragment. Its outer
      gradient is the difference to the outer model that the island had, not to the newest one.
    - An update has the steps since the island's previous update of the fragment. Its weight is
      tokens^2 / steps, as in the paper.

    With a quorum of all islands and `max_steps_ahead=steps_per_sync` this is `decoupled_diloco`
    with `delay=0`, and with one fragment and a plain mean `diloco`.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        islands: number of shards of the data, and the largest number of islands.
        inner_optimizer: any optax optimizer.
        steps_per_sync: S, inner steps between two updates of an island; with P fragments, H / P.
        outer_optimizer: any optax optimizer. Default None: as in `decoupled_diloco`.
        fragments: as in `decoupled_diloco`. Default 1: the whole model.
        aggregator: merges the outer gradients of a fragment. Default None: `directional_mean`.
        codec: the format of an update on the wire. Default None: float32.
        error_feedback: whether an island adds the codec's error to its next update of the fragment.
            Without a codec it has no effect. Default False.
        quorum: K, number of islands that must send a fragment before it is merged; islands of one
            certificate count once. Default 1.
        grace_seconds: the most seconds that the syncer waits after the quorum. Default 0.0.
        max_steps_ahead: as in `AlgorithmParts`. Default None: 32 S.
        max_staleness: as in `AlgorithmParts`. Default 4 merges of the fragment.
        max_norm: an update with a larger L2 norm is dropped. Default None: up to 1e18.

    Returns:
        The parts, for `FederatedAlgorithm.parts`.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting is out of range, or `error_feedback` is True and the codec is not
            contractive.

    Example:
        >>> import jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> parts = decoupled_diloco_parts(
        ...     loss_fn, islands=4, inner_optimizer=optax.sgd(0.5), steps_per_sync=2, quorum=3
        ... )
        >>> w, _, report = parts.inner_steps(
        ...     jnp.float32(0.0), parts.init_inner(jnp.float32(0.0)), jnp.ones((2, 1)), None)
        >>> w.item(), report.num_steps.item()
        (1.0, 2.0)

    Reference:
        Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training, arXiv:2604.21428.
    """
    name = "decoupled_diloco_parts"
    check_optimizer(name, "inner_optimizer", inner_optimizer)
    check_argument(name, "islands", islands, COUNT, remedy="Pass the number of shards of the data.")
    remedy = "Pass the inner steps between two updates, such as 24."
    check_argument(name, "steps_per_sync", steps_per_sync, COUNT, remedy=remedy)
    remedy = "Pass 1 to merge as soon as one island has sent, or islands to wait for all."
    check_setting(name, "quorum", quorum, Range(least=1, most=islands), remedy=remedy)
    remedy = "Pass 0.0 to merge at the quorum."
    check_setting(name, "grace_seconds", grace_seconds, NON_NEGATIVE_OR_INFINITE, remedy=remedy)
    remedy = "Pass 4, the default."
    check_setting(name, "max_staleness", max_staleness, NON_NEGATIVE_OR_INFINITE, remedy=remedy)
    if max_norm is not None:
        remedy = "Pass None for the default, 1e18."
        check_setting(name, "max_norm", max_norm, NON_NEGATIVE_OR_INFINITE, remedy=remedy)
    if max_steps_ahead is not None:
        remedy = "Pass None for the default, 32 steps_per_sync."
        check_setting(
            name,
            "max_steps_ahead",
            max_steps_ahead,
            Range(least=steps_per_sync, most=math.inf),
            remedy=remedy,
        )
    if error_feedback and codec is not None and not codec.contractive:
        raise ArgumentError(
            f"{name}(): error_feedback with a codec that is not contractive, whose residual could "
            "grow without bound. Use its biased form, or error_feedback=False."
        )
    return AlgorithmParts(
        islands=islands,
        init_inner=inner_optimizer.init,
        inner_steps=make_inner_steps(loss_fn, inner_optimizer),
        make_fragments=lambda params: make_fragments(fragments, params, inner_optimizer),
        outer_optimizer=outer_sgd(name, outer_optimizer, 0.4),
        aggregator=given_aggregator(aggregator, directional_mean()),
        steps_per_sync=steps_per_sync,
        codec=codec,
        error_feedback=error_feedback and codec is not None,
        quorum=quorum,
        grace_seconds=grace_seconds,
        max_steps_ahead=max_steps_ahead,
        max_staleness=max_staleness,
        max_norm=max_norm,
    )
