"""What the experiments on text share: data, model, optimizer, and how they become a run."""

import abc
import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.data import heldout_batches, load, token_rounds
from fedpax.models.losses import next_token_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings
from fedpax.training.contract import FederatedAlgorithm
from fedpax.training.evaluation import evaluator
from fedpax.training.experiment import Experiment, Run, Shardings


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Which text is read, and how it is cut into rounds.

    Attributes:
        dataset: a name for `fedpax.data.load`, with the splits `train` and `heldout_split`.
        heldout_split: the split to evaluate on.
        field: the field of an example that holds its text.
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
    local_steps: int = 20
    batch: int = 8
    length: int = 128
    heldout_batch: int = 16
    heldout_tokens: int | None = 65_536
    seed: int = 0
    data_dir: str | None = None


@dataclasses.dataclass(frozen=True)
class AdamWConfig:
    """AdamW behind a clip, with linear warm-up and a cosine down to a fraction.

    Attributes:
        learning_rate: at the peak.
        warmup_steps: steps to reach it.
        final_fraction: of the peak, at the last step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        weight_decay: decoupled, multiplied by the learning rate.
        clip: the gradient's largest global norm.
    """

    learning_rate: float = 3e-3
    warmup_steps: int = 20
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0

    def make(self, steps: int) -> optax.GradientTransformation:
        """Makes the optimizer of a run of so many steps."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            self.learning_rate,
            self.warmup_steps,
            max(steps, self.warmup_steps + 1),
            self.final_fraction * self.learning_rate,
        )
        adamw = optax.adamw(schedule, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextExperiment(Experiment):
    """A transformer that is trained on text by several islands, or by one.

    Attributes:
        islands: how many islands; the mesh's `islands` axis divides it.
        model: the transformer.
        data: the text.
        optimizer: the optimizer of every training step.
    """

    islands: int = 1
    model: TransformerConfig
    data: TextConfig = TextConfig()
    optimizer: AdamWConfig = AdamWConfig()

    @abc.abstractmethod
    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes the federated algorithm from the loss and the training steps' optimizer."""

    def build(self) -> Run:
        """Loads the text, and makes model, algorithm and mesh."""
        data, mesh = self.data, self.mesh.make()
        batches = token_rounds(
            load(data.dataset, "train", data_dir=data.data_dir),
            islands=self.islands,
            local_steps=data.local_steps,
            batch=data.batch,
            length=data.length,
            seed=data.seed,
            field=data.field,
        )
        heldout = heldout_batches(
            load(data.dataset, data.heldout_split, data_dir=data.data_dir),
            batch=data.heldout_batch,
            length=data.length,
            max_tokens=data.heldout_tokens,
            field=data.field,
        )
        model = transformer(self.model)
        with_counts = next_token_loss(model.apply)

        def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return with_counts(params, batch)[0], {}  # packed rows: all steps count as many tokens

        def placed(rows: int) -> NamedSharding:
            island_axis = "islands" if "islands" in mesh.axis_names else None
            over_rows = partition_spec(("batch",), mesh, shape=(rows,))
            return NamedSharding(mesh, PartitionSpec(island_axis, None, *over_rows))

        steps = self.training.rounds * data.local_steps
        return Run(
            algorithm=self.method(loss_fn, self.optimizer.make(steps)),
            init=model.init,
            batches=batches,
            evaluate=evaluator(
                loss_fn,
                heldout,
                placement="islands",
                participants=self.islands,
                sharding=placed(data.heldout_batch),
            ),
            mesh=mesh,
            shardings=Shardings(
                params=shardings(
                    model.logical, jax.eval_shape(model.init, jax.random.key(0)), mesh
                ),
                batches=placed(data.batch),
            ),
            tokens_per_round=batches.tokens_per_round,
            placement="islands",
        )
