"""DiLoCo on text, with two baselines: data parallelism, and one island alone."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import optax

from fedpax.aggregators import codecs
from fedpax.aggregators.quantized_mean import LEVELS, quantized_mean
from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms import data_parallel, diloco, layer_fragments
from fedpax.algorithms.parts.fragments import FragmentFn
from fedpax.checks import CheckedConfig, Count, Decay, Positive
from fedpax.errors import ArgumentError
from fedpax.experiments.text_experiment import TextExperiment, short_rows, text_fields
from fedpax.models import presets
from fedpax.models.lora import LoRAConfig
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True)
class OuterSGD(CheckedConfig):
    """The outer optimizer: SGD with Nesterov momentum.

    Attributes:
        learning_rate: outer learning rate, eta.
        momentum: Nesterov momentum of the outer optimizer, beta; 0 is plain SGD.
    """

    group = "outer"
    learning_rate: Positive = 0.7
    momentum: Decay = 0.9

    def optimizer(self) -> optax.GradientTransformation:
        """Make the optimizer."""
        return optax.sgd(self.learning_rate, momentum=self.momentum, nesterov=True)


@dataclasses.dataclass(frozen=True)
class FragmentSettings(OuterSGD):
    """Fragments of the model that islands synchronize one at a time.

    Attributes:
        fragments: number of fragments, P: one for the embeddings and the final norm, the others for
            the layers. `data.local_steps` is a multiple of it.
        pattern: how layers are dealt to fragments.
    """

    learning_rate: Positive = 0.4
    fragments: Count = 4
    pattern: Literal["strided", "sequential"] = "strided"

    def fragment_fn(self) -> FragmentFn:
        """Assign the parameters to fragments."""
        assign, flag = layer_fragments(self.fragments, self.pattern), f"--{self.group}.fragments"

        def fragment_of(path: str, leaf: Any) -> int | Sequence[int]:
            try:
                return assign(path, leaf)
            except ArgumentError as error:
                text = str(error).replace("fragments is", f"{flag} is")
                error.in_flags = text.replace("Pass at most fragments", f"Set at most {flag}")
                raise

        return fragment_of


def wire_codec(compression: str) -> codecs.Codec | None:
    """Return the codec of this name without settings, such as "e3m0"; None for "float32"."""
    return None if compression == "float32" else getattr(codecs, compression)()


@dataclasses.dataclass(frozen=True)
class OuterConfig(OuterSGD):
    """DiLoCo's outer optimizer, and the quantization of its gradients.

    Attributes:
        num_levels: quantization levels of an island's outer gradient on the wire, 2 to 256, with
            error feedback. Default None: send float32.
    """

    num_levels: Annotated[int, LEVELS] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoText(TextExperiment):
    """Islands that train separately for `data.local_steps` steps per round.

    Attributes:
        outer: the outer optimizer.
    """

    outer: OuterConfig = OuterConfig()

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make DiLoCo."""
        num_levels = self.outer.num_levels
        return diloco(
            loss_fn,
            islands=self.islands,
            inner_optimizer=optimizer,
            outer_optimizer=self.outer.optimizer(),
            aggregator=None if num_levels is None else quantized_mean(num_levels),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelText(TextExperiment):
    """Islands that average their gradients at every step."""

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make synchronous data parallelism."""
        return data_parallel(loss_fn, islands=self.islands, optimizer=optimizer)


def diloco_text() -> DiLoCoText:
    """DiLoCo: 4 islands share the devices and train a byte-level transformer on Python's sources.

    Islands synchronize every 18 steps. Outer gradients are quantized to 16 levels with error
    feedback.
    """
    return DiLoCoText(
        islands=4,
        model=presets.base_100k(),
        data=short_rows(local_steps=18, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=8e-3, final_lr_ratio=0.01),
        outer=OuterConfig(learning_rate=0.9, momentum=0.7, num_levels=16),
        training=TrainingConfig(rounds=216, evaluate_every=24, checkpoint_every=108),
    )


def data_parallel_text() -> DataParallelText:
    """Islands of diloco_text that average their gradients at every step: data parallelism.

    Of the learning rates 0.006, 0.008 and 0.012, the same one is best as for `diloco_text`.
    """
    return DataParallelText(**text_fields(diloco_text()))


def single_island_text() -> DataParallelText:
    """One island alone: the local batch and steps of diloco_text, a quarter of the tokens."""
    return dataclasses.replace(data_parallel_text(), islands=1)


def diloco_lora_text() -> DiLoCoText:
    """DiLoCo of adapters (LoRA) on 4 islands, synchronized every 10 steps. Needs weights.

    `--model.weights` names a Hugging Face folder, such as `fedpax export` writes. In a run of 20
    rounds, DiLoCo's outer momentum of 0.9 raises the loss of trained weights; 0.5 lowers it.
    """
    return DiLoCoText(
        islands=4,
        model=presets.base_1m(),
        data=short_rows(local_steps=10, batch_size=4),
        lora=LoRAConfig(rank=8),
        optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0),
        outer=OuterConfig(momentum=0.5, num_levels=16),
        training=TrainingConfig(rounds=20, evaluate_every=5, checkpoint_every=10),
    )
