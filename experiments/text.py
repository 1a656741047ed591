"""What the experiments on text share: data, model, optimizer, and how they become a run."""

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
    Deferred,
    TokenRounds,
    heldout_batches,
    load,
    load_tokenizer,
    token_round_shapes,
    token_rounds,
)
from fedpax.data.text.packing import Batch
from fedpax.experiments.optimizers import OptimizerConfig
from fedpax.models.accumulation import accumulate_gradients
from fedpax.models.losses import LossFn, transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings
from fedpax.training.algorithm import FederatedAlgorithm
from fedpax.training.evaluation import evaluator
from fedpax.training.experiment import Experiment, Run, Shardings


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Which text is read, and how it is cut into rounds.

    Attributes:
        dataset: a name for `fedpax.data.load`, with the splits `train` and `heldout_split`.
        heldout_split: the split to evaluate on.
        field: the field of an example that holds its text.
        tokenizer: "bytes", or the path of a `tokenizer.json`.
        local_steps: optimizer steps of an island in a round, H.
        batch: rows in a step of an island.
        length: tokens in a row.
        heldout_batch: rows that an island evaluates at once.
        heldout_tokens: tokens to evaluate on; None takes the whole split.
        seed: chooses the islands' documents and their order.
        data_dir: the folder of prepared data sets; None is the data sets' own default.
    """

    dataset: str = "stdlib_text"
    heldout_split: str = "heldout"
    field: str = "text"
    tokenizer: str = "bytes"
    local_steps: int = 20
    batch: int = 8
    length: int = 128
    heldout_batch: int = 16
    heldout_tokens: int | None = 65_536
    seed: int = 0
    data_dir: str | None = None

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: for one below 1.
        """
        for name in ("local_steps", "batch", "length", "heldout_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}: expected at least 1.")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is added to the cross-entropy in training, and in how many parts it is computed.

    Attributes:
        z_loss_weight: weight of the squared logarithm of the softmax's normalizer.
        load_balance_weight: weight of the load-balancing loss of a mixture of experts.
        grad_accum_steps: micro-batches of a step, whose gradients add up one after another.
    """

    z_loss_weight: float = 0.0
    load_balance_weight: float = 0.01
    grad_accum_steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextExperiment(Experiment):
    """A transformer that is trained on text by several islands, or by one.

    Attributes:
        islands: how many islands; the mesh's `islands` axis divides it.
        model: the transformer.
        data: the text.
        loss: the training loss.
        optimizer: the optimizer of every training step.
    """

    islands: int = 1
    model: TransformerConfig
    data: TextConfig = TextConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    @abc.abstractmethod
    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes the federated algorithm from the loss and the training steps' optimizer."""

    def build(self) -> Run:
        """Makes model, algorithm and mesh; the text is read when the first round is drawn."""
        data, mesh = self.data, self.mesh.make()
        self._check_shares(mesh.shape)
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

        def placed(rows: int) -> NamedSharding:
            island_axis = "islands" if "islands" in mesh.axis_names else None
            split = partition_spec(("batch", "sequence"), mesh, shape=(rows, data.length))
            return NamedSharding(mesh, PartitionSpec(island_axis, None, *split))

        sizes: dict[str, Any] = {
            "islands": self.islands,
            "local_steps": data.local_steps,
            "batch": data.batch,
            "length": data.length,
        }

        # Both splits at once: a missing one is to be told before training, not after it.
        @functools.cache
        def read() -> tuple[TokenRounds, list[Batch]]:
            tokenizer = load_tokenizer(data.tokenizer)
            if tokenizer.vocab_size > self.model.vocab_size:
                raise ValueError(
                    f"data.tokenizer={data.tokenizer!r} has {tokenizer.vocab_size:,} tokens, but "
                    f"model.vocab_size={self.model.vocab_size:,}: make the model's at least as "
                    "large."
                )
            training = load(data.dataset, "train", data_dir=data.data_dir)
            heldout = load(data.dataset, data.heldout_split, data_dir=data.data_dir)
            how: Any = {"field": data.field, "tokenizer": tokenizer}
            return token_rounds(training, seed=data.seed, **sizes, **how), heldout_batches(
                heldout,
                batch=data.heldout_batch,
                length=data.length,
                max_tokens=data.heldout_tokens,
                **how,
            )

        @functools.cache
        def heldout_evaluator() -> Callable[[Any], dict[str, float]]:
            return evaluator(
                without_counts(heldout_loss),
                read()[1],
                placement="islands",
                num_participants=self.islands,
                sharding=placed(data.heldout_batch),
            )

        steps = self.training.rounds * data.local_steps
        return Run(
            algorithm=self.method(
                without_counts(training_loss), self.optimizer.make(steps, model.logical_axes)
            ),
            init=model.init,
            cohorts=Deferred(lambda: read()[0]),
            evaluate=lambda params: heldout_evaluator()(params),
            mesh=mesh,
            shardings=Shardings(
                params=shardings(
                    model.logical_axes, jax.eval_shape(model.init, jax.random.key(0)), mesh
                ),
                cohort=placed(data.batch),
            ),
            items_per_round=math.prod(sizes.values()),
            item_unit="tokens",
            placement="islands",
            cohort_shapes=token_round_shapes(**sizes),
            flops_per_token=self.model.flops_per_token(data.length),
        )

    def _check_shares(self, mesh: Mapping[str, int]) -> None:
        """Refuses axes of the mesh that would leave devices to do the same work as others."""
        model, data = self.model, self.data
        shares: list[tuple[str, int, tuple[str, ...]]] = [
            ("islands", self.islands, ("islands",)),
            ("data.batch", data.batch, ("data", "fsdp", "expert")),
            ("data.length", data.length, ("sequence",)),
            ("model.num_heads", model.num_heads, ("tensor",)),
            ("model.mlp_dim", model.mlp_dim, ("tensor",)),
        ]
        if model.num_experts:
            shares.append(("model.num_experts", model.num_experts, ("expert",)))
        for name, size, axes in shares:
            parts = math.prod(mesh.get(axis, 1) for axis in axes)
            if size % parts:
                larger = [axis for axis in axes if mesh.get(axis, 1) > 1]
                product = " x ".join(f"{axis}={mesh[axis]}" for axis in larger)
                raise ValueError(
                    f"The mesh's {product} does not divide --{name}={size}: make that a multiple "
                    f"of {parts}, or the mesh smaller (--mesh.{axes[0]})."
                )
        if mesh.get("clients", 1) > 1:
            raise ValueError(
                "Islands train on text, and the mesh's clients axis would have nothing to do: "
                "leave out --mesh.clients."
            )


def without_counts(loss_fn: LossFn) -> LossFn:
    """A loss that does not report its number of tokens: of packed rows all steps have as many."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, aux = loss_fn(params, batch)
        return value, {name: x for name, x in aux.items() if name != "tokens"}

    return loss
