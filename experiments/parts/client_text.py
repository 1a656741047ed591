"""Language models on clients' documents: the rows of each client, and the run of FedAvg."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import fedavg
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    Partition,
    Source,
    Tokenizer,
    partition_natural,
)
from fedpax.data.rounds.client_token_rows import pack_clients, preprocess_rows
from fedpax.data.rounds.labeled_examples import Arrays
from fedpax.errors import ArgumentError
from fedpax.experiments.language_model_experiment import (
    LanguageModelExperiment,
    TextDataConfig,
    without_token_count,
)
from fedpax.experiments.parts.client_evaluation import (
    EvaluateClients,
    HeldoutSets,
    client_name,
    heldout_evaluator,
    masked_loss_by_client,
    rows_by_client,
)
from fedpax.experiments.parts.weights import Trainable
from fedpax.models.losses import transformer_loss
from fedpax.parallel.mesh import MeshConfig
from fedpax.settings.cohort_settings import (
    CohortConfig,
    OnClientsMesh,
    ServerConfig,
    over_clients,
)
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.training.experiment import Run, Shardings


@dataclasses.dataclass(frozen=True)
class ClientTextConfig(TextDataConfig):
    """The text, whose examples name their clients.

    Attributes:
        client_field: the field of an example that names its client.
    """

    client_field: str = "client"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientText(OnClientsMesh, LanguageModelExperiment):
    """A transformer trained by FedAvg on clients' documents, or adapters of one.

    Attributes:
        data: the text.
        cohort: the clients of a round and their local training. An example is a row of tokens.
        optimizer: the clients' optimizer. It starts anew in every round, so a schedule counts the
            local steps of a round.
        server: the server optimizer.
    """

    data: ClientTextConfig = ClientTextConfig()
    cohort: CohortConfig
    optimizer: OptimizerConfig
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(clients=-1))

    def read_population(self) -> tuple[Partition, None]:
        """Return the indices of each client's rows; text has no labels."""
        tokenizer = self.read_tokenizer()
        return self._pack(self.read_training(), tokenizer)[1], None

    def _pack(
        self, training: Source, tokenizer: Tokenizer, *, of_one: bool = False
    ) -> tuple[Arrays, Partition]:
        data = self.data
        return pack_clients(
            training,
            seq_len=data.seq_len,
            field=data.read_field(),
            client_field=None if of_one else data.client_field,
            tokenizer=tokenizer,
        )

    def _make_rounds(
        self, rows: Arrays, population: Partition, sampler: ClientSampler, num_devices: int = 1
    ) -> CohortRounds:
        sizes = {"num_devices": num_devices, "chunk_size": self.cohort.at_once}
        return self.cohort.rounds(rows, population, sampler, preprocess_rows, **sizes)

    def _fit(self, mesh: Mesh, trainable: Trainable, rounds: CohortRounds) -> Self:
        """Replace cohort.chunk_size="auto" by the number of clients that fit on a device."""
        if trainable.frozen is not None:  # adapters: their loss needs the frozen parameters
            return self
        params = jax.eval_shape(lambda: trainable.init(jax.random.key(0)))
        loss_fn = without_token_count(transformer_loss(self.model))
        cohort = self.cohort.fit(mesh, loss_fn, params, rounds.shapes.batches)
        return dataclasses.replace(self, cohort=cohort)

    def _make_algorithm(self, trainable: Trainable, max_steps: int) -> FederatedAlgorithm:
        optimizer = self.optimizer.make(max_steps, trainable.logical_axes)
        return trainable.algorithm(
            lambda loss_fn: fedavg(
                loss_fn,
                cohort_size=self.cohort.size,
                client_optimizer=optimizer,
                server_optimizer=self.server.make(),
                chunk_size=self.cohort.at_once,
            ),
            without_token_count(transformer_loss(self.model)),
        )

    def _make_evaluation(
        self,
        trainable: Trainable,
        heldout: HeldoutSets,
        num_devices: int = 1,
        sharding: NamedSharding | None = None,
    ) -> Callable[[Params], dict[str, float]]:
        return trainable.evaluate(
            lambda loss_fn: heldout_evaluator(
                loss_fn,
                heldout,
                batch_size=self.data.heldout_batch_size,
                placement="clients",
                num_participants=num_devices,
                sharding=sharding,
            ),
            without_token_count(transformer_loss(self.model, load_balance_weight=0.0)),
        )

    def _build(self, rows: Arrays, population: Partition, heldout: HeldoutSets | None) -> Run:
        cohort = self.cohort
        mesh = self.make_mesh()
        num_devices = mesh.shape.get("clients", 1)
        trainable = self.trainable(mesh)
        sampler = ClientSampler(len(population), cohort.size, cohort.seed)
        rounds = self._make_rounds(rows, population, sampler, num_devices)
        fitted = self._fit(mesh, trainable, rounds)
        rounds.chunk_size = fitted.cohort.at_once

        # Lazy: `fedpax plan` compiles for devices that cannot hold data.
        @functools.cache
        def evaluate_heldout() -> Callable[[Params], dict[str, float]]:
            if heldout is None:
                raise ArgumentError(
                    f"data.dataset={self.data.dataset} has no held-out documents, expected some. "
                    "Set --data.heldout_fraction=0.1, or write {split} in the path."
                )
            return self._make_evaluation(trainable, heldout, num_devices, over_clients(mesh))

        @functools.cache
        def evaluate_clients() -> EvaluateClients:
            return trainable.evaluate(
                lambda loss_fn: self._evaluate_by_client(loss_fn, self.read_tokenizer()),
                without_token_count(transformer_loss(self.model, load_balance_weight=0.0)),
            )

        return Run(
            algorithm=fitted._make_algorithm(trainable, rounds.max_steps),
            init=trainable.init,
            cohorts=rounds,
            evaluate=lambda params: evaluate_heldout()(params),
            mesh=mesh,
            shardings=Shardings(params=trainable.shardings, cohort=over_clients(mesh)),
            items_per_round=rounds.items_per_round * self.data.seq_len,
            item_unit="tokens",
            placement="clients",
            cohort_shapes=rounds.shapes,
            flops_per_item=trainable.flops_per_token,
            flops_convention=trainable.flops_convention,
            initial=trainable.initial,
            frozen=trainable.frozen,
            whole_model=trainable.whole_model,
            evaluate_clients=lambda params: evaluate_clients()(params),
            heldout_fingerprint=heldout and heldout.fingerprint,
            notes=self.notes(self.optimizer, rounds.max_steps),
        )

    def _evaluate_by_client(self, loss_fn: LossFn, tokenizer: Tokenizer) -> EvaluateClients:
        """Read the held-out rows of each client, and make the evaluation by client."""
        data = self.data
        heldout = data.load(data.dataset, data.heldout_split)
        rows, population = self._pack(heldout, tokenizer)
        named, trained = (
            partition_natural(source, data.client_field).names
            for source in (heldout, self.read_training())
        )
        parts = dict.fromkeys(sorted({*named, *trained}), np.zeros(0, np.int64))
        parts.update(zip(named, population, strict=True))

        def finish(means: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"loss": means["loss"], "perplexity": np.exp(means["loss"])}

        return masked_loss_by_client(
            loss_fn,
            rows_by_client(preprocess_rows(rows), list(parts.values())),
            [client_name(name) for name in parts],
            finish,
        )
