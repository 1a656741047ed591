"""FedAvg on text: each client has its own documents, such as the files of one module."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from fedpax.algorithm import FederatedAlgorithm, Params
from fedpax.data import (
    ClientSampler,
    Partition,
)
from fedpax.data.rounds.client_token_rows import pack_clients
from fedpax.data.rounds.labeled_examples import Arrays
from fedpax.errors import ArgumentError
from fedpax.experiments.parts.client_evaluation import HeldoutSets, finish_perplexity
from fedpax.experiments.parts.client_text import ClientText, ClientTextConfig
from fedpax.experiments.parts.over_sites import (
    ChosenClients,
    OverSites,
    SitePopulation,
    batch_shapes,
    drawer,
    sample_present,
)
from fedpax.experiments.parts.weights import Trainable, hash_weights
from fedpax.models import presets
from fedpax.models.lora import LoRAConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.settings.cohort_settings import CohortConfig, ServerConfig
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.sites.site_experiment import (
    SITE_FILE,
    ClientRange,
    CoordinatorRun,
    Question,
    SiteRun,
)
from fedpax.sites.site_files import FEDERATION
from fedpax.training.experiment import Run
from fedpax.training.training_config import TrainingConfig
from fedpax.transport.admission import CheckedHeader
from fedpax.user_files.folders import is_files

MOST_STEPS = 1 << 20
"""Local steps of a round that a site can ask of all sites."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgText(OverSites, ClientText):
    """A transformer trained by FedAvg on clients' documents, here or at sites.

    If there are fewer clients than `cohort.size`, a round has all clients.
    """

    own_fields = (
        *ClientText.own_fields,
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
        "data.types",
    )

    # ---- rounds over sites with their own documents (`fedpax.sites.site_experiment`)

    @property
    def site_items(self) -> tuple[str, int]:
        """The unit of items over sites, and their number in an example, which is a row."""
        return "tokens", self.data.seq_len

    def shared_content(self) -> dict[str, str]:
        """Return hashes of the tokenizer, and of the weights that every site adapts."""
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
            finish=finish_perplexity,
        )

    def _batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return batch_shapes(self._make_rounds(*self._blank_rows(), ClientSampler(1, 1)))

    def _blank_rows(self) -> tuple[Arrays, Partition]:
        tokenizer = self.read_tokenizer()
        seq_len = self.data.seq_len
        return pack_clients(
            [{"text": "a"}], seq_len=seq_len, client_field=None, tokenizer=tokenizer
        )

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run. Metrics weigh the tokens of its held-out documents."""
        fitting = self.sized(clients.total)
        trainable = fitting.trainable(MeshConfig(clients=1).make())
        (rows, population), heldout = fitting._site_rows, fitting._site_heldout
        sampler = ChosenClients(clients.total, fitting.cohort.size, self.cohort.seed)
        rounds = fitting._make_rounds(
            rows, SitePopulation(population, clients.first, clients.total), sampler
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
            fine_tune=functools.partial(self._fine_tune, rows, population),
            finish=finish_perplexity,
            heldout_parts={
                f"heldout/{name}/": int(rows.num_targets.sum())
                for name, rows in ({} if heldout is None else heldout.others).items()
            },
        )

    def _fine_tune(self, rows: Arrays, population: Partition, params: Params) -> Params:
        """Return the parameters after one more round of a site's clients alone."""
        alone = dataclasses.replace(self.sized(len(population)), server=ServerConfig())
        self._sharing_documents(alone)
        trainable = alone.trainable(MeshConfig(clients=1).make())
        algorithm = alone._site_algorithm(trainable)
        sampler = ClientSampler(len(population), alone.cohort.size, self.cohort.seed)
        frozen = () if trainable.frozen is None else (trainable.frozen.load(),)
        state: Any = jax.jit(algorithm.init)(params)
        step: Any = jax.jit(algorithm.round)
        state, _ = step(state, next(alone._make_rounds(rows, population, sampler)), *frozen)
        tuned: Params = state.params
        return tuned

    def build(self) -> Run:
        """Read the text, and make the population, cohorts, model, algorithm and mesh."""
        if self.__dict__.get("_coordinates"):  # it has a model, and no documents
            return self.sized(1)._build(*self._blank_rows(), None)
        if not self.__dict__.get("_at_site"):
            rows, clients = self._pack(self.read_training(), self.read_tokenizer())
            fitting = self.sized(len(clients))
            run = fitting._build(rows, clients, self.read_heldout(self.read_tokenizer()))
            if fitting.cohort.size == self.cohort.size:
                return run
            size = self.cohort.note_all_clients(len(clients))
            return run._replace(notes=(*run.notes, size))
        rows, clients = self._site_rows
        return self.sized(len(clients))._build(rows, clients, self._site_heldout)

    def read_inputs(self, folder: Path) -> None:
        """Find out whether the folder is a site's, or a coordinator's without documents."""
        self.__dict__["_at_site"] = (folder / SITE_FILE).is_file()
        no_documents = self.data.dataset == ClientTextConfig.dataset
        self.__dict__["_coordinates"] = no_documents and (folder / FEDERATION).is_file()


def fedavg_lora_text() -> FedAvgText:
    """FedAvg of adapters (LoRA) on Python's own sources, a module per client. Needs weights.

    `--model.weights` names a Hugging Face folder, such as `fedpax export` writes.
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
