"""Pretraining: one island is ordinary SPMD training, several are DiLoCo; the rest is configuration.

    fedpax train --exp=pretrain_text --job_log_dir=runs/pretrain_text
    fedpax plan --exp=diloco_llama_8b --topology=v5e:16x16 --slices=4

Any of them runs on another mesh: `--mesh.fsdp=16 --mesh.tensor=2`; `fedpax plan` says what fits.
"""

import dataclasses
from typing import Any

import optax

from fedpax.algorithms import data_parallel
from fedpax.experiments.diloco_text import DiLoCoText, OuterConfig
from fedpax.experiments.optimizers import OptimizerConfig
from fedpax.experiments.text import LossConfig, TextConfig
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.algorithm import FederatedAlgorithm
from fedpax.training.experiment import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(DiLoCoText):
    """A language model trained by one island, or by several that synchronize once a round."""

    def method(self, loss_fn: Any, optimizer: optax.GradientTransformation) -> FederatedAlgorithm:
        """Makes the method: SPMD training, or DiLoCo."""
        if self.islands == 1:
            return data_parallel(loss_fn, islands=1, optimizer=optimizer)
        return super().method(loss_fn, optimizer)


def pretrain_text() -> Pretraining:
    """Pretraining on Python's own sources: a byte-level transformer, all devices one island."""
    return Pretraining(
        mesh=MeshConfig(fsdp=-1),
        model=presets.demo(),
        data=TextConfig(
            local_steps=20, batch=8, length=64, heldout_batch=32, heldout_tokens=32_768
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        training=TrainingConfig(rounds=30, evaluate_every=10, checkpoint_every=10),
    )


def pretrain_c4_1b() -> Pretraining:
    """Pretraining on C4, 1B: what Pax's C4Spmd1BAdam4Replicas trains, on four chips.

    13 layers of width 2560, rows of 1,024 tokens, 128 of them a step. `data.tokenizer` names the
    vocabulary, a `tokenizer.json` of at most 32,000 tokens.
    """
    return Pretraining(
        mesh=MeshConfig(fsdp=4),
        model=presets.pax_c4_1b(),
        data=_c4(batch=128),
        loss=LossConfig(z_loss_weight=1e-4),
        optimizer=_adamw(learning_rate=2.5e-4),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )


def pretrain_c4_16b() -> Pretraining:
    """Pretraining on C4, 16B: what Pax's C4Spmd16BAdam32Replicas trains, on 32 chips."""
    return Pretraining(
        mesh=MeshConfig(fsdp=16, tensor=2),
        model=presets.pax_c4_16b(),
        data=_c4(batch=512),
        loss=LossConfig(z_loss_weight=1e-4),
        optimizer=_adamw(learning_rate=1e-4),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )


def diloco_c4_1b() -> Pretraining:
    """DiLoCo on C4, 1B: four islands of four chips that synchronize every 100 steps.

    Outer gradients cross in one of 16 levels, as in `diloco_llama_8b`.
    """
    base = pretrain_c4_1b()
    return dataclasses.replace(
        base,
        islands=4,
        mesh=MeshConfig(islands=4, fsdp=4),
        outer=OuterConfig(num_levels=16),
        data=dataclasses.replace(base.data, local_steps=100, batch=32),
        training=TrainingConfig(rounds=150, evaluate_every=10, checkpoint_every=10),
    )


def pretrain_llama_8b() -> Pretraining:
    """Pretraining of Llama 3.1 8B on C4: rows of 8,192 tokens, one a chip, all chips one island."""
    return Pretraining(
        mesh=MeshConfig(fsdp=-1),
        model=presets.llama_3_1_8b(),
        data=_c4(batch=256, length=8192),
        loss=LossConfig(z_loss_weight=1e-4),
        optimizer=_adamw(learning_rate=3e-4),
        training=TrainingConfig(rounds=5000, evaluate_every=100, checkpoint_every=100),
    )


def diloco_llama_8b() -> Pretraining:
    """DiLoCo of Llama 3.1 8B on C4: four islands of 256 chips that synchronize every 100 steps.

    Outer gradients cross in one of 16 levels, 4 bits of information, as in Streaming DiLoCo
    (Douillard et al., arXiv:2501.18512), here with error feedback.
    """
    base = pretrain_llama_8b()
    return dataclasses.replace(
        base,
        islands=4,
        mesh=MeshConfig(islands=4, fsdp=256),
        outer=OuterConfig(num_levels=16),
        data=dataclasses.replace(base.data, local_steps=100),
        training=TrainingConfig(rounds=500, evaluate_every=10, checkpoint_every=10),
    )


def _c4(*, batch: int, length: int = 1024) -> TextConfig:
    return TextConfig(
        dataset="c4/en:3.1.0",
        heldout_split="validation",
        tokenizer="tokenizer.json",
        local_steps=10,
        batch=batch,
        length=length,
        heldout_batch=batch,
        heldout_tokens=2**22,
    )


def _adamw(learning_rate: float) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=learning_rate, warmup_steps=1000, final_fraction=0.1, b2=0.95
    )
