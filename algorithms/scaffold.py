"""SCAFFOLD."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.local_steps import (
    accumulator,
    added_term,
    after,
    constant_learning_rate,
    count_steps,
    full_gradient,
    local_steps,
    mean_of,
)
from fedpax.algorithms.parts.method_checks import (
    check_population,
    cohort_of_population,
    with_distinct_clients,
)
from fedpax.algorithms.parts.participation import (
    participant_weights,
    rematerialized_map,
    takes_part,
)
from fedpax.algorithms.parts.server import make_server
from fedpax.algorithms.parts.tree_arithmetic import scale, select, subtract
from fedpax.clients import ClientStore, client_store, gather_clients, scatter_clients
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_sum
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class ScaffoldState(NamedTuple):
    """The state of SCAFFOLD: `control` is c, the mean of all clients' c_i (`client_controls`)."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    control: Params
    client_controls: ClientStore[Params]


def scaffold(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    num_clients: int,
    client_optimizer: optax.GradientTransformation,
    option: Literal["I", "II"] = "II",
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[ScaffoldState]:
    """Correct each local gradient by the server's control variate minus the client's.

    From the server's model x, each client i of the cohort takes K local steps; then S of N clients
    are aggregated:

        y_i <- y_i - eta_l (grad f_i(y_i) - c_i + c)               K times, from x
        c_i <- grad f_i(x)                                          option I
               c_i - c + (x - y_i) / (K eta_l)                      option II
        x   <- x + eta_g mean_i (y_i - x);   c <- c + S / N mean_i (new c_i - old c_i)

    Option II computes the new c_i by this formula if `client_optimizer` is `optax.sgd(eta_l)` and
    the parameters are float32 or float64; otherwise c_i is the mean of the K uncorrected local
    gradients, which equals it with SGD. Option I costs one more gradient per batch, at x, where a
    batch counts by the sum of its `"mask"`.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: S, number of clients in a round.
        num_clients: N, number of clients in the population.
        client_optimizer: any optax optimizer; the paper's is SGD with learning rate eta_l.
        option: how a client updates its control variate, "I" or "II".
        server_optimizer: as in `fedavg`; the paper's is SGD with learning rate eta_g.
        aggregator: as in `fedavg`. The differences new c_i - old c_i are always averaged exactly;
            beside a robust aggregator, a client whose difference is not finite keeps its c_i.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. All controls start at 0. A round
        needs `cohort.client_ids`. `cohort.num_examples` weighs the y_i alone.

    Raises:
        ValueError: `option` is neither "I" nor "II"; `num_clients` below `cohort_size`; in a round,
            `cohort.client_ids` is None; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = scaffold(
        ...     loss_fn, cohort_size=2, num_clients=3, client_optimizer=optax.sgd(0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]), client_ids=jnp.array([2, 0]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), state.control.item()
        (1.5, -2.0)
        >>> state.client_controls.to_host().tolist()
        [-5.0, 0.0, -1.0]

    Reference:
        Karimireddy et al., SCAFFOLD, arXiv:1910.06378, algorithm 1.
    """
    if option not in ("I", "II"):
        raise ArgumentError(
            f'scaffold(): option is {option!r}, expected "I" or "II". Pass "II", which computes no '
            "gradient more."
        )
    check_population("scaffold", cohort_size, num_clients)
    server = make_server(
        "scaffold",
        server_optimizer,
        aggregator,
        client_optimizer,
        sent_exactly="changes of controls",
    )

    @program(clients=cohort_size)
    def init(params: Params) -> ScaffoldState:
        server_state, zeros = server.init(params), optax.tree.zeros_like(params)
        return ScaffoldState(params, *server_state, zeros, client_store(zeros, num_clients))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def scaffold_round(state: ScaffoldState, cohort: Cohort) -> tuple[ScaffoldState, Metrics]:
        check_cohort("scaffold", cohort, cohort_size)
        cohort, client_ids = cohort_of_population("scaffold", cohort, num_clients)
        x, c = state.params, state.control
        rate = constant_learning_rate(client_optimizer, x) if option == "II" else None

        def local_train(
            client_control: Params,
            is_present: Bool[Array, ""],
            batches: chex.ArrayTree,
            num_steps: NumSteps,
        ) -> tuple[Params, Metrics, Params, Params]:
            none = optax.tree.zeros_like(c)
            # A client without a step keeps c_i = 0 - (0 - c_i). The old c_i has no other reader:
            # XLA for CPU would copy it, or all clients' controls.
            correction = subtract(select(is_present, c, none), client_control)
            moved, metrics, gradient, corrected = _train(
                loss_fn, client_optimizer, x, correction, batches, num_steps, option, rate
            )
            change = jax.tree.map(lambda new, c: jnp.where(is_present, new - c, 0), corrected, c)
            change, control = keep_finite(
                server.aggregator, (none, client_control), (change, gradient)
            )
            return moved, metrics, change, control

        client_control = gather_clients(state.client_controls, client_ids)
        pseudo_gradients, metrics, changes, new = rematerialized_map(
            local_train,
            client_control,
            takes_part(cohort),
            cohort.batches,
            cohort.num_steps,
            chunk_size=chunk_size,
        )
        change = scale(1 / num_clients, federated_sum(changes))
        state, metrics = server.step(state, pseudo_gradients, metrics, participant_weights(cohort))
        return state._replace(
            control=optax.tree.add(c, change),
            client_controls=scatter_clients(state.client_controls, client_ids, new),
        ), metrics

    checked_round = with_distinct_clients("scaffold", scaffold_round)
    return FederatedAlgorithm(
        init,
        checked_round,
        sent_exactly=server.sent_exactly,
        unequal_steps="their control variates count alike, so that it can train worse than fedavg",
    )


def _train(
    loss_fn: LossFn,
    client_optimizer: optax.GradientTransformation,
    x: Params,
    correction: Params,
    batches: chex.ArrayTree,
    num_steps: NumSteps,
    option: Literal["I", "II"],
    rate: Any,
) -> tuple[Params, Metrics, Params, Params]:
    # Returns x - y_i; the metrics; the new c_i; and the gradient plus `correction`.
    terms = [added_term(correction), client_optimizer]
    if option == "II" and rate is None:
        terms = [_gradient_sum(), *terms]
    optimizer = after(*terms)
    y, optimizer_state, metrics = local_steps(
        loss_fn, optimizer, x, optimizer.init(x), batches, num_steps
    )
    steps, moved = count_steps(batches, num_steps), subtract(x, y)
    if option == "II" and rate is not None:
        corrected = scale(1 / (rate * jnp.maximum(steps, 1)), moved)
        return moved, metrics, subtract(corrected, correction), corrected
    if option == "I":
        gradient = full_gradient(loss_fn, x, batches, num_steps)
    else:
        gradient = mean_of(optimizer_state[0], steps, x)
    gradient = select(steps > 0, gradient, scale(-1, correction))
    return moved, metrics, gradient, optax.tree.add(gradient, correction)


def _gradient_sum() -> optax.GradientTransformation:
    """Sum the gradients of all steps in the state, and pass them on unchanged."""

    def update(gradient: Params, total: Params, params: Any = None) -> tuple[Params, Params]:
        return gradient, jax.tree.map(jnp.add, total, gradient)

    return optax.GradientTransformation(accumulator, update)
