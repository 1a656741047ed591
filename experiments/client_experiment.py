"""Methods for clients on cohorts of a population whose clients differ in data and in size."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.sharding import NamedSharding

from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.checks import Count, Positive
from fedpax.clients.cohort import CohortStream
from fedpax.data import ClientSampler, CohortRounds, Partition, Source, load
from fedpax.data.rounds.cohort_stream import PadTo
from fedpax.data.rounds.labeled_examples import Arrays, Preprocess
from fedpax.deploy.batch_training import HeldoutClients
from fedpax.errors import ArgumentError
from fedpax.experiments.parts.client_evaluation import EvaluateClients, client_name, fingerprint_of
from fedpax.experiments.parts.over_sites import (
    ChosenClients,
    OverSites,
    SitePopulation,
    batch_shapes,
    drawer,
    fine_tuner,
    sample_present,
)
from fedpax.experiments.parts.private_runs import (
    check_noise_is_kept,
    check_private,
    configured_accountant,
    describe_privacy,
    make_aggregator,
)
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.parallel.axes import shardings
from fedpax.parallel.mesh import MeshConfig
from fedpax.settings.client_aggregators import AggregatorConfig, aggregator
from fedpax.settings.client_methods import ClientTraining, MethodConfig, method
from fedpax.settings.cohort_settings import (
    CohortConfig,
    OnClientsMesh,
    PopulationConfig,
    ServerConfig,
    over_clients,
    with_cohort,
)
from fedpax.sites.site_experiment import SITE_FILE, ClientRange, CoordinatorRun, SiteRun
from fedpax.sources.source import Examples
from fedpax.training.evaluation import Batch, batch_weight, evaluator
from fedpax.training.experiment import Experiment, Run, Shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientExperiment(OnClientsMesh, OverSites, Experiment):
    """A model trained by a method for clients, on clients of different sizes.

    With `mesh.clients=-1`, a round uses the largest number of devices that divides the cohort.

    Attributes:
        heldout_batch_size: examples in a batch of the evaluation.
        cohort: the clients of a round and their local training.
        client_learning_rate: learning rate of the clients' SGD.
        server: the server optimizer.
        method: the method. Default: FedAvg. With the server optimizer "adagrad", "adam" or "yogi",
            it is FedAdagrad, FedAdam or FedYogi.
        aggregator: how the clients' updates are combined. Default: the weighted mean.
        own_fields: paths of the fields that may differ between sites.
    """

    heldout_batch_size: Count = 256
    cohort: CohortConfig
    client_learning_rate: Positive
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    method: MethodConfig = method("fedavg")
    aggregator: AggregatorConfig = aggregator("mean")
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(clients=-1))
    own_fields: ClassVar[tuple[str, ...]] = ("heldout_batch_size", "data.files")
    pad_to: ClassVar[PadTo] = "population"
    takes_clusters: ClassVar[bool] = False  # methods with several models, such as hypcluster

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.method.has_server_optimizer and self.server != ServerConfig():
            raise ArgumentError(
                f"server={self.server} has no effect: {type(self.method).__name__} takes no server "
                "optimizer. Leave the fields of --server at their defaults."
            )
        if not (self.method.has_shared_model or self.takes_clusters):
            raise ArgumentError(
                f"method={self.method.function.__name__} has a model for each cluster, and this "
                "experiment evaluates one model. Train fedavg_table, fedavg_images or an "
                "experiment of the group personal_digits, or choose another --method."
            )
        if not self.method.has_aggregator and self.aggregator != aggregator("mean"):
            name = self.method.function.__name__
            raise ArgumentError(
                f"aggregator={self.aggregator} has no effect: {name}() has no argument aggregator, "
                "and combines the updates of clients itself. Add the argument to the function, or "
                "leave --aggregator at its default."
            )
        self.aggregator.check_cohort(self.cohort.size)
        check_private(self)

    @abc.abstractmethod
    def make_model(self) -> FunctionalModel:
        """Make the model; `fedpax.models.to_functional` takes a module of flax.nnx."""

    @abc.abstractmethod
    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the loss, `(params, batch) -> (mean, metrics)`; `batch["mask"]` is 0 for padding."""

    @abc.abstractmethod
    def make_preprocess(self) -> Preprocess:
        """Make the function from fields of examples `[examples, ...]` to a batch's numbers."""

    @abc.abstractmethod
    def read_clients(self) -> tuple[Examples | Arrays, Partition]:
        """Return the training examples, and the indices of each client's examples.

        At a site, of its own clients.
        """

    @abc.abstractmethod
    def open_heldout(self, preprocess: Preprocess) -> Callable[[], Sequence[Batch]]:
        """Open the held-out data, and return the function that reads the evaluation's batches.

        Batches have equal shapes `[batch, ...]`: `fedpax.data.example_batches` adds a mask.
        """

    def make_evaluation(
        self, evaluate: Callable[..., Callable[[Params], dict[str, float]]], model: FunctionalModel
    ) -> Callable[[Params], dict[str, float]]:
        """Make the evaluation of a model: means over examples, by default of the training loss."""
        return evaluate(self.make_loss(model))

    def _evaluate_on(
        self,
        batches: Sequence[Batch],
        model: FunctionalModel,
        num_devices: int = 1,
        sharding: NamedSharding | None = None,
    ) -> Callable[[Params], dict[str, float]]:
        evaluate = functools.partial(
            evaluator,
            batches=batches,
            placement="clients",
            num_participants=num_devices,
            sharding=sharding,
        )
        return self.make_evaluation(evaluate, model)

    def make_client_evaluation(self, model: FunctionalModel) -> EvaluateClients:
        """Read the held-out examples of each client, and make the evaluation by client."""
        del model
        raise ArgumentError(
            f"{type(self).__name__} defines no evaluation by client, expected a method "
            "make_client_evaluation. Define it, or evaluate without --by_client."
        )

    def open_heldout_clients(self) -> HeldoutClients:
        """Open the held-out examples by client, for an evaluation in batch jobs."""
        raise ArgumentError(
            f"{type(self).__name__} defines no held-out data by client for batch jobs, expected a "
            "method open_heldout_clients, as fedavg_table has. Evaluate without --engine."
        )

    def make_sampler(self, population: Partition) -> ClientSampler:
        """Make the sampler of the clients of each round."""
        return ClientSampler(
            len(population),
            self.cohort.size,
            self.cohort.seed,
            sampling_probability=self.cohort.sampling_probability,
        )

    @property
    def releases_before(self) -> int:
        """The number of private releases before the first round, which epsilon counts."""
        return 0

    @property
    def disclosures(self) -> Sequence[str]:
        """Lines on facts that clients of a private run tell before the first round."""
        return ()

    def make_algorithm(self, loss_fn: LossFn, sampler: ClientSampler) -> FederatedAlgorithm:
        """Make the federated algorithm for the clients of a sampler."""
        settings = ClientTraining(
            cohort_size=self.cohort.size,
            num_clients=sampler.num_clients,
            learning_rate=self.client_learning_rate,
            server_optimizer=self.server.make(),
            chunk_size=self.cohort.at_once,
            aggregator=make_aggregator(self, sampler),
        )
        return self.method.make(loss_fn, settings)

    def check_resumable(self, former: Self) -> None:
        """Check that epsilon of the run's rounds stays true."""
        check_noise_is_kept(former.aggregator, self.aggregator)

    def make_rounds_of_all(
        self, examples: Examples | Arrays, population: Partition
    ) -> tuple[CohortRounds, ClientSampler]:
        """Make rounds of all clients, and their sampler."""
        sampler = ClientSampler(len(population), len(population), self.cohort.seed)
        return self.cohort.rounds(examples, population, sampler, self.make_preprocess()), sampler

    def make_stream(self, rounds: CohortRounds, sampler: ClientSampler) -> CohortStream:
        """Make the stream of cohorts from the rounds of the sampled clients."""
        del sampler
        return rounds

    def describe_site(self) -> dict[str, Any]:
        """Return what a site tells the coordinator of its data: its number of clients."""
        return {"clients": len(self.read_clients()[1])}

    def coordinate(self, num_clients: int) -> CoordinatorRun:
        """Make the coordinator's run for a number of clients. It reads no data."""
        fitting = self.sized(num_clients)
        every_client = SitePopulation((), 0, num_clients)
        sampler, model = fitting.make_sampler(every_client), fitting.make_model()
        return CoordinatorRun(
            fitting.make_algorithm(fitting.make_loss(model), sampler),
            self.method.make_init(model.init),
            fitting.cohort.size,
            sample_present(sampler),
            accountant=configured_accountant(self.aggregator),
            batches=fitting._batch_shapes(),
            notes=(*self.agreed, *describe_privacy(self, in_stages=True)),
            finish=self.finish_metrics,
        )

    def blank_example(self) -> Arrays | None:
        """Return the fields of one example, `[1, ...]`, which a coordinator states without data."""
        return None

    def _batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct] | None:
        if (example := self.blank_example()) is None:
            return None
        sampler, population = ClientSampler(1, 1), [np.zeros(1, np.int64)]
        rounds = self.cohort.rounds(example, population, sampler, self.make_preprocess())
        return batch_shapes(rounds)

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run."""
        fitting = self.sized(clients.total)
        size, preprocess = fitting.cohort.size, fitting.make_preprocess()
        examples, own = fitting.read_clients()
        population = SitePopulation(own, clients.first, clients.total)
        sampler = ChosenClients(clients.total, size, fitting.cohort.seed)
        rounds = fitting.cohort.rounds(examples, population, sampler, preprocess)
        model = fitting.make_model()
        loss_fn = fitting.make_loss(model)
        algorithm = fitting.make_algorithm(loss_fn, fitting.make_sampler(population))
        heldout = fitting.open_heldout(preprocess)()
        evaluate = fitting._evaluate_on(heldout, model) if heldout else None
        draw = drawer(rounds, fitting.make_stream(rounds, sampler), sampler)
        return SiteRun(
            algorithm,
            self.method.make_init(model.init),
            size,
            draw,
            evaluate,
            fitting.count_heldout(),
            fitting.name_clients(own),
            fine_tune=fine_tuner(draw, clients, size, loss_fn, self.client_learning_rate),
            finish=self.finish_metrics,
            is_private=configured_accountant(self.aggregator) is not None,
        )

    def name_clients(self, population: Partition) -> Sequence[str]:
        """Return the names of clients: a site keeps a client's state under its name."""
        names = getattr(population, "names", range(len(population)))
        return [client_name(name) for name in names]

    def count_heldout(self) -> int:
        """Return the number of held-out examples, which weighs a site's metrics."""
        return int(sum(map(batch_weight, self.open_heldout(self.make_preprocess())())))

    def read_inputs(self, folder: Path) -> None:
        """Find out whether the folder is a site's, which can have fewer clients than a round."""
        self.__dict__["_of_site"] = (folder / SITE_FILE).is_file()

    def build(self) -> Run:
        """Open the data, and make the population, cohorts, model, algorithm and mesh."""
        mesh = self.make_mesh()
        num_devices = mesh.shape.get("clients", 1)
        preprocess = self.make_preprocess()
        training, population = self.read_clients()
        if self.__dict__.get("_of_site"):
            total = max(len(population), self.cohort.size)
            population = SitePopulation(population, 0, total)
        sampler = self.make_sampler(population)
        model = self.make_model()
        loss_fn = self.make_loss(model)
        params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
        layout: Any = {"num_devices": num_devices, "pad_to": self.pad_to}
        rounds = self.cohort.rounds(training, population, sampler, preprocess, **layout)
        fitted = self.cohort.fit(mesh, loss_fn, params, rounds.shapes.batches)
        rounds.chunk_size = fitted.at_once
        read_heldout = self.open_heldout(preprocess)

        # Lazy: `fedpax plan` compiles for devices that cannot hold data.
        @functools.cache
        def evaluate_heldout() -> Callable[[Params], dict[str, float]]:
            return self._evaluate_on(read_heldout(), model, num_devices, over_clients(mesh))

        @functools.cache
        def evaluate_clients() -> EvaluateClients:
            if not self.method.has_shared_model:
                raise ArgumentError(
                    f"{type(self.method).__name__} has no single shared model, expected a method "
                    "that has one. Evaluate without --by_client."
                )
            return self.make_client_evaluation(model)

        return Run(
            algorithm=with_cohort(self, fitted).make_algorithm(loss_fn, sampler),
            init=model.init,
            cohorts=self.make_stream(rounds, sampler),
            evaluate=lambda params: dict(self.finish_metrics(evaluate_heldout()(params))),
            mesh=mesh,
            shardings=Shardings(
                params=shardings(model.logical_axes, params, mesh), cohort=over_clients(mesh)
            ),
            items_per_round=rounds.items_per_round,
            item_unit="examples",
            placement="clients",
            cohort_shapes=rounds.shapes,
            evaluate_clients=lambda params: evaluate_clients()(params),
            heldout_fingerprint=lambda: fingerprint_of(read_heldout()),
            notes=describe_privacy(self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgExperiment(ClientExperiment):
    """A model trained by a method for clients, on the examples of a data set.

    Attributes:
        dataset: a name for `fedpax.data.load`.
        heldout_split: the split to evaluate on.
        data_dir: the folder of prepared data sets. Default None: the folder of TensorFlow Datasets.
        population: the clients that exist.
    """

    dataset: str
    heldout_split: str = "test"
    data_dir: str | None = None
    population: PopulationConfig
    own_fields = (
        *ClientExperiment.own_fields,
        "data_dir",
        "dataset",
        "heldout_split",
        "population",
    )

    @abc.abstractmethod
    def read_heldout(self, heldout: Source, preprocess: Preprocess) -> Sequence[Batch]:
        """Read the batches of the evaluation."""

    def open_heldout(self, preprocess: Preprocess) -> Callable[[], Sequence[Batch]]:
        """Open the held-out split, and return the function that reads its batches."""
        heldout = self.read_heldout_source()
        return lambda: self.read_heldout(heldout, preprocess)

    def read_heldout_source(self) -> Source:
        """Open the held-out split."""
        return load(self.dataset, self.heldout_split, data_dir=self.data_dir)

    def read_training(self, source: Source) -> Examples | Arrays:
        """Return the training examples; by default each round reads its cohort."""
        return source

    def read_source(self) -> Source:
        """Open the training split."""
        return load(self.dataset, "train", data_dir=self.data_dir)

    def read_clients(self) -> tuple[Examples | Arrays, Partition]:
        """Return the training examples, and the indices of each client's examples."""
        source = self.read_source()
        return self.read_training(source), self.population.make(source, self.cohort.seed)
