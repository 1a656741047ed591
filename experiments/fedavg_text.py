"""FedAvg on text: each client has its own documents, such as the files of one module.

    fedpax train --exp=pretrain_text --model.scale_embeddings=False --job_log_dir=runs/base
    fedpax export --job_log_dir=runs/base --out=models/base
    fedpax train --exp=fedavg_lora_text --model.weights=models/base --job_log_dir=runs/lora

The third command trains adapters (LoRA): clients receive and send these and not the model.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.algorithm import LossFn, Params
from fedpax.algorithms import fedavg
from fedpax.data import (
    ClientSampler,
    Partition,
    Source,
    Tokenizer,
    cohort_rounds,
    load,
    partition_natural,
)
from fedpax.data.rounds.client_rows import pack_clients, preprocess_rows
from fedpax.data.rounds.preprocess import Arrays
from fedpax.experiments.client_evaluation import (
    EvaluateClients,
    client_name,
    masked_loss_by_client,
    rows_by_client,
)
from fedpax.experiments.fedavg_clients import CohortConfig, ServerConfig, clients_mesh
from fedpax.experiments.heldout import heldout_evaluator
from fedpax.experiments.language_model import (
    LanguageModelExperiment,
    TextDataConfig,
    without_token_count,
)
from fedpax.experiments.optimizers import OptimizerConfig
from fedpax.models import presets
from fedpax.models.lora import LoRAConfig
from fedpax.models.losses import transformer_loss
from fedpax.parallel.mesh import MeshConfig
from fedpax.parallel.mesh_rule import ShardedSize
from fedpax.training.experiment import Run, Shardings, TrainingConfig


@dataclasses.dataclass(frozen=True)
class ClientTextConfig(TextDataConfig):
    """The text, whose examples name their clients.

    Attributes:
        client_field: the field of an example that names its client.
    """

    client_field: str = "client"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgText(LanguageModelExperiment):
    """A transformer trained by FedAvg on clients' documents, or adapters of one.

    With `mesh.clients=-1`, a round uses the largest number of devices that divides the cohort.

    Attributes:
        data: the text.
        cohort: the clients of a round and their local training. An example is a row of
            `data.seq_len` tokens of one client.
        optimizer: the clients' optimizer. It starts anew in every round, so a schedule counts the
            local steps of a round.
        server: the server optimizer.
    """

    data: ClientTextConfig = ClientTextConfig()
    cohort: CohortConfig
    optimizer: OptimizerConfig
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(clients=-1))

    def sharded_sizes(self) -> list[ShardedSize]:
        """Return the size that the axis of clients divides."""
        return [ShardedSize("cohort.size", self.cohort.size, ("clients",))]

    def make_mesh(self) -> Mesh:
        """Make the mesh of the largest number of devices that divides the cohort."""
        return clients_mesh(self.mesh, self.cohort.size)

    def read_population(self) -> tuple[Partition, None]:
        """Return the indices of each client's rows; text has no labels."""
        tokenizer = self.read_tokenizer()
        return self._pack(self.read_training(), tokenizer)[1], None

    def _pack(self, training: Source, tokenizer: Tokenizer) -> tuple[Arrays, Partition]:
        data = self.data
        return pack_clients(
            training,
            seq_len=data.seq_len,
            field=data.field,
            client_field=data.client_field,
            tokenizer=tokenizer,
        )

    def build(self) -> Run:
        """Read the text, and make the population, cohorts, model, algorithm and mesh."""
        cohort = self.cohort
        mesh = self.make_mesh()
        num_devices = mesh.shape.get("clients", 1)
        trainable = self.trainable(mesh)
        tokenizer = self.read_tokenizer()
        rows, population = self._pack(self.read_training(), tokenizer)
        heldout = self.read_heldout(tokenizer)
        rounds = cohort_rounds(
            rows,
            population,
            ClientSampler(len(population), cohort.size, cohort.seed),
            batch_size=cohort.batch_size,
            local_epochs=cohort.local_epochs,
            max_steps=cohort.max_steps,
            seed=cohort.seed,
            num_devices=num_devices,
            chunk_size=cohort.chunk_size,
            preprocess=preprocess_rows,
        )
        optimizer = self.optimizer.make(rounds.max_steps, trainable.logical_axes)
        over_clients = NamedSharding(
            mesh, PartitionSpec("clients" if "clients" in mesh.axis_names else None)
        )

        # Made at the first evaluation: `fedpax plan` compiles for devices that cannot hold data.
        @functools.cache
        def evaluate_heldout() -> Callable[[Params], dict[str, float]]:
            return trainable.evaluate(
                lambda loss_fn: heldout_evaluator(
                    loss_fn,
                    heldout,
                    batch_size=self.data.heldout_batch_size,
                    placement="clients",
                    num_participants=num_devices,
                    sharding=over_clients,
                ),
                without_token_count(transformer_loss(self.model, load_balance_weight=0.0)),
            )

        @functools.cache
        def evaluate_clients() -> EvaluateClients:
            return trainable.evaluate(
                lambda loss_fn: self._evaluate_by_client(loss_fn, tokenizer),
                without_token_count(transformer_loss(self.model, load_balance_weight=0.0)),
            )

        return Run(
            algorithm=trainable.algorithm(
                lambda loss_fn: fedavg(
                    loss_fn,
                    cohort_size=cohort.size,
                    client_optimizer=optimizer,
                    server_optimizer=self.server.make(),
                    chunk_size=cohort.chunk_size,
                ),
                without_token_count(transformer_loss(self.model)),
            ),
            init=trainable.init,
            cohorts=rounds,
            evaluate=lambda params: evaluate_heldout()(params),
            mesh=mesh,
            shardings=Shardings(params=trainable.shardings, cohort=over_clients),
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
        )

    def _evaluate_by_client(self, loss_fn: LossFn, tokenizer: Tokenizer) -> EvaluateClients:
        """Read the held-out rows of each client, and make the evaluation by client."""
        data = self.data
        heldout = load(data.dataset, data.heldout_split, data_dir=data.data_dir)
        rows, population = self._pack(heldout, tokenizer)
        names = [client_name(name) for name in partition_natural(heldout, data.client_field).names]

        def finish(means: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"loss": means["loss"], "perplexity": np.exp(means["loss"])}

        return masked_loss_by_client(
            loss_fn, rows_by_client(preprocess_rows(rows), population), names, finish
        )


def fedavg_lora_text() -> FedAvgText:
    """FedAvg of adapters (LoRA) on Python's own sources, a module per client. Needs weights.

    Clients receive and send adapters of rank 8 and not the model, which `--model.weights` names: a
    Hugging Face folder, such as `fedpax export` writes from a run of `pretrain_text`.
    """
    return FedAvgText(
        model=presets.base_1m(),
        data=ClientTextConfig(seq_len=64, heldout_batch_size=32, heldout_tokens=32_768),
        lora=LoRAConfig(rank=8),
        cohort=CohortConfig(size=8, batch_size=8, max_steps=10),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="constant", warmup_steps=0, weight_decay=0.0
        ),
        training=TrainingConfig(rounds=20, evaluate_every=5, checkpoint_every=10),
    )
