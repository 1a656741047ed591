"""PAPA."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from fedpax.aggregators import mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.inner_steps import start_islands
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.model_averaging import permute_islands, population_mean
from fedpax.algorithms.parts.participation import participant_weights, without_absent
from fedpax.algorithms.parts.server import as_floats, unless_all_absent
from fedpax.checks import FRACTION
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_broadcast, federated_map, federated_mean
from fedpax.transforms.program import program


class PapaState(NamedTuple):
    """The state of PAPA: the models w_i, placed, and the number of rounds so far."""

    local_params: Params
    optimizer_state: optax.OptState
    round: Int[Array, ""]

    @property
    def params(self) -> Params:
        """The average of the population."""
        return population_mean(self.local_params)


Combine = Callable[[Params, Int[Array, ""]], Params]
"""`(models, round) -> models`; the models are placed."""


def papa(
    loss_fn: LossFn,
    *,
    islands: int,
    optimizer: optax.GradientTransformation,
    alpha: Any | optax.Schedule = 0.99,
) -> FederatedAlgorithm[PapaState]:
    """Train a population whose models are pushed slowly toward their average.

    Each model i takes the steps of a round on its own data, ending at w_i; then

        w_i <- alpha w_i + (1 - alpha) mean_j w_j.

    A round is one averaging period. The models differ by their data, and by initial values put into
    `state.local_params`.

    `state.params` is the population's average.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of models.
        optimizer: any optax optimizer.
        alpha: share of its weights that a model keeps, or a function of the round's index, from 0.
            Default 0.99. The paper decreases 1 - alpha in proportion to the learning rate: `lambda
            r: 1 - 0.01 * learning_rate(10 * r) / learning_rate(0)`. It can be traced.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`. All models weigh the same; in a
        round without any valid step, all models stay.

    Raises:
        TypeError: as in `diloco`.
        ValueError: `alpha` outside 0 to 1; and as in `diloco`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = papa(loss_fn, islands=2, optimizer=optax.sgd(0.5), alpha=0.75)
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))  # w = 1 and 5
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.local_params.tolist(), state.params.item()
        ([1.5, 4.5], 3.0)

    Reference:
        Jolicoeur-Martineau et al., PopulAtion Parameter Averaging (PAPA), arXiv:2304.03094,
        algorithm 1.
    """
    if not callable(alpha):
        remedy = "Pass 0.99, or 0.0 for papa_all."
        check_setting("papa", "alpha", alpha, FRACTION, remedy=remedy)

    def combine(models: Params, index: Int[Array, ""]) -> Params:
        share, mean = alpha(index) if callable(alpha) else alpha, federated_mean(models)
        return federated_map(
            lambda w: jax.tree.map(
                lambda y, shared: (share * y + (1 - share) * shared).astype(y.dtype), w, mean
            ),
            models,
        )

    return _population("papa", loss_fn, islands, optimizer, combine)


def papa_all(
    loss_fn: LossFn, *, islands: int, optimizer: optax.GradientTransformation
) -> FederatedAlgorithm[PapaState]:
    """Train a population whose models are replaced by their average at the end of each round.

        w_i <- mean_j w_j.

    The optimizers' states do not change.

    Arguments, results and errors are those of `papa`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = papa_all(loss_fn, islands=2, optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> state, _ = algorithm.round(state, fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]])))
        >>> state.local_params.tolist()
        [3.0, 3.0]

    Reference:
        arXiv:2304.03094, algorithm 2 (PAPA-all).
    """

    def combine(models: Params, index: Int[Array, ""]) -> Params:
        return federated_broadcast(federated_mean(models))

    return _population("papa_all", loss_fn, islands, optimizer, combine)


def papa_2(
    loss_fn: LossFn,
    *,
    islands: int,
    optimizer: optax.GradientTransformation,
    pairs: Literal["random", "rotation"] = "random",
    seed: int = 0,
) -> FederatedAlgorithm[PapaState]:
    """Train a population whose models are replaced by averages of random pairs of them.

    Each round draws n different pairs at random. Model i becomes the average of pair i, which it
    need not belong to:

        w_i <- (w_a(i) + w_b(i)) / 2,   a(i) < b(i).

    Every pair is equally probable for every i. Two models have one pair.

    Each island receives n - 1 models, one after another. With `pairs="rotation"` it receives one:

        w_i <- (w_i + w_j(i)) / 2,   j(i) = i + c mod n,   c uniform from 1 to n - 1.

    Args:
        loss_fn: as in `papa`.
        islands: as in `papa`.
        optimizer: as in `papa`.
        pairs: "random" or "rotation". Default "random", as in the authors' code.
        seed: seed of the random pairs.

    Returns:
        As in `papa`.

    Raises:
        ValueError: `pairs` is neither "random" nor "rotation"; and as in `papa`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = papa_2(loss_fn, islands=3, optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]], [[7.0]]]))  # w = 1, 5 and 7
        >>> state, _ = algorithm.round(state, cohort)
        >>> sorted(state.local_params.tolist())
        [3.0, 4.0, 6.0]

    Reference:
        arXiv:2304.03094, algorithm 2 (PAPA-2). The authors' code draws from the first n pairs
        alone.
    """
    if pairs not in ("random", "rotation"):
        raise ArgumentError(
            f'papa_2: pairs is {pairs!r}, expected "random" or "rotation". Pass "random", as the '
            'authors, or "rotation", with which each island receives one model.'
        )
    average = _average_pairs if pairs == "random" else _average_rotated

    def combine(models: Params, index: Int[Array, ""]) -> Params:
        if islands == 1:
            return models
        return average(models, islands, jax.random.fold_in(jax.random.key(seed), index))

    return _population("papa_2", loss_fn, islands, optimizer, combine)


def random_pairs(key: jax.Array, islands: int) -> Int[Array, "islands 2"]:
    """Draw a pair of models for each island: different pairs, where there are enough of them."""
    every = jnp.array(list(itertools.combinations(range(islands), 2)), jnp.int32)
    return every[jax.random.choice(key, len(every), (islands,), replace=islands > len(every))]


def _average_pairs(models: Params, islands: int, key: jax.Array) -> Params:
    """Average the pair of each island, while the models pass all islands in a ring."""
    pairs = random_pairs(key, islands)
    ring = [(i + 1) % islands for i in range(islands)]

    def add(total: Params, passing: Params, step: Int[Array, ""]) -> Params:
        def add_one(total: Params, passing: Params, i: Int[Array, ""]) -> Params:
            joins = jnp.any(pairs[i] == (i + step) % islands)
            return jax.tree.map(lambda t, w: jnp.where(joins, t + w / 2, t), total, passing)

        return federated_map(add_one, total, passing, jnp.arange(islands))

    def receive(carry: tuple[Params, Params], step: Int[Array, ""]) -> tuple[Any, None]:
        total, passing = carry
        passing = permute_islands(passing, [ring], jnp.int32(0))
        return (add(total, passing, step), passing), None

    zeros = federated_map(lambda w: jax.tree.map(jnp.zeros_like, w), models)
    total = add(zeros, models, jnp.int32(0))
    # A loop, in which only one model is received at a time.
    (total, _), _ = jax.lax.scan(receive, (total, models), jnp.arange(1, islands))
    return total


def _average_rotated(models: Params, islands: int, key: jax.Array) -> Params:
    """Average each model with the model c places further."""
    rotations = [tuple((i + c) % islands for i in range(islands)) for c in range(1, islands)]
    rotation = jax.random.randint(key, (), 0, len(rotations), jnp.int32)
    # In stages, the values of an island that does not answer are zeros, this one too.
    answers = federated_map(lambda w: jnp.bool_(True), models)
    partners, answered = permute_islands((models, answers), rotations, rotation)

    def average(w: Params, partner: Params, answered: Bool[Array, ""]) -> Params:
        return jax.tree.map(lambda a, b: jnp.where(answered, (a + b) / 2, a), w, partner)

    return federated_map(average, models, partners, answered)


def _population(
    name: str,
    loss_fn: LossFn,
    islands: int,
    optimizer: optax.GradientTransformation,
    combine: Combine,
) -> FederatedAlgorithm[PapaState]:
    """Make a method that trains models separately, and combines them at the end of a round."""
    check_optimizer(name, "optimizer", optimizer)

    train = functools.partial(local_steps, loss_fn, optimizer)

    @program(islands=islands)
    def init(params: Params) -> PapaState:
        return PapaState(*start_islands(params, optimizer), jnp.int32(0))

    @program(islands=islands)
    def papa_round(state: PapaState, cohort: Cohort) -> tuple[PapaState, Metrics]:
        check_cohort(name, cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)

        models, optimizer_state, metrics = federated_map(
            train, state.local_params, state.optimizer_state, cohort.batches, cohort.num_steps
        )
        weights = as_floats(participant_weights(cohort))
        combined = combine(models, state.round)
        models = unless_all_absent(weights, combined, state.local_params, mean())
        after = PapaState(models, optimizer_state, state.round + 1)
        return after, federated_mean(metrics, weights)

    return FederatedAlgorithm(init, papa_round)
