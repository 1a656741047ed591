"""The main job: DiLoCo on text, beside data parallelism and one island alone."""

import dataclasses
from typing import Any

import optax

from fedpax.aggregators.quantized_mean import check_num_levels, quantized_mean
from fedpax.algorithms import data_parallel, diloco
from fedpax.experiments.optimizers import OptimizerConfig
from fedpax.experiments.text import TextConfig, TextExperiment
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.algorithm import FederatedAlgorithm
from fedpax.training.experiment import TrainingConfig


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """DiLoCo's outer optimizer, and what it gets.

    Attributes:
        learning_rate: eta.
        momentum: beta of Nesterov's momentum; 0 is plain SGD.
        num_levels: number of values that an entry of an island's outer gradient can take on the
            wire, 2 to 256, with error feedback. Default None: send float32.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    num_levels: int | None = None

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: for a number out of range.
        """
        if not (self.learning_rate > 0 and 0 <= self.momentum < 1):
            raise ValueError(
                f"outer.learning_rate={self.learning_rate}, outer.momentum={self.momentum}: "
                "expected a positive rate, and a momentum of at least 0 and below 1."
            )
        if self.num_levels is not None:
            check_num_levels(self.num_levels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoText(TextExperiment):
    """Islands that train apart for `data.local_steps` steps a round.

    Attributes:
        outer: what joins them.
    """

    outer: OuterConfig = OuterConfig()

    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes DiLoCo."""
        levels = self.outer.num_levels
        outer = optax.sgd(self.outer.learning_rate, momentum=self.outer.momentum, nesterov=True)
        return diloco(
            loss_fn,
            islands=self.islands,
            inner_optimizer=optimizer,
            outer_optimizer=outer,
            aggregator=None if levels is None else quantized_mean(levels),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelText(TextExperiment):
    """Islands that average their gradients at every step."""

    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes synchronous data parallelism."""
        return data_parallel(loss_fn, islands=self.islands, optimizer=optimizer)


def diloco_text() -> DiLoCoText:
    """DiLoCo: 4 islands of 2 devices train a byte-level transformer on Python's own sources.

    So early in training islands drift apart fast, and each step of H costs loss; what crosses can
    be coarse instead. They meet after every second step and send signs, with error feedback. The
    mean over islands takes the noise out of their steps, and some of the length: the outer rate
    gives it back.
    """
    return DiLoCoText(
        islands=4,
        mesh=MeshConfig(islands=4, fsdp=2),
        model=presets.demo(),
        data=TextConfig(local_steps=2, batch=2, length=32, heldout_batch=32, heldout_tokens=32_768),
        optimizer=OptimizerConfig(learning_rate=2e-3, b1=0.5),
        outer=OuterConfig(learning_rate=2.0, momentum=0.0, num_levels=2),
        training=TrainingConfig(rounds=440, evaluate_every=55, checkpoint_every=220),
    )


def data_parallel_text() -> DataParallelText:
    """Data parallelism: the same islands and tokens, gradients averaged at every step.

    Its learning rate and its first moment are tuned as DiLoCo's are.
    """
    base = diloco_text()
    return DataParallelText(
        islands=base.islands,
        mesh=base.mesh,
        model=base.model,
        data=base.data,
        optimizer=OptimizerConfig(learning_rate=1.5e-3, b1=0.5),
        training=base.training,
    )


def single_island_text() -> DataParallelText:
    """One island alone: the same local batch and number of steps, a quarter of the tokens."""
    return dataclasses.replace(data_parallel_text(), islands=1, mesh=MeshConfig(fsdp=2))
