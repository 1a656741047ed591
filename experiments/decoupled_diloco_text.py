"""Decoupled DiLoCo on text: islands with their own runtimes, or simulated in one program."""

import dataclasses
from typing import Literal

import optax

from fedpax.aggregators import Aggregator, coordinate_median, mean, trimmed_mean
from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms import (
    decoupled_diloco,
    decoupled_diloco_parts,
    directional_mean,
)
from fedpax.checks import Count, CountOrZero, NonNegative, Positive
from fedpax.errors import ArgumentError
from fedpax.experiments.diloco_text import FragmentSettings, wire_codec
from fedpax.experiments.text_experiment import TextExperiment, short_rows
from fedpax.models import presets
from fedpax.settings.function_settings import arguments_of, documented_by
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True)
@documented_by(decoupled_diloco_parts)
class DecoupledConfig(FragmentSettings):
    """Decoupled DiLoCo: its fragments, its merge, and when the syncer merges.

    Attributes:
        merge: how the islands' outer gradients are combined. A median or a trimmed mean bounds the
            influence of a few islands that send anything.
        compression: format of an update on the wire, for `fedpax join`. `fedpax train` computes
            with float32.
    """

    group = "decoupled"
    merge: Literal["directional", "mean", "median", "trimmed_mean"] = "directional"
    compression: Literal["float32", "e3m0"] = "float32"
    error_feedback: bool = False
    quorum: Count = 1
    grace_seconds: NonNegative = 0.5
    max_steps_ahead: Count | None = None
    max_staleness: CountOrZero = 4
    max_norm: Positive | None = None

    def aggregator(self) -> Aggregator:
        """Make the aggregator of the outer gradients."""
        return {
            "directional": directional_mean,
            "mean": mean,
            "median": coordinate_median,
            "trimmed_mean": lambda: trimmed_mean(0.25),
        }[self.merge]()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCoText(TextExperiment):
    """Islands whose fragments a syncer merges when a quorum has sent them.

    Attributes:
        decoupled: the method's settings.
    """

    decoupled: DecoupledConfig = DecoupledConfig()

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make Decoupled DiLoCo, with its parts for `fedpax syncer` and `fedpax join`."""
        decoupled, local_steps = self.decoupled, self.data.local_steps
        if local_steps % decoupled.fragments:
            raise ArgumentError(
                f"data.local_steps={local_steps} is not a multiple of decoupled.fragments="
                f"{decoupled.fragments}, expected the same number of steps before each merge. Set "
                f"--data.local_steps to a multiple of {decoupled.fragments}."
            )
        if decoupled.quorum > self.islands:
            raise ArgumentError(
                f"decoupled.quorum={decoupled.quorum} with islands={self.islands}: expected at "
                f"most all islands. Set --decoupled.quorum to at most {self.islands}, or raise "
                "--islands."
            )
        outer, fragments = decoupled.optimizer(), decoupled.fragment_fn()
        parts = decoupled_diloco_parts(
            loss_fn,
            islands=self.islands,
            inner_optimizer=optimizer,
            steps_per_sync=local_steps // decoupled.fragments,
            outer_optimizer=outer,
            fragments=fragments,
            aggregator=decoupled.aggregator(),
            codec=wire_codec(decoupled.compression),
            **arguments_of(decoupled_diloco_parts, decoupled),
        )
        algorithm = decoupled_diloco(
            loss_fn,
            islands=self.islands,
            inner_optimizer=optimizer,
            outer_optimizer=outer,
            fragments=fragments,
            aggregator=decoupled.aggregator(),
        )
        return algorithm._replace(parts=parts)


def decoupled_diloco_text() -> DecoupledDiLoCoText:
    """Decoupled DiLoCo: 4 islands, one device each, a merge every 8 steps.

    For `fedpax syncer` and `fedpax join`; `fedpax train` runs it with islands that never fail. A
    fragment is merged when 2 islands have sent it, and all others that are up, or half a second
    later.
    """
    return DecoupledDiLoCoText(
        islands=4,
        model=presets.base_1m(),
        data=short_rows(local_steps=32, batch_size=2, seq_len=32),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        # Updates that miss their merge change the loss less than with the momentum of 0.9.
        decoupled=DecoupledConfig(quorum=2, learning_rate=0.7, momentum=0.6),
        training=TrainingConfig(rounds=28, evaluate_every=7, checkpoint_every=4),
    )
