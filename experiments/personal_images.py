"""Methods for personal models on images: each client's model, evaluated on the client's labels."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from fedpax import Cohort
from fedpax.algorithm import Params
from fedpax.data import Partition
from fedpax.experiments.fedavg_images import FedAvgImages
from fedpax.experiments.parts.client_evaluation import label_weights
from fedpax.experiments.parts.file_experiments import with_clusters, with_own_models
from fedpax.models.losses import ModelLoss, classification_loss
from fedpax.sites.site_experiment import ClientRange, SiteRun
from fedpax.training.client_metrics import (
    ClientMetrics,
    LabelWeights,
    classification_by_client,
)
from fedpax.training.experiment import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersonalImages(FedAvgImages):
    """An image classifier trained by a method for personal models.

    `personal_loss` and `personal_accuracy` measure the clients' own models. `loss` and `accuracy`
    measure the shared model, for HypCluster the clients' models.
    """

    takes_clusters = True

    def build(self) -> Run:
        """Make the run, with a model for each cluster if the method has clusters."""
        run = super().build()
        return with_own_models(run, self.method, self.own_model_means, self.own_metrics_by_client)

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run, with a model for each cluster if the method has clusters."""
        return with_clusters(super().at_site(clients), self.method, self.own_model_means)

    def count_heldout(self) -> int:
        """Return the weight of a site's metrics: with clusters, as `own_model_means` weighs."""
        if self.method.has_shared_model:
            return super().count_heldout()
        return sum(map(len, self.read_population()[0]))

    def own_model_means(self) -> Callable[[Any], dict[str, float]]:
        """Make the evaluation of the clients' own models, on held-out examples of their labels."""
        # For each client, every label has its share of the training examples, by whose number the
        # client counts.
        cohort, batches, weights = self._own_examples
        model, rate = self.make_model(), self.client_learning_rate
        train_loss, loss_fn = self.make_loss(model), classification_loss(model.apply)

        @jax.jit
        def evaluate(
            state: Any, cohort: Cohort, batches: chex.ArrayTree, weights: Float[Array, "..."]
        ) -> dict[str, jax.Array]:
            models = self.method.personal_models(train_loss, rate, state, cohort)
            return client_metrics(loss_fn, models, batches, weights)

        return lambda state: {
            name: float(value) for name, value in evaluate(state, cohort, batches, weights).items()
        }

    def own_metrics_by_client(self) -> Callable[[Any], ClientMetrics]:
        """Make the evaluation by client of the clients' own models, on the same examples."""
        cohort, batches, weights = self._own_examples
        model, rate = self.make_model(), self.client_learning_rate
        train_loss, is_example = self.make_loss(model), batches["mask"] > 0
        labels = batches["label"][is_example]
        ids = np.asarray(cohort.client_ids)

        @jax.jit
        def outputs(state: Any, cohort: Cohort, images: Array) -> Array:
            models = self.method.personal_models(train_loss, rate, state, cohort)

            def apply(params: Params) -> Array:
                return jax.lax.map(lambda batch: model.apply(params, batch), images)

            return jax.lax.map(apply, models)

        def evaluate(state: Any) -> ClientMetrics:
            logits = np.asarray(outputs(state, cohort, batches["image"]))[:, is_example]
            measured = [
                classification_by_client(
                    client_logits,
                    labels,
                    LabelWeights([f"client {k}"], labels, weights[place, None]),
                )
                for place, (k, client_logits) in enumerate(zip(ids, logits, strict=True))
            ]
            order = np.argsort(ids)  # as the shared model's metrics

            def in_order(values: list[np.ndarray]) -> np.ndarray:
                return np.concatenate(values)[order]

            return ClientMetrics(
                [f"client {k}" for k in ids[order]],
                in_order([client.num_examples for client in measured]),
                {
                    name: in_order([client.metrics[name] for client in measured])
                    for name in measured[0].metrics
                },
            )

        return evaluate

    @functools.cached_property
    def _own_examples(self) -> tuple[Cohort, Mapping[str, NDArray[Any]], NDArray[np.float64]]:
        """A round of all clients, and held-out batches with weights by client and label."""
        population, labels = self.read_population()
        cohort = self._read_cohort(population)
        heldout = self.open_heldout(self.make_preprocess())()
        batches = jax.tree.map(lambda *leaves: np.stack(leaves), *heldout)
        parts = [labels[np.asarray(population[k])] for k in np.asarray(cohort.client_ids)]
        return cohort, batches, label_weights(parts, batches["label"][batches["mask"] > 0])

    def _read_cohort(self, population: Partition) -> Cohort:
        rounds, sampler = self.make_rounds_of_all(self.read_clients()[0], population)
        return next(self.make_stream(rounds, sampler))


def client_metrics(
    loss_fn: ModelLoss,
    models: Params,
    batches: Mapping[str, jax.Array],
    weights: Float[Array, "clients classes"],
) -> dict[str, jax.Array]:
    """Average the metrics of each client's model over examples that are weighted by label."""

    def sum_over_client(client: tuple[Params, Float[Array, " classes"]]) -> tuple[Any, jax.Array]:
        model, weights = client

        def weighted(batch: Mapping[str, jax.Array]) -> tuple[Any, jax.Array]:
            mask = batch["mask"] * weights[batch["label"]]
            loss, metrics = loss_fn(model, {**batch, "mask": mask})
            weight = jnp.sum(mask)
            return {
                name: weight * value for name, value in {**metrics, "loss": loss}.items()
            }, weight

        return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(weighted, batches))

    totals, weight = jax.tree.map(jnp.sum, jax.lax.map(sum_over_client, (models, weights)))
    return {name: total / weight for name, total in totals.items()}
