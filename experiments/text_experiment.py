"""The base class of experiments on text: its configuration, and how it builds a run."""

import abc
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.algorithm import FederatedAlgorithm, LossFn, Params, WithGradientNorm
from fedpax.checks import CheckedConfig, Count, NonNegative
from fedpax.data import (
    LazyStream,
    Mixture,
    Tokenizer,
    TokenRounds,
    addressable_rows,
    token_round_shapes,
    token_rounds,
)
from fedpax.data.rounds.mixture import Weight, check_weights
from fedpax.errors import ArgumentError
from fedpax.experiments.language_model_experiment import (
    LanguageModelExperiment,
    TextDataConfig,
    without_token_count,
)
from fedpax.experiments.parts.client_evaluation import HeldoutSets, heldout_evaluator
from fedpax.experiments.parts.weights import Trainable
from fedpax.models.losses import accumulate_gradients, transformer_loss
from fedpax.parallel.axes import partition_spec
from fedpax.parallel.mesh_sizes import ShardedSize
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.training.experiment import Run, Shardings
from fedpax.user_files.formats import FILE_NAME

# Mixtures of data sets on the command line: one text for each data set.
_ITEM = re.compile(rf"(?P<name>[^#=]+|{FILE_NAME})(#(?P<field>[^#=/]+))?=(?P<weight>[^#=]+)")
_REMEDY = "Write NAME=WEIGHT, NAME#FIELD=WEIGHT or NAME=WEIGHT@ROUND,WEIGHT@ROUND,..."


class MixtureItem(NamedTuple):
    """One data set of a mixture."""

    name: str  # a name for `fedpax.data.load`
    weight: Weight
    field: str | None  # the field with its text. None: the configuration's.


def parse_mixture(items: Sequence[str]) -> list[MixtureItem]:
    """Parse the data sets of a mixture."""
    parsed: dict[str, MixtureItem] = {}
    for text in items:
        match = _ITEM.fullmatch(text.strip())
        if match is None or not match["name"].strip():
            raise ArgumentError(f"data.mixture has {text!r}, which names no data set. {_REMEDY}.")
        name = match["name"].strip()
        if name in parsed:
            raise ArgumentError(f"data.mixture names {name!r} twice: add its weights up.")
        parsed[name] = MixtureItem(name, _parse_weight(text, match["weight"]), match["field"])
    if parsed:
        try:
            check_weights({name: item.weight for name, item in parsed.items()})
        except ValueError as error:
            raise ArgumentError(f"data.mixture={tuple(items)}: {error}") from error
    return list(parsed.values())


def _parse_weight(item: str, text: str) -> Weight:
    points = [point.partition("@") for point in text.split(",")]
    try:
        if len(points) == 1 and not points[0][1]:
            return float(text)
        return tuple((int(round_number), float(weight)) for weight, _, round_number in points)
    except ValueError:
        raise ArgumentError(
            f"data.mixture has {item!r}, whose weight {text!r} is not a number. {_REMEDY}."
        ) from None


@dataclasses.dataclass(frozen=True)
class TextConfig(TextDataConfig):
    """The text, and the sizes of a round.

    Attributes:
        local_steps: optimizer steps of an island per round, H.
        batch_size: rows in a step of an island.
        seed: random seed of the order of documents and rows.
        mixture: the data sets to train on, as "NAME=WEIGHT", "NAME#FIELD=WEIGHT" or
            "NAME=WEIGHT@ROUND,WEIGHT@ROUND,..." with weights that are interpolated between rounds.
            Weights are shares of the tokens and need not sum to 1. Default (): `dataset` alone.
        shuffle_tokens: the window within which rows of a data set are shuffled, in tokens, over all
            processes.
        num_shards: parts of a data set that are read separately. Default None: the rows of a step.
    """

    local_steps: Count = 20
    batch_size: Count = 8
    seed: int = 0
    mixture: tuple[str, ...] = ()
    shuffle_tokens: Count = 2**22
    num_shards: Count | None = None

    @property
    def has_mask(self) -> bool:
        """Whether the loss of some data set is on answers alone."""
        items = parse_mixture(self.mixture)
        return super().has_mask and (not items or any(item.field is None for item in items))

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_mixture(self.mixture)


def short_rows(*, local_steps: int, batch_size: int, seq_len: int = 64) -> TextConfig:
    """Return the text of the small experiments."""
    return TextConfig(
        local_steps=local_steps,
        batch_size=batch_size,
        seq_len=seq_len,
        heldout_batch_size=32,
        heldout_tokens=32_768,
    )


@dataclasses.dataclass(frozen=True)
class LossConfig(CheckedConfig):
    """The training loss: regularizers beside the cross-entropy, and gradient accumulation.

    Attributes:
        z_loss_weight: weight of the squared logarithm of the softmax's normalizer (z-loss).
        load_balance_weight: weight of the load-balancing loss of a mixture of experts.
        grad_accum_steps: microbatches of a step; their gradients accumulate one after another.
        gradient_norm: add the norm of the gradient, and the fraction of steps where it is not
            finite, to the metrics (`fedpax.algorithm.WithGradientNorm`).
    """

    group = "loss"
    z_loss_weight: NonNegative = 0.0
    load_balance_weight: NonNegative = 0.01
    grad_accum_steps: Count = 1
    gradient_norm: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextExperiment(LanguageModelExperiment):
    """A transformer trained on text by one or several islands, or adapters of one.

    Attributes:
        islands: number of islands, a multiple of the mesh's `islands` axis. The mesh follows from
            it, from the model and from the devices, as far as `mesh` does not state it.
        data: the text, and the sizes of a round.
        loss: the training loss.
        optimizer: the optimizer of the local steps.
    """

    islands: Count = 1
    data: TextConfig = TextConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    @abc.abstractmethod
    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make the federated algorithm."""

    def build(self) -> Run:
        """Make the model, algorithm and mesh; the first round reads the text."""
        data, mesh = self.data, self.make_mesh()
        self._check_divisibility(mesh.shape)
        trainable = self.trainable(mesh)

        @functools.cache
        def read() -> tuple[TokenRounds, HeldoutSets]:
            tokenizer = self.read_tokenizer()
            return self._open_rounds(tokenizer, mesh), self.read_heldout(tokenizer)

        @functools.cache
        def evaluate_heldout() -> Callable[[Params], dict[str, float]]:
            return self._make_evaluation(trainable, read()[1], mesh)

        return Run(
            algorithm=self._make_trained_algorithm(trainable),
            init=trainable.init,
            cohorts=LazyStream(lambda: read()[0]),
            evaluate=lambda params: evaluate_heldout()(params),
            mesh=mesh,
            shardings=Shardings(
                params=trainable.shardings, cohort=self._batch_sharding(mesh, data.batch_size)
            ),
            items_per_round=math.prod(self._round_sizes.values()),
            item_unit="tokens",
            placement="islands",
            cohort_shapes=token_round_shapes(**self._round_sizes, with_mask=data.has_mask),
            flops_per_item=trainable.flops_per_token,
            flops_convention=trainable.flops_convention,
            initial=trainable.initial,
            frozen=trainable.frozen,
            whole_model=trainable.whole_model,
            compiler_options=self.compiler_options(mesh),
            heldout_fingerprint=lambda: read()[1].fingerprint(),
            notes=self.notes(self.optimizer, self._num_steps),
        )

    @property
    def _round_sizes(self) -> dict[str, Any]:
        """The sizes of a round, in the order of the axes of its tokens."""
        data = self.data
        return {
            "islands": self.islands,
            "local_steps": data.local_steps,
            "batch_size": data.batch_size,
            "seq_len": data.seq_len,
        }

    @property
    def _num_steps(self) -> int:
        return self.training.rounds * self.data.local_steps

    def _batch_sharding(self, mesh: Mesh, batch_size: int) -> NamedSharding:
        """Return the sharding of arrays [islands, steps, batch, sequence]."""
        island_axis = "islands" if "islands" in mesh.axis_names else None
        rows = partition_spec(("batch", "sequence"), mesh, shape=(batch_size, self.data.seq_len))
        return NamedSharding(mesh, PartitionSpec(island_axis, None, *rows))

    def _open_rounds(self, tokenizer: Tokenizer, mesh: Mesh) -> TokenRounds:
        data, sizes = self.data, self._round_sizes
        sharding = self._batch_sharding(mesh, data.batch_size)
        return token_rounds(
            self.read_mixture() if data.mixture else self.read_training(),
            seed=data.seed,
            field=data.read_field(),
            tokenizer=tokenizer,
            shuffle_tokens=data.shuffle_tokens,
            num_shards=data.num_shards,
            rows=addressable_rows(sharding, tuple(sizes.values())),
            **sizes,
        )

    def _make_evaluation(
        self, trainable: Trainable, heldout: HeldoutSets, mesh: Mesh
    ) -> Callable[[Params], dict[str, float]]:
        batch_size = self.data.heldout_batch_size
        return trainable.evaluate(
            lambda loss_fn: heldout_evaluator(
                loss_fn,
                heldout,
                batch_size=batch_size,
                placement="islands",
                num_participants=self.islands,
                sharding=self._batch_sharding(mesh, batch_size),
            ),
            without_token_count(transformer_loss(self.model, load_balance_weight=0.0)),
        )

    def _make_trained_algorithm(self, trainable: Trainable) -> FederatedAlgorithm:
        """Make the algorithm that trains the parameters, with the training loss."""
        loss = self.loss
        optimizer = self.optimizer.make(self._num_steps, trainable.logical_axes)
        training_loss = accumulate_gradients(
            transformer_loss(
                self.model,
                z_loss_weight=loss.z_loss_weight,
                load_balance_weight=loss.load_balance_weight,
            ),
            loss.grad_accum_steps,
        )
        return trainable.algorithm(
            lambda loss_fn: self.make_algorithm(
                WithGradientNorm(loss_fn) if loss.gradient_norm else loss_fn, optimizer
            ),
            without_token_count(training_loss),
        )

    def compiler_options(self, mesh: Mesh) -> dict[str, str]:
        """Return the compiler options for the round. The base class needs none."""
        return {}

    def read_mixture(self) -> Mixture:
        """Open the training splits of the data sets in `data.mixture`."""
        data, items = self.data, parse_mixture(self.data.mixture)
        return Mixture(
            {item.name: data.load(item.name, "train", item.field) for item in items},
            {item.name: item.weight for item in items},
            {item.name: item.field for item in items if item.field is not None},
        )

    def sharded_sizes(self) -> list[ShardedSize]:
        """Return the sizes that axes of the mesh divide."""
        model, data = self.model, self.data
        sharded = [
            ShardedSize("islands", self.islands, ("islands",)),
            ShardedSize("data.batch_size", data.batch_size, ("data", "fsdp", "expert")),
            ShardedSize("model.num_heads", model.num_heads, ("tensor",)),
            ShardedSize("model.mlp_dim", model.mlp_dim, ("tensor",)),
            ShardedSize("data.seq_len", data.seq_len, ("sequence",)),
        ]
        if model.num_experts:
            sharded.append(ShardedSize("model.num_experts", model.num_experts, ("expert",)))
        return sharded

    def _check_divisibility(self, mesh: Mapping[str, int]) -> None:
        """Check that mesh axes divide the sizes they shard."""
        microbatches, rows = self.loss.grad_accum_steps, self.data.batch_size
        if rows % microbatches:
            raise ArgumentError(
                f"--loss.grad_accum_steps={microbatches} does not divide --data.batch_size={rows}. "
                "Change one of the two numbers."
            )
        for name, size, axes in self.sharded_sizes():
            shards = math.prod(mesh.get(axis, 1) for axis in axes)
            if size % shards:
                larger = [axis for axis in axes if mesh.get(axis, 1) > 1]
                product = " x ".join(f"{axis}={mesh[axis]}" for axis in larger)
                raise ArgumentError(
                    f"The mesh's {product} does not divide --{name}={size}. Set --{name} to a "
                    f"multiple of {shards}, or reduce --mesh.{larger[0]}."
                )
        if mesh.get("clients", 1) > 1:
            raise ArgumentError(
                f"mesh.clients={mesh['clients']}, but an experiment on text has islands and no "
                "clients: these devices would repeat the work of others. Leave out --mesh.clients."
            )


def text_fields(experiment: TextExperiment) -> dict[str, Any]:
    """Return the fields that all experiments on text have."""
    return {
        field.name: getattr(experiment, field.name) for field in dataclasses.fields(TextExperiment)
    }
