"""Evaluation by an engine for batch jobs: held-out examples are read where they are evaluated."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from fedpax.algorithm import LossFn, Params, loss_and_metrics
from fedpax.clients.cohort import MASK, Cohort
from fedpax.deploy.batch_work import Clients
from fedpax.primitives import federated_map, federated_sum
from fedpax.training.client_metrics import ClientMetrics
from fedpax.transforms.program import program

NEW = "new_clients/"
"""Before the names of metrics on clients that are held out with all their examples."""


class HeldoutClients(NamedTuple):
    """The held-out examples of a run by client.

    Attributes:
        clients: one round of all clients, each with its held-out examples, as
            `fedpax.data.cohort_rounds` makes it.
        names: the clients' names.
        is_new: whether a client is held out with all its examples.
        loss_fn: `(params, batch) -> (loss, metrics)`, means over the examples of the mask.
        finish: makes the metrics of these means: floats, or arrays `[clients]`.
    """

    clients: Any
    names: Sequence[str]
    is_new: Bool[np.ndarray, " clients"]
    loss_fn: LossFn
    finish: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


def open_heldout(experiment: Any) -> Clients:
    """Open the held-out clients of an experiment; pickled with the experiment for workers."""
    clients: Clients = experiment.open_heldout_clients().clients
    return clients


def evaluate_in_batches(
    heldout: HeldoutClients,
    params: Params,
    run_rounds: Callable[..., list[Any]],
    open_clients: Callable[[], Clients],
    *,
    by_client: bool = False,
) -> tuple[dict[str, float], ClientMetrics | None]:
    """Evaluate a model on held-out examples in one job.

    Without `by_client`, only sums over clients leave the workers.
    """
    ids = heldout.clients.client_ids(0)
    groups = np.stack([~heldout.is_new, heldout.is_new], axis=1)[ids].astype(np.float32)
    evaluate = _program(heldout.loss_fn, len(ids), by_client)
    (result,) = run_rounds(evaluate, params, groups, clients=open_clients)
    totals, shown = jax.tree.map(np.asarray, result)
    metrics: dict[str, float] = {}
    is_split = not heldout.is_new.all()
    for group, prefix in enumerate(("", NEW if is_split else "")):
        means = _means({name: x[group] for name, x in totals.items()})
        if totals["weight"][group] > 0:
            finished = heldout.finish(means)
            metrics |= {f"{prefix}{name}": float(x) for name, x in finished.items()}
    if shown is None:
        return metrics, None
    in_order = {name: x[np.argsort(ids)].astype(np.float64) for name, x in shown.items()}
    finished = {name: np.asarray(x) for name, x in heldout.finish(_means(in_order)).items()}
    return metrics, ClientMetrics(heldout.names, in_order["weight"], finished)


def _means(sums: Mapping[str, Any]) -> dict[str, Any]:
    names = ["loss", *(name for name in sums if name not in ("loss", "weight"))]
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN
        return {name: sums[name] / sums["weight"] for name in names}


def _program(loss_fn: LossFn, num_clients: int, by_client: bool) -> Callable[..., Any]:
    """Make the program of the sums of metrics by group, and of each client if asked."""

    @program(clients=num_clients)
    def evaluate(params: Params, groups: jax.Array, cohort: Cohort) -> Any:
        def measure(
            group: jax.Array, batches: Any, num_steps: jax.Array
        ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
            def sums_of(step: Any) -> dict[str, jax.Array]:
                batch = jax.tree.map(lambda x: x[step], batches)
                batch = {**batch, MASK: batch[MASK].astype(jnp.float32)}
                weight = jnp.sum(batch[MASK])
                _, metrics = loss_and_metrics(loss_fn, params, batch)
                # A batch of padding may have NaN as its metrics.
                sums = {
                    name: jnp.where(weight > 0, weight * jnp.asarray(x, jnp.float32), 0)
                    for name, x in metrics.items()
                }
                return {**sums, "weight": weight}

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums_of, 0))
            sums = jax.lax.fori_loop(
                0, num_steps, lambda i, s: jax.tree.map(jnp.add, s, sums_of(i)), zeros
            )
            return jax.tree.map(lambda x: x * group, sums), sums

        grouped, sums = federated_map(measure, groups, cohort.batches, cohort.num_steps)
        return federated_sum(grouped), sums if by_client else None

    return evaluate
