"""FedAvg on users' files: what tables and images share, from the parts to the metrics by client."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.algorithm import LossFn, Params
from fedpax.checks import NonNegative
from fedpax.clients.cohort import Cohort
from fedpax.console import count_of
from fedpax.data import ClientSampler, Partition
from fedpax.data.open_client_files import OpenFiles, PreparedFiles
from fedpax.data.rounds.labeled_examples import Preprocess, read_batches
from fedpax.data.tables import Label
from fedpax.deploy.batch_training import NEW, HeldoutClients
from fedpax.errors import ArgumentError
from fedpax.experiments.client_experiment import ClientExperiment
from fedpax.experiments.parts.client_evaluation import (
    LABEL_MEANS,
    EvaluateClients,
    finish_regression,
    heldout_of_files,
    measure_clients,
    with_label_means,
)
from fedpax.experiments.parts.file_experiments import (
    INPUTS,
    OwnExamples,
    means_over_parts,
    note_training,
    read_saved_inputs,
    with_clusters,
    with_own_models,
    write_saved_inputs,
)
from fedpax.models.losses import ModelLoss, classification_loss, l2_regularized, squared_error_loss
from fedpax.models.nnx_functional import FunctionalModel
from fedpax.parallel.mesh_sizes import ShardedSize
from fedpax.settings.client_methods import fine_tuned_models
from fedpax.settings.table_data import FilesConfig
from fedpax.sites.site_experiment import ClientRange, SiteRun
from fedpax.training.client_metrics import ClientMetrics, ExampleOwners
from fedpax.training.evaluation import Batch, map_examples
from fedpax.training.experiment import Run
from fedpax.user_paths import expand_home


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvgFiles(ClientExperiment):
    """A model of the examples in users' files, trained on clients of different sizes.

    If there are fewer clients than `cohort.size`, a round has all of them.

    Attributes:
        data: the files.
        l2_factor: factor of the squared weights in the training loss. Default 0: none.
        field: the field of a batch that the model takes.
    """

    data: FilesConfig
    l2_factor: NonNegative = 0.0
    field: ClassVar[str]
    takes_clusters = True
    pad_to = "round"  # clients of users' files differ by any factor
    own_fields = (
        *ClientExperiment.own_fields,
        "data.client",
        "data.decimal_point",
        "data.delimiter",
        "data.heldout_clients",
        "data.heldout_fraction",
        "data.heldout_split",
        "data.missing_label",
        "data.optional_columns",
        "data.partition",
        "data.types",
    )

    @property
    def saved_inputs(self) -> Mapping[str, Any] | None:
        """The columns and classes with which the run began; None in a new run."""
        saved: Mapping[str, Any] | None = self.__dict__.get("_saved_inputs")
        return saved

    def read_inputs(self, folder: Path) -> None:
        """Read `table.json`: a model keeps its columns and classes on other files."""
        if (path := folder / INPUTS).is_file():
            self.__dict__["_saved_inputs"] = read_saved_inputs(path, self.data)
        self.__dict__["_of_site"] = self._is_site

    def write_inputs(self, folder: Path) -> None:
        """Write `table.json`, which `Label` and `TableFeatures` read: the label and columns."""
        write_saved_inputs(folder / INPUTS, self.saved_inputs or self.inputs)

    @property
    @abc.abstractmethod
    def inputs(self) -> Mapping[str, Any]:
        """The columns and classes, as `file_experiments.saved_content` has them."""

    @property
    def label(self) -> Label:
        """The label, which a coordinator without data knows from its sites."""
        saved = self.saved_inputs
        return self.prepared.label if saved is None else Label.from_json(saved["label"])

    @property
    def _is_site(self) -> bool:
        """Whether the files belong to one site of several, which may have one file."""
        return bool(self.__dict__.get("_at_site") or (self.saved_inputs or {}).get("sites"))

    @functools.cached_property
    def opened(self) -> OpenFiles:
        """The files, read when they are first needed."""
        from fedpax.user_files.finding import find_files

        if not self._is_site and self.saved_inputs is None:
            return self.data.open()
        # One file is a client, named as one of several is.
        if len(self.data.files) == 1 and (folder := expand_home(self.data.files[0])).is_dir():
            return self.data.open(folder.name)
        split = "train" if self.data.has_split else None
        files = find_files(self.data.files, split)
        return self.data.open(files[0].name if files else None)

    @property
    @abc.abstractmethod
    def prepared(self) -> PreparedFiles:
        """The files as arrays."""

    @functools.cached_property
    def training_parts(self) -> dict[str, NDArray[np.int64]]:
        """The training examples of each client."""
        parts = self.opened.parts(self.opened.training)
        if not parts:
            raise ArgumentError(
                f"data.heldout_fraction={self.data.heldout_fraction:g} leaves none of the "
                f"{count_of(len(self.opened.owners), 'example')} to train on, expected some, "
                "also in an evaluation. Set a smaller --data.heldout_fraction, or name more files."
            )
        return parts

    def sized(self, num_clients: int) -> Self:
        """Return the experiment with at most as many clients in a round as there are."""
        if num_clients >= self.cohort.size:
            return self
        return self._sharing_files(super().sized(num_clients))

    def _sharing_files(self, other: Self, *more: str) -> Self:
        """Give another experiment on the same files what this one has read."""
        names = ("opened", "training_parts", "images", "_saved_inputs", *more)
        other.__dict__.update({n: self.__dict__[n] for n in names if n in self.__dict__})
        return other

    # ---- rounds over sites with their own data (`fedpax.sites.site_experiment`)

    def describe_site(self) -> dict[str, Any]:
        """Return the number of the site's clients, and what it tells of its columns."""
        self.__dict__["_at_site"] = True
        return {"clients": len(self.training_parts), **self.describe_inputs()}

    @abc.abstractmethod
    def describe_inputs(self) -> dict[str, Any]:
        """Return what a site tells of its columns."""

    def with_inputs(self, inputs: Mapping[str, Any]) -> Self:
        """Return the experiment with the columns and classes that the sites share."""
        other = self._sharing_files(dataclasses.replace(self), "_at_site", "_offered")
        other.__dict__["_saved_inputs"] = inputs
        return other

    def at_site(self, clients: ClientRange) -> SiteRun:
        """Make a site's run, which can evaluate a model of each client's own."""
        run = super().at_site(clients)
        notes = (*self.agreed, *self.prepared.cautions)
        run = run._replace(notes=notes, label_means=LABEL_MEANS)
        run = with_clusters(run, self.method, self.own_model_means)
        if not self.opened.heldout.any():
            return run
        evaluate = functools.cache(lambda: self.own_model_means(fine_tune=True))
        of_new = int(self.opened.is_new[self.opened.owners].sum())
        return run._replace(
            heldout_parts={NEW: of_new},
            evaluate_personal=lambda state: evaluate()(state),
        )

    def name_clients(self, population: Partition) -> Sequence[str]:
        """Return the names of the training clients."""
        return list(self.training_parts)

    def count_heldout(self) -> int:
        """Return the number of held-out examples; with clusters, of training clients."""
        if self.method.has_shared_model:
            return int(self._chosen_heldout.sum())
        return sum(map(len, self._own_heldout))

    @property
    def _own_heldout(self) -> list[NDArray[np.int64]]:
        """The held-out examples of each training client."""
        heldout, none = self.opened.parts(self.opened.heldout), np.zeros(0, np.int64)
        return [heldout.get(name, none) for name in self.training_parts]

    def sharded_sizes(self) -> list[ShardedSize]:
        """Return the size that the axis of clients divides."""
        if self._is_site:
            return super().sharded_sizes()
        size = min(self.cohort.size, len(self.training_parts))
        return [ShardedSize("cohort.size", size, ("clients",))]

    def read_population(self) -> tuple[Partition, NDArray[np.integer] | None]:
        """Return the indices of each client's examples, and the class of each example."""
        labels = self.prepared.labels
        is_class = self.prepared.label.task == "classification"
        return list(self.training_parts.values()), labels if is_class else None

    def read_clients(self) -> tuple[Any, Partition]:
        """Return all examples, and the indices of each client's training examples."""
        return self.prepared.examples, list(self.training_parts.values())

    def make_preprocess(self) -> Preprocess:
        """Make the function from the fields of examples to a batch's; by default, equal."""
        return dict

    def open_heldout(self, preprocess: Preprocess) -> Callable[[], Sequence[Batch]]:
        """Return the function that makes the batches of the held-out examples."""
        del preprocess
        return lambda: self._batches(self._chosen_heldout)

    @property
    def _chosen_heldout(self) -> NDArray[np.bool_]:
        """Which examples are held out; without any, the examples of the held-out clients."""
        table = self.opened
        return table.heldout if table.heldout.any() else table.is_new[table.owners]

    def _batches(self, chosen: NDArray[np.bool_]) -> Sequence[Batch]:
        return read_batches(self._read, np.flatnonzero(chosen), self.heldout_batch_size)

    def _read(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return self.make_preprocess()(self.prepared.read(rows))

    def make_loss(self, model: FunctionalModel) -> LossFn:
        """Make the cross-entropy or the squared error, regularized if `l2_factor` is set."""
        loss_fn = self._plain_loss(model)
        return l2_regularized(loss_fn, self.l2_factor) if self.l2_factor else loss_fn

    def _plain_loss(self, model: FunctionalModel) -> ModelLoss:
        if self.label.task == "regression":
            return squared_error_loss(model.apply, field=self.field)
        return classification_loss(model.apply, field=self.field)

    def make_evaluation(
        self, evaluate: Callable[..., Callable[[Params], dict[str, float]]], model: FunctionalModel
    ) -> Callable[[Params], dict[str, float]]:
        """Evaluate on the held-out examples, and on held-out clients."""
        table, loss_fn = self.opened, self._plain_loss(model)
        of_new = table.is_new[table.owners]
        parts = {"": table.heldout, NEW: of_new} if table.heldout.any() else {"": of_new}
        is_class = self.label.task == "classification"
        evaluations = {
            prefix: evaluate(loss_fn, batches=self._batches(chosen))
            for prefix, chosen in parts.items()
            if chosen.any()
        }
        if not is_class:
            labels = self.prepared.labels
            evaluations = {p: with_label_means(f, labels[parts[p]]) for p, f in evaluations.items()}

        def evaluate_parts(params: Params) -> dict[str, float]:
            return {
                f"{prefix}{name}": value
                for prefix, evaluate_part in evaluations.items()
                for name, value in evaluate_part(params).items()
            }

        return evaluate_parts

    def finish_metrics(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Make `rmse` and `r2` of a number to predict from means over examples."""
        label = self.label
        return means if label.task == "classification" else finish_regression(label.scale, means)

    def make_client_evaluation(self, model: FunctionalModel) -> EvaluateClients:
        """Make the evaluation by client; clients without training examples are marked "(new)"."""
        opened, field = self.opened, self.field
        chosen = np.flatnonzero(opened.heldout | opened.is_new[opened.owners])
        clients = ExampleOwners(self._client_names, opened.owners[chosen])
        examples = self._read(chosen)
        outputs = map_examples(
            lambda params, batch: model.apply(params, batch[field])[0], {field: examples[field]}
        )
        label = self.prepared.label
        return lambda params: measure_clients(label, outputs(params), examples["label"], clients)

    def open_heldout_clients(self) -> HeldoutClients:
        """Open the held-out examples of each client that has any."""
        return self._heldout()

    def open_heldout_participants(self) -> HeldoutClients:
        """Open the held-out examples of each training client, for nodes that have them."""
        return self._heldout(list(self.training_parts))

    def _heldout(self, participants: Sequence[str] | None = None) -> HeldoutClients:
        return heldout_of_files(
            self.opened,
            self._client_names,
            self.prepared,
            self._plain_loss(self.make_model()),
            batch_size=self.heldout_batch_size,
            preprocess=self.make_preprocess(),
            participants=participants,
        )

    @property
    def _client_names(self) -> list[str]:
        opened = self.opened
        pairs = zip(opened.names, opened.is_new | opened.is_other, strict=True)
        return [f"{name} (new)" if is_new else name for name, is_new in pairs]

    def build(self) -> Run:
        """Read the files, and make the run; a method's own models are evaluated by client."""
        fitting = self if self._is_site else self.sized(len(self.training_parts))
        if fitting is not self:
            run = fitting.build()
            # Made once: on the mesh of the run, means would differ in their last digit.
            fitting._sharing_files(self, "prepared")
            size = self.cohort.note_all_clients(fitting.cohort.size)
            return run._replace(notes=(*run.notes, size))
        prepared, run = self.prepared, super().build()
        told = note_training(self.cohort, self.method, self.aggregator, prepared, self.opened)
        notes = (*self.opened.notes, *prepared.notes, *prepared.cautions, *told, *run.notes)
        run = run._replace(notes=notes, cautions=prepared.cautions)
        if not self.method.has_own_models:
            return run
        return with_own_models(run, self.method, self.own_model_means, self.own_metrics_by_client)

    @functools.cached_property
    def _own_examples(self) -> OwnExamples:
        """Held-out examples of all training clients, and a round if it makes the models."""
        with_batches = self.method.example().kept_models is None
        examples, population = self.read_clients()
        sampler = ClientSampler(len(population), 1, self.cohort.seed)
        rounds = self.cohort.rounds(examples, population, sampler, self.make_preprocess())
        multiple = self.make_mesh().shape.get("clients", 1)
        model = jax.eval_shape(self.make_model().init, jax.random.key(0))
        return OwnExamples(
            rounds, self._own_heldout, self._read, model, multiple, with_batches=with_batches
        )

    def own_model_means(self, *, fine_tune: bool = False) -> Callable[[Any], dict[str, float]]:
        """Make the evaluation of the clients' own models, or fine-tuned ones: `state -> means`."""
        model = self.make_model()
        train_loss, loss_fn = self.make_loss(model), self._plain_loss(model)

        def models_of(state: Any, cohort: Cohort) -> Params:
            rate = self.client_learning_rate
            if fine_tune and not self.method.has_own_models:
                return fine_tuned_models(train_loss, rate, state, cohort)
            return self.method.personal_models(train_loss, rate, state, cohort)

        return means_over_parts(models_of, loss_fn, self._own_examples)

    def own_metrics_by_client(self) -> Callable[[Any], ClientMetrics]:
        """Make the evaluation of the clients' own models: `state -> metrics of each client`."""
        model = self.make_model()
        train_loss, names = self.make_loss(model), self._client_names
        places = {name: place for place, name in enumerate(self.opened.names)}
        of_training = np.array([places[name] for name in self.training_parts])

        @jax.jit
        def outputs(state: Any, cohort: Any, inputs: Any) -> jax.Array:
            rate = self.client_learning_rate
            models = self.method.personal_models(train_loss, rate, state, cohort)
            return jax.vmap(model.apply)(models, inputs)

        def evaluate(state: Any) -> ClientMetrics:
            predictions, labels, owners = [], [], []
            for cohort, own in self._own_examples:
                client, example = np.nonzero(own["mask"])
                output = np.asarray(outputs(state, cohort, own[self.field]))
                predictions.append(output[client, example])
                labels.append(np.asarray(own["label"])[client, example])
                owners.append(of_training[np.asarray(cohort.client_ids)[client]])
            clients = ExampleOwners(names, np.concatenate(owners))
            together = np.concatenate(predictions), np.concatenate(labels)
            return measure_clients(self.prepared.label, *together, clients)

        return evaluate
