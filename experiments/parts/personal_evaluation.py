"""Runs of methods for personal models: models for clusters, and the evaluation of own models."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedpax.algorithm import Params
from fedpax.clients.cohort import Cohort
from fedpax.experiments.client_methods import MethodConfig
from fedpax.experiments.parts.personal_models import MODELS
from fedpax.models.losses import ModelLoss
from fedpax.training.experiment import Run


class ServerState(NamedTuple):
    """The part of an algorithm's state that an evaluation in training reads."""

    params: Params  # the parameters


def own_models(method: MethodConfig) -> bool:
    """Return whether a method makes a model for each client."""
    return method.function.__name__ in MODELS


def pad_cohort(cohort: Cohort, multiple: int) -> Cohort:
    """Pad a cohort with absent clients, whose id is -1, to a multiple of a number.

    Example:
        >>> cohort = Cohort({"x": np.ones((3, 2))}, client_ids=np.arange(3))
        >>> pad_cohort(cohort, 2).client_ids.tolist()
        [0, 1, 2, -1]
    """

    def pad(leaf: Any, value: int = 0) -> NDArray[Any]:
        absent = -len(leaf) % multiple
        return np.pad(leaf, [(0, absent), *[(0, 0)] * (np.ndim(leaf) - 1)], constant_values=value)

    padded: Cohort = jax.tree.map(pad, cohort._replace(client_ids=None))
    return padded._replace(client_ids=pad(np.asarray(cohort.client_ids), -1))


def with_own_models(
    run: Run, method: MethodConfig, evaluate: Callable[[], Callable[[Any], dict[str, float]]]
) -> Run:
    """Evaluate clients' own models in a run, and make a model for each cluster if there are any."""
    # The further metrics have the prefix `personal_`. A method with clusters has no single shared
    # model: all of its metrics come from the own models.

    def evaluate_state(state: Any) -> dict[str, float]:
        return {f"personal_{name}": value for name, value in evaluate()(state).items()}

    run = run._replace(evaluate_state=evaluate_state)
    if method.has_shared_model:
        return run
    assert run.shardings is not None
    stacked = jax.tree.map(
        lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)),
        run.shardings.params,
    )
    return run._replace(
        init=method.make_init(run.init),
        shardings=run.shardings._replace(params=stacked),
        evaluate=lambda params: evaluate()(ServerState(params)),
    )


def heldout_metrics(
    models_of: Callable[[Any, Cohort], Params], loss_fn: ModelLoss
) -> Callable[[Any, Cohort, Mapping[str, Any]], dict[str, float]]:
    """Make `(state, cohort, heldout) -> metrics`: means over the held-out examples of clients."""

    @jax.jit
    def evaluate(state: Any, cohort: Cohort, heldout: Any) -> dict[str, jax.Array]:
        loss, metrics = jax.vmap(loss_fn)(models_of(state, cohort), heldout)
        weights = heldout["mask"].sum(axis=1)
        by_name = {**metrics, "loss": loss}
        return {name: jnp.sum(weights * x) / weights.sum() for name, x in by_name.items()}

    return lambda *inputs: {name: float(value) for name, value in evaluate(*inputs).items()}
