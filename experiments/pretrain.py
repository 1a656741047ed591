"""Pretraining of language models: SPMD training on one island, DiLoCo on several."""

import dataclasses

import optax

from fedpax.algorithm import FederatedAlgorithm, LossFn
from fedpax.algorithms import data_parallel
from fedpax.experiments.diloco_text import DiLoCoText, OuterConfig
from fedpax.experiments.text_experiment import LossConfig, TextConfig, short_rows
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.settings.optimizer_settings import OptimizerConfig
from fedpax.training.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(DiLoCoText):
    """A language model trained by one island or several."""

    def make_algorithm(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation
    ) -> FederatedAlgorithm:
        """Make SPMD training for one island, DiLoCo for several."""
        if self.islands == 1:
            return data_parallel(loss_fn, islands=1, optimizer=optimizer)
        return super().make_algorithm(loss_fn, optimizer)


def pretrain_text() -> Pretraining:
    """Pretraining of a byte-level transformer on Python's own sources, on one island."""
    return Pretraining(
        mesh=MeshConfig(fsdp=-1),
        model=presets.base_1m(),
        data=short_rows(local_steps=20, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        training=TrainingConfig(rounds=30, evaluate_every=10, checkpoint_every=10),
    )


def pretrain_c4_1b() -> Pretraining:
    """Pretraining of a 1B model on C4 on four chips, as Pax's C4Spmd1BAdam4Replicas.

    `data.tokenizer` is the path of a `tokenizer.json` of at most 32,000 tokens.
    """
    return Pretraining(
        model=presets.pax_c4_1b(),
        data=_c4(batch_size=128),
        loss=LossConfig(z_loss_weight=1e-4),
        optimizer=_adamw(learning_rate=2.5e-4),
        training=TrainingConfig(rounds=1500, evaluate_every=100, checkpoint_every=100),
    )


def pretrain_c4_16b() -> Pretraining:
    """Pretraining of a 16B model on C4 on 32 chips, as Pax's C4Spmd16BAdam32Replicas."""
    return dataclasses.replace(
        pretrain_c4_1b(),
        mesh=MeshConfig(tensor=2),
        model=presets.pax_c4_16b(),
        data=_c4(batch_size=512),
        optimizer=_adamw(learning_rate=1e-4),
    )


def diloco_c4_1b() -> Pretraining:
    """DiLoCo of a 1B model on C4: four islands of four chips, synchronized every 100 steps."""
    base = pretrain_c4_1b()
    return dataclasses.replace(
        base,
        islands=4,
        outer=OuterConfig(num_levels=16),
        data=dataclasses.replace(base.data, local_steps=100, batch_size=32),
        training=TrainingConfig(rounds=150, evaluate_every=10, checkpoint_every=10),
    )


def pretrain_llama_8b() -> Pretraining:
    """Pretraining of Llama 3.1 8B on C4: one island, 256 rows of 8,192 tokens per step."""
    return Pretraining(
        model=presets.llama_3_1_8b(),
        data=_c4(batch_size=256, seq_len=8192),
        loss=LossConfig(z_loss_weight=1e-4),
        optimizer=_adamw(learning_rate=3e-4),
        training=TrainingConfig(rounds=5000, evaluate_every=100, checkpoint_every=100),
    )


def diloco_llama_8b() -> Pretraining:
    """DiLoCo of Llama 3.1 8B on C4: four islands of 256 chips, synchronized every 100 steps.

    Outer gradients are quantized to 16 levels (4 bits) as in Streaming DiLoCo (Douillard et al.,
    arXiv:2501.18512), here with error feedback.
    """
    base = pretrain_llama_8b()
    return dataclasses.replace(
        base,
        islands=4,
        outer=OuterConfig(num_levels=16),
        data=dataclasses.replace(base.data, local_steps=100),
        training=TrainingConfig(rounds=500, evaluate_every=10, checkpoint_every=10),
    )


def _c4(*, batch_size: int, seq_len: int = 1024) -> TextConfig:
    return TextConfig(
        dataset="c4/en:3.1.0",
        heldout_split="validation",
        tokenizer="tokenizer.json",
        local_steps=10,
        batch_size=batch_size,
        seq_len=seq_len,
        heldout_batch_size=batch_size,
        heldout_tokens=2**22,
    )


def _adamw(learning_rate: float) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=learning_rate, warmup_steps=1000, final_lr_ratio=0.1, b2=0.95
    )
