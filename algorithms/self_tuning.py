"""Self-tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import finite_weights
from fedpax.algorithms.parts.local_steps import (
    gradient_and_metrics,
    mean_over_examples,
)
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.checks import COUNT, POSITIVE, check_argument
from fedpax.clients.cohort import Cohort, NumSteps
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_max, federated_mean
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program

Hyperparameters = Mapping[str, Float[Array, ""]]


class SelfTuningState(NamedTuple):
    """The state of a self-tuning method: hyperparameters are logarithms, float32 by name."""

    algorithm_state: chex.ArrayTree
    log_hyperparameters: dict[str, Float[Array, ""]]
    hyper_optimizer_state: optax.OptState

    @property
    def params(self) -> Params:
        """The server's model."""
        return self.algorithm_state.params

    @property
    def hyperparameters(self) -> dict[str, Float[Array, ""]]:
        """The hyperparameters of the next round."""
        return jax.tree.map(jnp.exp, self.log_hyperparameters)


def self_tuning(
    make_algorithm: Callable[[Hyperparameters], FederatedAlgorithm],
    hyperparameters: Mapping[str, float],
    loss_fn: LossFn,
    *,
    hyper_optimizer: optax.GradientTransformation | None = None,
    tuning_steps: int = 1,
    placement: str = "clients",
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[SelfTuningState]:
    """Tune positive hyperparameters of any method by the gradient of the loss after each round.

    A round of the method with hyperparameters h takes the model x to x'(h). Each round ends with

        log h <- log h - update(d/d log h mean_i f_i(x'(h))),

    where f_i is the loss of participant i on its first batches, and `update` is an optimizer.

    Hyperparameters of the server cost one gradient of the f_i per round. Each one of the
    participants (learning rate, FedProx's mu) costs one more pass over the local steps. This pass
    stores the values of all participants' local steps, unless the method and `self_tuning` have a
    `chunk_size`.

    A hyperparameter keeps its value where its derivative is not finite, or every participant is
    absent.

    To tune hyperparameters of participants that use Adam or AdamW, give these a small `eps_root`,
    such as 1e-12: otherwise a gradient entry of 0 makes all derivatives NaN.

    Hyperparameters stay positive: write `optax.sgd(rate, momentum=1 - h["damping"])`.

    Args:
        make_algorithm: makes the method from a dict of scalars, which can be traced. The structure
            of its state must not depend on their values.
        hyperparameters: initial values by name, positive.
        loss_fn: `(params, batch) -> (loss, metrics)`.
        hyper_optimizer: any optax optimizer. Default None: `optax.adam(0.05)`.
        tuning_steps: number of a participant's first batches in f_i.
        placement: name of the method's placement: "clients" or "islands".
        chunk_size: number of participants that a device evaluates at once; see `fedpax.program`.

    Returns:
        `init(params)` and `round(state, cohort)`. `state.hyperparameters` has the next round's
        hyperparameters. Metrics: the method's; the round's hyperparameters,
        `"hyperparameter/<name>"`; `"loss_after"`, the mean of the finite f_i at the new model; and
        `"non_finite_hypergradients"`, the number of derivatives that are NaN or infinite.

    Raises:
        TypeError: a setting has another type.
        ValueError: a hyperparameter is not positive, or there is none; `tuning_steps` below 1.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp, optax
        >>> from fedpax.algorithms import fedavg, self_tuning
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = self_tuning(
        ...     lambda h: fedavg(
        ...         loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.1),
        ...         server_optimizer=optax.sgd(h["learning_rate"]),
        ...     ),
        ...     {"learning_rate": 0.5},
        ...     loss_fn,
        ... )
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))
        >>> train = jax.jit(algorithm.round)
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> for _ in range(20):
        ...     state, metrics = train(state, cohort)
        >>> state.hyperparameters["learning_rate"].item() > 0.8  # 0.5 was too small
        True

    Reference:
        Rush et al., arXiv:2301.07806 (hypergradients through rounds); Baydin et al.,
        arXiv:1703.04782, algorithm 1.
    """
    check_optimizer("self_tuning", "hyper_optimizer", hyper_optimizer, optional=True)
    optimizer = optax.adam(0.05) if hyper_optimizer is None else hyper_optimizer
    _check(hyperparameters, tuning_steps)

    def init(params: Params) -> SelfTuningState:
        log = {name: jnp.float32(math.log(value)) for name, value in hyperparameters.items()}
        algorithm_state = make_algorithm(jax.tree.map(jnp.exp, log)).init(params)
        return SelfTuningState(algorithm_state, log, optimizer.init(log))

    def self_tuning_round(
        state: SelfTuningState, cohort: Cohort
    ) -> tuple[SelfTuningState, Metrics]:
        log = state.log_hyperparameters

        def model_after(vector: Float[Array, " hyperparameters"]) -> tuple[Params, tuple]:
            by_name = {name: jnp.exp(h) for name, h in zip(log, vector, strict=True)}
            after, metrics = make_algorithm(by_name).round(state.algorithm_state, cohort)
            return after.params, (after, metrics)

        # The derivatives of the model have a last axis of hyperparameters.
        vector = jnp.stack(list(log.values()))
        derivatives, (after, metrics) = jax.jacfwd(model_after, has_aux=True)(vector)
        (loss, gradient), is_measured = _evaluate(
            loss_fn, after.params, cohort, tuning_steps, placement, chunk_size
        )
        slopes = jax.tree.map(
            lambda g, d: jnp.tensordot(g, d.astype(jnp.float32), g.ndim), gradient, derivatives
        )
        hypergradients = sum(jax.tree.leaves(slopes), 0 * vector)
        finite = jnp.isfinite(hypergradients)
        by_name = dict(zip(log, jnp.where(finite, hypergradients, 0), strict=True))
        updates, optimizer_state = optimizer.update(by_name, state.hyper_optimizer_state, log)
        reported = {f"hyperparameter/{name}": h for name, h in state.hyperparameters.items()}
        skipped = jnp.sum(~finite, dtype=jnp.float32)
        reported |= {"loss_after": loss, "non_finite_hypergradients": skipped}
        # Momentum moves a hyperparameter even if its derivative is set to 0, or every participant
        # is absent.
        tuned = dict(zip(log, finite & is_measured, strict=True))
        moved = optax.apply_updates(log, updates)
        log = {name: jnp.where(tuned[name], moved[name], log[name]) for name in log}
        optimizer_state = select(is_measured, optimizer_state, state.hyper_optimizer_state)
        metrics.pop("epsilon", None)  # gradients have no noise
        return SelfTuningState(after, log, optimizer_state), metrics | reported

    return FederatedAlgorithm(
        init, self_tuning_round, sent_exactly="losses and gradients at the model after the round"
    )


def _evaluate(
    loss_fn: LossFn,
    params: Params,
    cohort: Cohort,
    tuning_steps: int,
    placement: str,
    chunk_size: ChunkSize,
) -> tuple[tuple[Float[Array, ""], Params], Bool[Array, ""]]:
    """Average loss and gradient over participants by weight, on their first batches."""
    num_participants = jax.tree.leaves(cohort.batches)[0].shape[0]

    @program(**{placement: num_participants}, chunk_size=chunk_size)
    def average(
        params: Params, cohort: Cohort
    ) -> tuple[tuple[Float[Array, ""], Params], Bool[Array, ""]]:
        def local(batches: chex.ArrayTree, num_steps: NumSteps) -> tuple[Float[Array, ""], Params]:
            def loss_and_gradient(batch: chex.ArrayTree) -> tuple[Float[Array, ""], Params]:
                gradient, metrics = gradient_and_metrics(loss_fn, params, batch)
                return jnp.asarray(metrics["loss"], jnp.float32), gradient

            first = jax.tree.map(lambda b: b[:tuning_steps], batches)
            return mean_over_examples(loss_and_gradient, first, num_steps)

        values = rematerialized_map(local, cohort.batches, cohort.num_steps, chunk_size=chunk_size)
        weights = participant_weights(cohort)
        is_measured = jnp.bool_(True) if weights is None else federated_max(weights) > 0
        # Beside a robust aggregator, the model is finite though a participant's own loss is not.
        finite = finite_weights(values, weights)
        is_finite = ~is_measured | (federated_max(finite) > 0)
        mean = federated_mean(values, finite)
        return jax.tree.map(lambda m: jnp.where(is_finite, m, jnp.nan), mean), is_measured

    return average(params, cohort)


def _check(hyperparameters: Mapping[str, float], tuning_steps: int) -> None:
    if not hyperparameters:
        raise ArgumentError(
            "self_tuning(): hyperparameters is empty, expected initial values by name. Pass for "
            "example {'learning_rate': 1.0}."
        )
    for name, value in hyperparameters.items():
        remedy = (
            "Its logarithm is tuned: express it by a positive number, such as a momentum by 1 - "
            "damping."
        )
        check_setting("self_tuning", f"hyperparameters[{name!r}]", value, POSITIVE, remedy=remedy)
    remedy = "It is the number of each participant's batches that measure the loss after a round."
    check_argument("self_tuning", "tuning_steps", tuning_steps, COUNT, remedy=remedy)
