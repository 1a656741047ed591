"""HypCluster."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedpax.aggregators import Aggregator, random_stream
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_metrics, local_update, optimizer_step
from fedpax.algorithms.parts.method_checks import check_no_keys
from fedpax.algorithms.parts.participation import (
    mean_metrics,
    participant_weights,
    rematerialized_map,
)
from fedpax.algorithms.parts.server import make_server
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.checks import COUNT, check_argument
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_sum
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class HypClusterState(NamedTuple):
    """The state of HypCluster: leaves of `params` are `[num_clusters, ...]`."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_states: tuple[chex.ArrayTree, ...]


def hypcluster(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    num_clusters: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[HypClusterState]:
    """Let each client choose the model with the least loss on its data, and average by choice.

    Each client i of the cohort receives all models x_1 ... x_q, chooses j(i) = argmin_j f_i(x_j),
    and takes one optimizer step per batch from x_j(i) to y_i. Each model is averaged over its
    clients:

        x_j <- x_j + sum_{i: j(i) = j} n_i (y_i - x_j) / sum_{i: j(i) = j} n_i

    A model that no client chose stays, with its server optimizer's state. Clients keep no state.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`, for one model.
        cohort_size: number of clients in a round.
        num_clusters: q, number of models. With 1 it is `fedavg`.
        client_optimizer: any optax optimizer.
        server_optimizer: as in `fedavg`, for each model by itself.
        aggregator: as in `fedavg`, for each model by itself; a client of another cluster has weight
            0.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. The leaves of `params` are
        `[num_clusters, ...]`: start from different models, because equal ones stay equal. A round
        has q more forward passes per batch, and reduces q models.

    Raises:
        ValueError: `num_clusters` below 1; in `init`, a leaf without an axis of `num_clusters` in
            front; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = hypcluster(loss_fn, cohort_size=3, num_clusters=2,
        ...                        client_optimizer=optax.sgd(0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]], [[7.0]]]))
        >>> state = algorithm.init(jnp.array([0.0, 4.0]))
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.params.tolist()
        [0.5, 5.0]

    Reference:
        Mansour et al., arXiv:2002.10619, algorithm HypCluster.
    """
    check_argument("hypcluster", "num_clusters", num_clusters, COUNT, remedy="Pass 1 for fedavg.")
    server = make_server(
        "hypcluster",
        server_optimizer,
        aggregator,
        client_optimizer,
        sent_exactly="which model they choose",
    )

    @program(clients=cohort_size)
    def init(params: Params) -> HypClusterState:
        check_no_keys(params)
        _check_models(params, num_clusters)
        optimizer_state = jax.vmap(server.optimizer.init)(params)
        aggregator_states = tuple(
            server.aggregator.init(jax.tree.map(lambda p, j=j: p[j], params))
            for j in range(num_clusters)
        )
        return HypClusterState(params, optimizer_state, aggregator_states)

    def step(
        direction: Params, weight: Float[Array, ""], params: Params, optimizer_state: optax.OptState
    ) -> tuple[Params, optax.OptState]:
        """Step one model, if a client chose it: momentum does not move it by itself."""
        stepped = optimizer_step(server.optimizer, direction, optimizer_state, params)
        return select(weight > 0, stepped, (params, optimizer_state))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def hypcluster_round(state: HypClusterState, cohort: Cohort) -> tuple[HypClusterState, Metrics]:
        check_cohort("hypcluster", cohort, cohort_size)

        def choose(batches: chex.ArrayTree, num_steps: NumSteps) -> Int[Array, ""]:
            return choose_cluster(loss_fn, state.params, batches, num_steps)

        def local_train(
            batches: chex.ArrayTree, num_steps: NumSteps, cluster: Int[Array, ""]
        ) -> tuple[Params, Metrics]:
            x = jax.tree.map(lambda p: p[cluster], state.params)
            return local_update(loss_fn, client_optimizer, x, batches, num_steps)

        # A separate map, so that an aggregator that needs the weights first does not train twice.
        clusters = rematerialized_map(
            choose, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        pseudo_gradients, metrics = rematerialized_map(
            local_train, cohort.batches, cohort.num_steps, clusters, chunk_size=chunk_size
        )
        weights = participant_weights(cohort)

        def aggregate(j: int) -> tuple[Params, chex.ArrayTree, Metrics, Float[Array, ""]]:
            def weight(cluster: jax.Array, count: jax.Array | None) -> jax.Array:
                return jnp.where(cluster == j, 1 if count is None else count, 0).astype(jnp.float32)

            members = federated_map(weight, clusters, weights)
            with random_stream(j):
                aggregated = server.aggregator.aggregate(
                    state.aggregator_states[j], pseudo_gradients, members
                )
            return *aggregated, federated_sum(members)

        results = map(aggregate, range(num_clusters))
        directions, aggregator_states, reported, total_weights = zip(*results, strict=True)
        before = state.params, state.server_optimizer_state
        after = jax.vmap(step)(_stack(directions), jnp.stack(total_weights), *before)
        average = jax.tree.map(lambda m: jnp.mean(m, axis=0), _stack(reported))
        metrics = mean_metrics(metrics, weights, server.aggregator, average)
        return HypClusterState(*after, aggregator_states), metrics

    algorithm = FederatedAlgorithm(init, hypcluster_round, sent_exactly=server.sent_exactly)
    return algorithm._replace(adapted_model=functools.partial(_chosen_model, loss_fn))


def _chosen_model(
    loss_fn: LossFn, state: HypClusterState, batches: chex.ArrayTree, num_steps: NumSteps
) -> Params:
    cluster = choose_cluster(loss_fn, state.params, batches, num_steps)
    return jax.tree.map(lambda p: p[cluster], state.params)


def choose_cluster(
    loss_fn: LossFn,
    models: Params,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> Int[Array, ""]:
    """Return the index of the model with the least loss over a client's batches.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        models: a pytree of arrays `[num_clusters, ...]`.
        batches: the client's batches, a pytree of arrays `[steps, batch, ...]`.
        num_steps: how many of the first batches are valid, as in `local_steps`.

    Example:
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> choose_cluster(loss_fn, jnp.array([0.0, 4.0]), jnp.array([[5.0], [1.5]])).item()
        1
    """

    def loss(model: Params) -> jax.Array:
        return local_metrics(loss_fn, model, batches, num_steps)["loss"]

    return jnp.argmin(jax.vmap(loss)(models))


def _stack(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _check_models(params: Params, num_clusters: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if jnp.shape(leaf)[:1] != (num_clusters,):
            raise ArgumentError(
                f"hypcluster(): params{jax.tree_util.keystr(path)} has shape "
                f"{list(jnp.shape(leaf))}, expected [{num_clusters}, ...]: a model for each "
                "cluster. Make them with jax.vmap over random keys, or stack them."
            )
