"""The main job: DiLoCo on text, beside data parallelism and one island alone."""

import dataclasses
from typing import Any

import optax

from fedpax.algorithms.data_parallel import data_parallel
from fedpax.algorithms.diloco import diloco
from fedpax.experiments.text import AdamWConfig, TextConfig, TextExperiment
from fedpax.models.transformer import TransformerConfig
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.contract import FederatedAlgorithm
from fedpax.training.experiment import TrainingConfig


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """DiLoCo's outer optimizer, SGD with Nesterov momentum.

    Attributes:
        learning_rate: eta.
        momentum: beta.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoText(TextExperiment):
    """Islands that train apart for `data.local_steps` steps a round.

    Attributes:
        outer: what joins them.
    """

    outer: OuterConfig = OuterConfig()

    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes DiLoCo."""
        outer = optax.sgd(self.outer.learning_rate, momentum=self.outer.momentum, nesterov=True)
        return diloco(
            loss_fn, islands=self.islands, inner_optimizer=optimizer, outer_optimizer=outer
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelText(TextExperiment):
    """Islands that average their gradients at every step."""

    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes synchronous data parallelism."""
        return data_parallel(loss_fn, islands=self.islands, optimizer=optimizer)


def diloco_text() -> DiLoCoText:
    """DiLoCo: 4 islands of 2 devices train a byte-level transformer on Python's own sources."""
    return DiLoCoText(
        islands=4,
        mesh=MeshConfig(islands=4, fsdp=2),
        model=TransformerConfig(
            vocabulary=256, layers=4, width=160, heads=4, key_value_heads=2, mlp_width=448
        ),
        data=TextConfig(local_steps=20, batch=4, length=128),
        optimizer=AdamWConfig(),
        training=TrainingConfig(rounds=20, evaluate_every=2, checkpoint_every=10),
    )


def data_parallel_text() -> DataParallelText:
    """Data parallelism: the same islands and tokens, gradients averaged at every step."""
    base = diloco_text()
    return DataParallelText(
        islands=base.islands,
        mesh=base.mesh,
        model=base.model,
        data=base.data,
        optimizer=base.optimizer,
        training=base.training,
    )


def single_island_text() -> DataParallelText:
    """One island alone: the same local batch and number of steps, a quarter of the tokens."""
    return dataclasses.replace(data_parallel_text(), islands=1, mesh=MeshConfig(fsdp=2))
