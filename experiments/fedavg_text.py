"""FedAvg on text: each client has its own documents, such as the files of one module.

    fedpax train --exp=pretrain_text --model.scale_embeddings=False --job_log_dir=runs/base
    fedpax export --job_log_dir=runs/base --out=models/base
    fedpax train --exp=fedavg_lora_text --model.weights=models/base --job_log_dir=runs/lora

The third command trains adapters (LoRA): clients receive and send these and not the model.

At sites with documents of their own, `fedpax syncer` and `fedpax join` run the same rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import fedavg
from fedpax.data import (
    ClientSampler,
    CohortRounds,
    Partition,
    Source,
    Tokenizer,
    cohort_rounds,
    partition_natural,
)
from fedpax.data.rounds.client_rows import pack_clients, preprocess_rows
from fedpax.data.rounds.preprocess import Arrays
from fedpax.errors import ArgumentError
from fedpax.experiments.client_evaluation import (
    EvaluateClients,
    client_name,
    masked_loss_by_client,
    rows_by_client,
)
from fedpax.experiments.clients_mesh import clients_mesh
from fedpax.experiments.cohort_settings import CohortConfig, ServerConfig
from fedpax.experiments.heldout import HeldoutSets, heldout_evaluator
from fedpax.experiments.language_model import (
    LanguageModelExperiment,
    TextDataConfig,
    without_token_count,
)
from fedpax.experiments.optimizers import OptimizerConfig
from fedpax.experiments.site_clients import (
    ChosenClients,
    OverSites,
    SitePopulation,
    batch_shapes,
    drawer,
    sample_present,
)
from fedpax.experiments.trainable import Trainable
from fedpax.experiments.weights import hash_weights
from fedpax.models import presets
from fedpax.models.lora import LoRAConfig
from fedpax.models.losses import transformer_loss
from fedpax.parallel.mesh import MeshConfig
from fedpax.parallel.mesh_rule import ShardedSize
from fedpax.sites.rounds.contract import (
    SITE_FILE,
    ClientRange,
    CoordinatorRun,
    Question,
    SiteRun,
)
from fedpax.sites.transport.checked_header import CheckedHeader
from fedpax.training.experiment import Run, Shardings
from fedpax.training.training_config import TrainingConfig
from fedpax.user_files.formats import is_files

MOST_STEPS = 1 << 20
"""Local steps of a round that a site can ask of all sites."""


@dataclasses.dataclass(frozen=True)
class ClientTextConfig(TextDataConfig):
    """The text, whose examples name their clients.

    Attributes:
        client_field: the field of an example that names its client.
    """

    client_field: str = "client"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgText(OverSites, LanguageModelExperiment):
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
    own_fields: ClassVar[tuple[str, ...]] = (
        "data.answer_field",
        "data.chat_template",
        "data.client_field",
        "data.dataset",
        "data.end_of_document",
        "data.field",
        "data.heldout_batch_size",
        "data.heldout_fraction",
        "data.heldout_sets",
        "data.heldout_split",
        "data.heldout_tokens",
        "data.messages_field",
        "data.prompt_field",
        "data.tokenizer",
    )

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
        cohort = self.cohort
        return cohort_rounds(
            rows,
            population,
            sampler,
            batch_size=cohort.batch_size,
            local_epochs=cohort.local_epochs,
            max_steps=cohort.max_steps,
            seed=cohort.seed,
            num_devices=num_devices,
            chunk_size=cohort.chunk_size,
            preprocess=preprocess_rows,
        )

    def _make_algorithm(self, trainable: Trainable, max_steps: int) -> FederatedAlgorithm:
        optimizer = self.optimizer.make(max_steps, trainable.logical_axes)
        return trainable.algorithm(
            lambda loss_fn: fedavg(
                loss_fn,
                cohort_size=self.cohort.size,
                client_optimizer=optimizer,
                server_optimizer=self.server.make(),
                chunk_size=self.cohort.chunk_size,
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

    # ---- rounds over sites with documents of their own (`fedpax.sites.rounds.contract`)

    def shared_content(self) -> dict[str, str]:
        """Return hashes of the tokenizer, and of the weights that every site adapts."""
        # The tokenizer's name ends with a hash of its file and the separator of documents.
        content = {"data.tokenizer": ":".join(self.read_tokenizer().name.split(":")[-2:])}
        if self.data.has_mask:
            content["data.chat_template"] = str(self.data.read_field()).rsplit(" ", 1)[-1]
        if self.lora.rank:
            content["model.weights"] = hash_weights(self.model)
        return content

    @functools.cached_property
    def _site_rows(self) -> tuple[Arrays, Partition]:
        """The rows of a site's documents, and the indices of each client's rows."""
        training, field = self.read_training(), self.data.client_field
        by_default = field == ClientTextConfig.client_field
        of_one = by_default and len(training) > 0 and field not in training[0]
        return self._pack(training, self.read_tokenizer(), of_one=of_one)

    @functools.cached_property
    def _site_heldout(self) -> HeldoutSets | None:
        """A site's held-out documents; None if its files have none."""
        data = self.data
        if is_files(data.dataset) and not data.heldout_fraction and "{split}" not in data.dataset:
            return None
        return self.read_heldout(self.read_tokenizer())

    def _sharing_documents(self, other: Self) -> Self:
        """Give another experiment on the same documents what this one has read."""
        names = ("_site_rows", "_site_heldout", "_agreed_steps", "_at_site")
        other.__dict__.update({n: self.__dict__[n] for n in names if n in self.__dict__})
        return other

    def sized(self, num_clients: int) -> Self:
        """Return the experiment with at most as many clients in a round as there are."""
        return self._sharing_documents(super().sized(num_clients))

    def describe_site(self) -> dict[str, Any]:
        """Return a site's number of clients, and the most local steps of one without a limit."""
        rows, population = self._site_rows
        described = {"clients": len(population)}
        if self.cohort.max_steps is None:
            sampler = ClientSampler(len(population), 1, self.cohort.seed)
            described["max_steps"] = self._make_rounds(rows, population, sampler).max_steps
        return described

    def shared_properties(self, description: Mapping[str, Any]) -> Mapping[str, str]:
        """Check the number of local steps; nothing else must be equal."""
        if self.cohort.max_steps is None:
            steps = CheckedHeader(description).count("max_steps", 1)
            if steps > MOST_STEPS:  # each site makes room for the steps of the one with the most
                raise ArgumentError(
                    f"max_steps is {steps:,} local steps in a round, expected at most "
                    f"{MOST_STEPS:,}. Set for example --cohort.max_steps=100 at the syncer and at "
                    "each site."
                )
        return {}

    def agree(
        self, descriptions: Sequence[Mapping[str, Any]]
    ) -> Generator[Question, Any, Mapping[str, Any]]:
        """Agree on the number of local steps that the clients' schedule has."""
        yield from ()
        if self.cohort.max_steps is not None:
            return {}
        return {"max_steps": max(CheckedHeader(x).count("max_steps", 1) for x in descriptions)}

    def with_inputs(self, inputs: Mapping[str, Any]) -> Self:
        """Return the experiment with the number of local steps that the sites share."""
        other = self._sharing_documents(dataclasses.replace(self))
        other.__dict__["_agreed_steps"] = inputs.get("max_steps")
        return other

    def _site_algorithm(self, trainable: Trainable) -> FederatedAlgorithm:
        steps = self.cohort.max_steps or self.__dict__["_agreed_steps"]
        return self._make_algorithm(trainable, steps)

    def coordinate(self, num_clients: int) -> CoordinatorRun:
        """Make the coordinator's run for a number of clients. It reads no documents."""
        fitting = self.sized(num_clients)
        trainable = fitting.trainable(MeshConfig(clients=1).make())
        return CoordinatorRun(
            fitting._site_algorithm(trainable),
            trainable.init,
            fitting.cohort.size,
            sample_present(ClientSampler(num_clients, fitting.cohort.size, self.cohort.seed)),
            initial=trainable.initial,
            frozen=None if trainable.frozen is None else trainable.frozen.shapes,
            batches=fitting._batch_shapes(),
        )

    def _batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows, one_client = pack_clients(
            [{"text": "a"}],
            seq_len=self.data.seq_len,
            client_field=None,
            tokenizer=self.read_tokenizer(),
        )
        return batch_shapes(self._make_rounds(rows, one_client, ClientSampler(1, 1)))

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run. Metrics weigh the tokens of its held-out documents."""
        fitting = self.sized(clients.total)
        trainable = fitting.trainable(MeshConfig(clients=1).make())
        (rows, own), heldout = fitting._site_rows, fitting._site_heldout
        sampler = ChosenClients(clients.total, fitting.cohort.size, self.cohort.seed)
        rounds = fitting._make_rounds(
            rows, SitePopulation(own, clients.first, clients.total), sampler
        )

        @functools.cache
        def evaluation() -> Callable[[Params], dict[str, float]]:
            assert heldout is not None
            return fitting._make_evaluation(trainable, heldout)

        return SiteRun(
            fitting._site_algorithm(trainable),
            trainable.init,
            fitting.cohort.size,
            drawer(rounds, rounds, sampler),
            None if heldout is None else lambda params: evaluation()(params),
            0 if heldout is None else int(heldout.main.num_targets.sum()),
            [str(client) for client in range(clients.number)],  # which keep no states
            frozen=trainable.frozen,
        )

    def build(self) -> Run:
        """Read the text, and make the population, cohorts, model, algorithm and mesh."""
        if not self.__dict__.get("_at_site"):
            population = self._pack(self.read_training(), self.read_tokenizer())
            return self._build(*population, self.read_heldout(self.read_tokenizer()))
        rows, clients = self._site_rows
        return self.sized(len(clients))._build(rows, clients, self._site_heldout)

    def read_inputs(self, folder: Path) -> None:
        """Find out whether the folder is a site's, whose clients may be fewer than a round's."""
        self.__dict__["_at_site"] = (folder / SITE_FILE).is_file()

    def _build(self, rows: Arrays, population: Partition, heldout: HeldoutSets | None) -> Run:
        cohort = self.cohort
        mesh = self.make_mesh()
        num_devices = mesh.shape.get("clients", 1)
        trainable = self.trainable(mesh)
        sampler = ClientSampler(len(population), cohort.size, cohort.seed)
        rounds = self._make_rounds(rows, population, sampler, num_devices)
        over_clients = NamedSharding(
            mesh, PartitionSpec("clients" if "clients" in mesh.axis_names else None)
        )

        # Made at the first evaluation: `fedpax plan` compiles for devices that cannot hold data.
        @functools.cache
        def evaluate_heldout() -> Callable[[Params], dict[str, float]]:
            if heldout is None:
                raise ArgumentError(
                    f"data.dataset={self.data.dataset} has no held-out documents, expected some. "
                    "Set --data.heldout_fraction=0.1, or write {split} in the path."
                )
            return self._make_evaluation(trainable, heldout, num_devices, over_clients)

        @functools.cache
        def evaluate_clients() -> EvaluateClients:
            return trainable.evaluate(
                lambda loss_fn: self._evaluate_by_client(loss_fn, self.read_tokenizer()),
                without_token_count(transformer_loss(self.model, load_balance_weight=0.0)),
            )

        return Run(
            algorithm=self._make_algorithm(trainable, rounds.max_steps),
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
        heldout = data.load(data.dataset, data.heldout_split)
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
