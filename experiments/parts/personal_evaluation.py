"""Runs of methods for personal models: models for clusters, and the evaluation of own models."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithm import Params
from fedpax.clients.cohort import Cohort
from fedpax.experiments.client_methods import MethodConfig
from fedpax.experiments.parts.own_examples import Part
from fedpax.experiments.parts.personal_models import MODELS
from fedpax.models.losses import ModelLoss
from fedpax.training.experiment import Run

_EXAMPLES = "number of examples"


class ServerState(NamedTuple):
    """The part of an algorithm's state that an evaluation in training reads."""

    params: Params  # the parameters


def own_models(method: MethodConfig) -> bool:
    """Return whether a method makes a model for each client."""
    return method.function.__name__ in MODELS


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
    models_of: Callable[[Any, Cohort], Params], loss_fn: ModelLoss, parts: Iterable[Part]
) -> Callable[[Any], dict[str, float]]:
    """Make `state -> metrics`: means over the held-out examples of the clients of all parts."""

    @jax.jit
    def add_up(state: Any, cohort: Cohort, heldout: Any) -> dict[str, jax.Array]:
        loss, metrics = jax.vmap(loss_fn)(models_of(state, cohort), heldout)
        weights = heldout["mask"].sum(axis=1)
        sums = {name: jnp.sum(weights * x) for name, x in {**metrics, "loss": loss}.items()}
        return {**sums, _EXAMPLES: weights.sum()}

    def evaluate(state: Any) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for part in parts:
            totals.update({name: float(x) for name, x in add_up(state, *part).items()})
        num_examples = totals.pop(_EXAMPLES)
        return {name: total / num_examples for name, total in totals.items()}

    return evaluate
