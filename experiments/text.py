"""The base class of experiments on text: its configuration, and how it builds a run."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.data import (
    LazyStream,
    TokenRounds,
    heldout_token_batches,
    load,
    load_tokenizer,
    token_round_shapes,
    token_rounds,
)
from fedpax.data.text.packing import Batch
from fedpax.experiments.optimizers import OptimizerConfig
from fedpax.experiments.ranges import COUNT, NON_NEGATIVE, check_ranges
from fedpax.models.accumulation import accumulate_gradients
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings
from fedpax.training.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.training.evaluation import evaluator
from fedpax.training.experiment import Experiment, Run, Shardings


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text to train on, and the sizes of a round.

    Attributes:
        dataset: a name for `fedpax.data.load`, with the splits `train` and `heldout_split`.
        heldout_split: the split to evaluate on.
        field: the field of an example that contains its text.
        tokenizer: "bytes", or the path of a `tokenizer.json`.
        local_steps: optimizer steps of an island per round, H.
        batch_size: rows in a step of an island.
        seq_len: tokens in a row.
        heldout_batch_size: rows that an island evaluates at once.
        heldout_tokens: number of tokens to evaluate on; None: the whole split.
        seed: random seed of the assignment of documents to islands and of their order.
        data_dir: the folder of prepared data sets. Default None: that of TensorFlow Datasets.
    """

    dataset: str = "stdlib_text"
    heldout_split: str = "heldout"
    field: str = "text"
    tokenizer: str = "bytes"
    local_steps: int = 20
    batch_size: int = 8
    seq_len: int = 128
    heldout_batch_size: int = 16
    heldout_tokens: int | None = 65_536
    seed: int = 0
    data_dir: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a size is below 1.
        """
        sizes = ("local_steps", "batch_size", "seq_len", "heldout_batch_size", "heldout_tokens")
        check_ranges(self, "data", **dict.fromkeys(sizes, COUNT))


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The training loss: regularizers beside the cross-entropy, and gradient accumulation.

    Attributes:
        z_loss_weight: weight of the squared logarithm of the softmax's normalizer (z-loss).
        load_balance_weight: weight of the load-balancing loss of a mixture of experts.
        grad_accum_steps: microbatches of a step; their gradients accumulate one after another.
    """

    z_loss_weight: float = 0.0
    load_balance_weight: float = 0.01
    grad_accum_steps: int = 1

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a number is NaN or out of range.
        """
        check_ranges(
            self,
            "loss",
            z_loss_weight=NON_NEGATIVE,
            load_balance_weight=NON_NEGATIVE,
            grad_accum_steps=COUNT,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextExperiment(Experiment):
    """A transformer trained on text by one or several islands.

    Attributes:
        islands: number of islands, a multiple of the mesh's `islands` axis.
        model: the transformer.
        data: the text.
        loss: the training loss.
        optimizer: the optimizer of the local steps.
    """

    islands: int = 1
    model: TransformerConfig
    data: TextConfig = TextConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "", islands=COUNT)

    @abc.abstractmethod
    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make the federated algorithm.

        Args:
            loss_fn: the training loss.
            optimizer: the optimizer of the local steps.
        """

    def build(self) -> Run:
        """Make the model, algorithm and mesh. The text is read when the first round needs it."""
        data, mesh = self.data, self.mesh.make()
        self._check_divisibility(mesh.shape)
        model, loss = transformer(self.model), self.loss
        training_loss = accumulate_gradients(
            transformer_loss(
                self.model,
                z_loss_weight=loss.z_loss_weight,
                load_balance_weight=loss.load_balance_weight,
            ),
            loss.grad_accum_steps,
        )
        heldout_loss = transformer_loss(self.model, load_balance_weight=0.0)

        def batch_sharding(batch_size: int) -> NamedSharding:
            """Return the sharding of arrays [islands, steps, batch, sequence]."""
            island_axis = "islands" if "islands" in mesh.axis_names else None
            rows = partition_spec(("batch", "sequence"), mesh, shape=(batch_size, data.seq_len))
            return NamedSharding(mesh, PartitionSpec(island_axis, None, *rows))

        sizes: dict[str, Any] = {
            "islands": self.islands,
            "local_steps": data.local_steps,
            "batch_size": data.batch_size,
            "seq_len": data.seq_len,
        }

        # Both splits at once, so that a missing held-out split raises before training.
        @functools.cache
        def read() -> tuple[TokenRounds, list[Batch]]:
            tokenizer = load_tokenizer(data.tokenizer)
            if tokenizer.vocab_size > self.model.vocab_size:
                raise ValueError(
                    f"data.tokenizer={data.tokenizer!r} has {tokenizer.vocab_size:,} tokens, but "
                    f"model.vocab_size={self.model.vocab_size:,}. Set --model.vocab_size to at "
                    f"least {tokenizer.vocab_size}."
                )
            training = load(data.dataset, "train", data_dir=data.data_dir)
            heldout = load(data.dataset, data.heldout_split, data_dir=data.data_dir)
            text: Any = {"field": data.field, "tokenizer": tokenizer}
            return token_rounds(training, seed=data.seed, **sizes, **text), heldout_token_batches(
                heldout,
                batch_size=data.heldout_batch_size,
                seq_len=data.seq_len,
                max_tokens=data.heldout_tokens,
                **text,
            )

        @functools.cache
        def heldout_evaluator() -> Callable[[Params], dict[str, float]]:
            return evaluator(
                without_token_count(heldout_loss),
                read()[1],
                placement="islands",
                num_participants=self.islands,
                sharding=batch_sharding(data.heldout_batch_size),
            )

        optimizer = self.optimizer.make(self.training.rounds * data.local_steps, model.logical_axes)
        return Run(
            algorithm=self.make_algorithm(without_token_count(training_loss), optimizer),
            init=model.init,
            cohorts=LazyStream(lambda: read()[0]),
            evaluate=lambda params: heldout_evaluator()(params),
            mesh=mesh,
            shardings=Shardings(
                params=shardings(
                    model.logical_axes, jax.eval_shape(model.init, jax.random.key(0)), mesh
                ),
                cohort=batch_sharding(data.batch_size),
            ),
            items_per_round=math.prod(sizes.values()),
            item_unit="tokens",
            placement="islands",
            cohort_shapes=token_round_shapes(**sizes),
            flops_per_item=self.model.flops_per_token(data.seq_len),
        )

    def _check_divisibility(self, mesh: Mapping[str, int]) -> None:
        """Check that mesh axes divide the sizes they shard, so that no devices repeat work."""
        model, data = self.model, self.data
        sharded: list[tuple[str, int, tuple[str, ...]]] = [
            ("islands", self.islands, ("islands",)),
            ("data.batch_size", data.batch_size, ("data", "fsdp", "expert")),
            ("data.seq_len", data.seq_len, ("sequence",)),
            ("model.num_heads", model.num_heads, ("tensor",)),
            ("model.mlp_dim", model.mlp_dim, ("tensor",)),
        ]
        if model.num_experts:
            sharded.append(("model.num_experts", model.num_experts, ("expert",)))
        for name, size, axes in sharded:
            shards = math.prod(mesh.get(axis, 1) for axis in axes)
            if size % shards:
                larger = [axis for axis in axes if mesh.get(axis, 1) > 1]
                product = " x ".join(f"{axis}={mesh[axis]}" for axis in larger)
                raise ValueError(
                    f"The mesh's {product} does not divide --{name}={size}. Set --{name} to a "
                    f"multiple of {shards}, or reduce --mesh.{larger[0]}."
                )
        if mesh.get("clients", 1) > 1:
            raise ValueError(
                f"mesh.clients={mesh['clients']}, but an experiment on text has islands and no "
                "clients: these devices would repeat the work of others. Leave out --mesh.clients."
            )


def without_token_count(loss_fn: LossFn) -> LossFn:
    """Drop the metric "tokens" of a loss: packed rows have the same number in every step."""

    def loss(params: Params, batch: Any) -> tuple[jax.Array, Metrics]:
        value, aux = loss_fn(params, batch)
        return value, {name: x for name, x in (aux or {}).items() if name != "tokens"}

    return loss
