"""The held-out examples of users' files by client, for an evaluation in batch jobs."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedpax.algorithm import Params
from fedpax.clients.cohort import Cohort
from fedpax.data import ClientSampler, CohortRounds, cohort_rounds
from fedpax.data.rounds.preprocess import Preprocess
from fedpax.deploy.batch_evaluation import HeldoutClients
from fedpax.experiments.client_files import OpenFiles
from fedpax.models.losses import ModelLoss


def heldout_of_files(
    opened: OpenFiles,
    names: Sequence[str],
    prepared: Any,
    loss_fn: ModelLoss,
    *,
    batch_size: int,
    preprocess: Preprocess,
    participants: Sequence[str] | None = None,
) -> HeldoutClients:
    """Return the held-out examples of each client that has any."""
    # `participants` names the clients of a deployment in order, of which one may have no held-out
    # example; its batches have exactly `batch_size` examples. `loss_fn` has no regularization.
    parts = opened.parts(opened.heldout | opened.is_new[opened.owners])
    if participants is None:
        batch_size = min(batch_size, max(map(len, parts.values())))
    else:
        parts = {name: parts.get(name, np.zeros(0, np.int64)) for name in participants}
    places = {name: place for place, name in enumerate(opened.names)}
    chosen = [places[name] for name in parts]
    clients: Any = cohort_rounds(
        prepared.examples,
        list(parts.values()),
        ClientSampler(len(parts), len(parts)),
        batch_size=batch_size,
        preprocess=preprocess,
    )
    if participants is not None:
        clients = _InOrder(clients)
    heldout = HeldoutClients(clients, [names[k] for k in chosen], opened.is_new[chosen], loss_fn)
    if prepared.label.task == "classification":
        return heldout
    finish = functools.partial(_finish_regression, prepared.label.scale)
    return heldout._replace(loss_fn=_with_label_moments(loss_fn), finish=finish)


class _InOrder(NamedTuple):
    """Clients of a round in the order of their numbers."""

    clients: CohortRounds

    @property
    def shapes(self) -> Any:
        """The types of the data of a round."""
        return self.clients.shapes

    def client_ids(self, round_number: int) -> NDArray[np.integer]:
        """Return all clients."""
        return np.arange(self.clients.num_clients)

    def read_clients(self, round_number: int, client_ids: NDArray[np.integer]) -> Cohort:
        """Return the data of some clients."""
        return self.clients.read_clients(round_number, client_ids)


def _with_label_moments(loss_fn: ModelLoss) -> ModelLoss:
    """Add the means of the labels and of their squares to the metrics of a loss."""

    def with_moments(params: Params, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, metrics = loss_fn(params, batch)
        label, mask = batch["label"], batch["mask"]
        count = jnp.maximum(mask.sum(), 1)
        moments = {
            "label": jnp.sum(mask * label) / count,
            "label_squared": jnp.sum(mask * jnp.square(label)) / count,
        }
        return loss, {**metrics, **moments}

    return with_moments


def _finish_regression(scale: float, means: Mapping[str, Any]) -> dict[str, Any]:
    """Add the error in the label's unit and the explained variance to means of examples."""
    loss = means["loss"]
    variance = means["label_squared"] - np.square(means["label"])
    # Equal labels have a variance of rounding errors alone.
    known = np.where(variance > 1e-6 * means["label_squared"], variance, np.nan)
    return {"loss": loss, "rmse": np.sqrt(loss) * scale, "r2": 1 - loss / known}
