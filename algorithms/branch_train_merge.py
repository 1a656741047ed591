"""Branch-Train-Merge."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.inner_steps import start_islands
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.model_averaging import population_mean
from fedpax.algorithms.parts.participation import participant_weights, without_absent
from fedpax.checks import PROBABILITY
from fedpax.clients.cohort import Cohort, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_mean
from fedpax.transforms.program import program


class BranchTrainMergeState(NamedTuple):
    """The state of Branch-Train-Merge: the experts and their optimizers' states, placed."""

    expert_params: Params
    optimizer_state: optax.OptState

    @property
    def fixed_participants(self) -> str:
        """Why a run cannot resume with another number of islands."""
        return "each expert belongs to a domain"

    @property
    def params(self) -> Params:
        """The experts merged with equal weights."""
        return population_mean(self.expert_params)


def branch_train_merge(
    loss_fn: LossFn, *, islands: int, optimizer: optax.GradientTransformation
) -> FederatedAlgorithm[BranchTrainMergeState]:
    """Train experts, one per island and domain, that never communicate.

    1. Branch: `init(params)` copies a model to every expert: a seed model, or earlier experts
       merged by `merge(state.expert_params, weights)`.
    2. Train: expert j takes all steps of its rounds on the data of its domain, island j's.
    3. Merge: `merge(state.expert_params, weights)` is one model, `sum_j w_j theta_j`. Or use the
       experts as an ensemble, by `ensemble_log_likelihood`.

    A round communicates only the metrics.

    `state.params` is the merge with equal weights.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of experts.
        optimizer: any optax optimizer. Its state stays with the expert.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`.

    Raises:
        TypeError, ValueError: as in `diloco`.

    Example:
        >>> import fedpax
        >>> from fedpax.algorithms import merge
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = branch_train_merge(loss_fn, islands=2, optimizer=optax.sgd(0.5))
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> state, _ = jax.jit(algorithm.round)(state, fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]])))
        >>> state.params.item(), merge(state.expert_params, [1, 3]).item()
        (3.0, 4.0)

    Reference:
        Li et al., Branch-Train-Merge, arXiv:2208.03306, section 3.
    """
    check_optimizer("branch_train_merge", "optimizer", optimizer)

    train = functools.partial(local_steps, loss_fn, optimizer)

    @program(islands=islands)
    def init(params: Params) -> BranchTrainMergeState:
        return BranchTrainMergeState(*start_islands(params, optimizer))

    @program(islands=islands)
    def branch_train_merge_round(
        state: BranchTrainMergeState, cohort: Cohort
    ) -> tuple[BranchTrainMergeState, Metrics]:
        check_cohort("branch_train_merge", cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)

        experts, optimizer_state, metrics = federated_map(
            train, state.expert_params, state.optimizer_state, cohort.batches, cohort.num_steps
        )
        after = BranchTrainMergeState(experts, optimizer_state)
        return after, federated_mean(metrics, participant_weights(cohort))

    return FederatedAlgorithm(init, branch_train_merge_round)


def ensemble_log_likelihood(
    log_likelihoods: Float[Array, "experts *batch tokens"],
    log_prior: Float[Array, " experts"] | None = None,
) -> tuple[Float[Array, "*batch tokens"], Float[Array, "experts *batch tokens"]]:
    """Mix the experts' next-token likelihoods by the posterior of their domains.

        p(x_t | x_<t) = sum_j p(x_t | x_<t, D = j) p(D = j | x_<t),
        p(D = j | x_<t) proportional to p(x_<t | D = j) p(D = j).

    Args:
        log_likelihoods: `log p(x_t | x_<t, D = j)` of the tokens of a text, by expert.
        log_prior: `log p(D = j)`. Default None: uniform. The paper uses `cached_prior`.

    Returns:
        `log p(x_t | x_<t)` of the ensemble, and `log p(D = j | x_<t)`, both float32.

    Example:
        >>> log_likelihoods = jnp.log(jnp.array([[0.5, 0.9], [0.25, 0.3]]))
        >>> mixed, posterior = ensemble_log_likelihood(log_likelihoods)
        >>> [f"{p:.3f}" for p in jnp.exp(mixed)], [f"{p:.3f}" for p in jnp.exp(posterior[:, 1])]
        (['0.375', '0.700'], ['0.667', '0.333'])

    Reference:
        arXiv:2208.03306, section 2.2, after Gururangan et al., arXiv:2108.05036, section 3.
    """
    log_likelihoods = log_likelihoods.astype(jnp.float32)
    num_experts = log_likelihoods.shape[0]
    if log_prior is None:
        log_prior = jnp.full(num_experts, -jnp.log(jnp.float32(num_experts)))
    elif log_prior.shape != (num_experts,):
        raise ArgumentError(
            f"log_prior has shape {list(log_prior.shape)}, expected [{num_experts}], one entry for "
            "each expert along the first axis of log_likelihoods."
        )
    seen = jnp.cumsum(log_likelihoods, axis=-1) - log_likelihoods  # log p(x_<t | D = j)
    joint = seen + log_prior.reshape(-1, *[1] * (seen.ndim - 1))
    posterior = joint - jax.nn.logsumexp(joint, axis=0)
    return jax.nn.logsumexp(log_likelihoods + posterior, axis=0), posterior


def cached_prior(
    log_likelihoods: Float[Array, "experts texts tokens"], decay: float = 0.3
) -> Float[Array, " experts"]:
    """Estimate the prior of the domains from texts of the target domain, one after another.

        p(D = j) = sum_i lambda^i p(D = j | x^(i)) / sum_i lambda^i,   i = 1 to N,

    where p(D = j | x^(i)) is the posterior after all tokens of text i, from a uniform prior.

    Args:
        log_likelihoods: of the tokens of N texts, by expert.
        decay: lambda, above 0 and at most 1. Default 0.3, as in the paper, with 100 texts.

    Returns:
        float32 `[experts]`, `log p(D = j)`, for `ensemble_log_likelihood`.

    Raises:
        ValueError: `decay` is out of range.

    Example:
        >>> log_likelihoods = jnp.log(jnp.array([[[0.3], [0.2]], [[0.1], [0.6]]]))
        >>> [f"{p:.4f}" for p in jnp.exp(cached_prior(log_likelihoods, decay=0.5))]
        ['0.5833', '0.4167']

    Reference:
        arXiv:2208.03306, section 2.2 (cached prior).
    """
    check_setting("cached_prior", "decay", decay, PROBABILITY, remedy="Pass 0.3.")
    total = jnp.sum(log_likelihoods.astype(jnp.float32), axis=-1)
    posterior = jax.nn.log_softmax(total, axis=0)
    weights = decay ** jnp.arange(1, posterior.shape[1] + 1, dtype=jnp.float32)
    return jax.nn.logsumexp(posterior, axis=1, b=weights / jnp.sum(weights))
