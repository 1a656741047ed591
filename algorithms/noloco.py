"""NoLoCo."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fedpax.aggregators import mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.inner_steps import start_islands
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.model_averaging import (
    perfect_matchings,
    permute_islands,
    population_mean,
)
from fedpax.algorithms.parts.participation import participant_weights, without_absent
from fedpax.algorithms.parts.server import as_floats, unless_all_absent
from fedpax.checks import FRACTION, NON_NEGATIVE
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.primitives import federated_map, federated_mean
from fedpax.transforms.program import program


class NoLoCoState(NamedTuple):
    """The state of NoLoCo: slow weights phi_i and outer momentum delta_i of each island, placed.

    The pairs are drawn from `round`, the number of rounds so far.
    """

    local_params: Params
    momentum: Params
    inner_optimizer_state: optax.OptState
    round: Int[Array, ""]

    @property
    def params(self) -> Params:
        """The mean of the islands' models."""
        return population_mean(self.local_params)


def noloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    learning_rate: float = 0.7,
    momentum: float = 0.5,
    pull: float | None = None,
    seed: int = 0,
) -> FederatedAlgorithm[NoLoCoState]:
    """Train islands that exchange models with one random partner per round.

    Island i takes H inner steps from phi_i to y_i. With its partner j of this round:

        Delta = ((y_i - phi_i) + (y_j - phi_j)) / 2;   phi = (phi_i + phi_j) / 2;
        delta_i <- beta delta_i + eta Delta - gamma (phi_i - phi);   phi_i <- phi_i + delta_i.

    A round has no all-reduce of a model: it communicates phi_i and y_i between partners, and the
    metrics.

    With an odd number of islands, one has no partner.

    `state.params` is the mean of all islands.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands.
        inner_optimizer: any optax optimizer; the paper uses Adam.
        learning_rate: eta, the outer learning rate, at least 0. Default 0.7, as in the paper.
        momentum: beta, the outer momentum, from 0 to 1. Default 0.5, as in the paper.
        pull: gamma, at least 0. Default None: `learning_rate`.
        seed: seed of the random pairs.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`.

    Raises:
        TypeError: as in `diloco`.
        ValueError: a setting out of range; and as in `diloco`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = noloco(
        ...     loss_fn, islands=2, inner_optimizer=optax.sgd(0.5), learning_rate=0.5, momentum=0.0)
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))  # y = 1 and 5
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.local_params.tolist(), state.params.item()
        ([1.5, 1.5], 1.5)

    Reference:
        Kolehmainen et al., NoLoCo, arXiv:2506.10911, section 3.
    """
    check_optimizer("noloco", "inner_optimizer", inner_optimizer)
    gamma = learning_rate if pull is None else pull
    for name, value in {"learning_rate": learning_rate, "pull": gamma}.items():
        check_setting("noloco", name, value, NON_NEGATIVE, remedy="Pass 0.7, as the paper.")
    check_setting("noloco", "momentum", momentum, FRACTION, remedy="Pass 0.5, as the paper.")

    train = functools.partial(local_steps, loss_fn, inner_optimizer)

    @program(islands=islands)
    def init(params: Params) -> NoLoCoState:
        local_params, inner_state = start_islands(params, inner_optimizer)
        return NoLoCoState(
            local_params,
            federated_map(lambda x: jax.tree.map(jnp.zeros_like, x), local_params),
            inner_state,
            jnp.int32(0),
        )

    @program(islands=islands)
    def noloco_round(state: NoLoCoState, cohort: Cohort) -> tuple[NoLoCoState, Metrics]:
        check_cohort("noloco", cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)

        trained, inner_state, metrics = federated_map(
            train,
            state.local_params,
            state.inner_optimizer_state,
            cohort.batches,
            cohort.num_steps,
        )
        start_and_end = state.local_params, trained
        matchings = perfect_matchings(islands)
        key = jax.random.fold_in(jax.random.key(seed), state.round)
        matching = jax.random.randint(key, (), 0, len(matchings), jnp.int32)
        partner = permute_islands(start_and_end, matchings, matching)

        def outer_step(start_and_end: Any, partner: Any, delta: Params) -> tuple[Params, Params]:
            def step(
                phi: jax.Array, y: jax.Array, phi_j: jax.Array, y_j: jax.Array, delta: jax.Array
            ) -> jax.Array:
                progress = ((y - phi) + (y_j - phi_j)) / 2
                moved = momentum * delta + learning_rate * progress - gamma * (phi - phi_j) / 2
                return moved.astype(delta.dtype)

            delta = jax.tree.map(step, *start_and_end, *partner, delta)
            return optax.apply_updates(start_and_end[0], delta), delta

        weights = as_floats(participant_weights(cohort))
        stepped = federated_map(outer_step, start_and_end, partner, state.momentum)
        before = state.local_params, state.momentum
        local_params, delta = unless_all_absent(weights, stepped, before, mean())
        after = NoLoCoState(local_params, delta, inner_state, state.round + 1)
        return after, federated_mean(metrics, weights)

    return FederatedAlgorithm(init, noloco_round)
