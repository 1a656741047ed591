"""Optimizers of training steps as configuration: optax's, with a schedule and clipping."""

import dataclasses
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpax.checks import (
    CheckedConfig,
    Count,
    CountOrZero,
    Decay,
    Fraction,
    NonNegative,
    Positive,
    PositiveOrInfinite,
)
from fedpax.errors import ArgumentError

STACKED_AXES = {"layers", "repeats", "experts"}
"""Logical axes along which a parameter stacks matrices, each of which Muon updates separately."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(CheckedConfig):
    """An optimizer after gradient clipping, with linear warmup and a learning rate schedule.

    Attributes:
        name: the optimizer, one of optax's. optax 0.2.8 has neither Shampoo nor SOAP.
        learning_rate: peak learning rate.
        schedule: shape of the learning rate after the warmup: "cosine", "linear", "constant", "wsd"
            (warmup-stable-decay) or "warm_restarts"; `OptimizerConfig.learning_rate_schedule` has
            formulas.
        warmup_steps: steps of the linear warmup from 0 to the peak.
        final_lr_ratio: lowest learning rate of the schedule divided by the peak. The schedule
            "constant" ignores it.
        decay_fraction: "wsd": fraction of the run's steps that decay, at its end.
        restart_steps: "warm_restarts": steps of the first cycle.
        restart_factor: "warm_restarts": length of a cycle divided by the previous length.
        b1: decay rate of the first moment, or of the momentum.
        b2: decay rate of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate, of all parameters,
            scales of norms and embeddings included.
        grad_clip_norm: largest global norm of the gradient; inf disables clipping.
    """

    group = "optimizer"
    name: Literal["adamw", "adafactor", "lamb", "lars", "lion", "muon", "sgd"] = "adamw"
    learning_rate: Positive = 3e-3
    schedule: Literal["cosine", "linear", "constant", "wsd", "warm_restarts"] = "cosine"
    warmup_steps: CountOrZero = 20
    final_lr_ratio: NonNegative = 0.05
    decay_fraction: Fraction = 0.1
    restart_steps: Count = 1000
    restart_factor: Count = 2
    b1: Decay = 0.9
    b2: Decay = 0.99
    weight_decay: NonNegative = 0.1
    grad_clip_norm: PositiveOrInfinite = 1.0

    def make(
        self, num_steps: int, logical_axes: chex.ArrayTree | None = None
    ) -> optax.GradientTransformation:
        """Make the optimizer of a run."""
        rate = self.learning_rate_schedule(num_steps)
        decay = optax.add_decayed_weights(self.weight_decay)
        match self.name:
            case "adamw":
                rule = optax.adamw(rate, self.b1, self.b2, weight_decay=self.weight_decay)
            case "lamb":
                rule = optax.lamb(rate, self.b1, self.b2, weight_decay=self.weight_decay)
            case "lion":
                rule = optax.lion(rate, self.b1, self.b2, weight_decay=self.weight_decay)
            case "lars":
                rule = optax.lars(rate, self.weight_decay, momentum=self.b1)
            case "sgd":
                rule = optax.chain(decay, optax.sgd(rate, momentum=self.b1 or None))
            case "adafactor":
                rule = optax.chain(
                    optax.scale_by_factored_rms(),
                    optax.clip_by_block_rms(1.0),
                    optax.scale_by_param_block_rms(),
                    decay,
                    optax.scale_by_learning_rate(rate),
                )
            case "muon":
                rule = optax.contrib.muon(
                    rate,
                    beta=self.b1,
                    weight_decay=self.weight_decay,
                    adam_b1=self.b1,
                    adam_b2=self.b2,
                    adam_weight_decay=self.weight_decay,
                    consistent_rms=0.2,  # the RMS of Adam's updates, so one learning rate fits both
                    muon_weight_dimension_numbers=muon_dimension_numbers(logical_axes),
                )
        return optax.chain(optax.clip_by_global_norm(self.grad_clip_norm), rule)

    def describe_warmup(self, num_steps: int) -> list[str]:
        """Describe a warmup that takes all steps, so that the peak is never reached."""
        warmup, peak = self.warmup_steps, self.learning_rate
        if warmup < num_steps:
            return []
        return [
            f"--optimizer.warmup_steps={warmup}, but the schedule has {num_steps} steps: the "
            f"learning rate rises to {peak * (num_steps - 1) / warmup:.3g} and never reaches "
            f"--optimizer.learning_rate={peak:g}. Set for example "
            f"--optimizer.warmup_steps={num_steps // 10}"
        ]

    def learning_rate_schedule(self, num_steps: int) -> optax.Schedule:
        """Return the learning rate as a function of the number of steps so far.

        In the first W = `warmup_steps` steps it rises from 0 to the peak, `peak t / W`. With t
        steps after the warmup, N = `num_steps` - W and `final = final_lr_ratio peak`:

            cosine         final + (peak - final) (1 + cos(pi t / N)) / 2
            linear         peak - (peak - final) t / N
            constant       peak
            wsd            peak, and in the last `decay_fraction num_steps` steps
                           `fedpax.settings.optimizer_settings.stable_decay`
            warm_restarts  `fedpax.settings.optimizer_settings.warm_restarts`

        Reference:
            Cosine: Loshchilov and Hutter, arXiv:1608.03983, with one cycle.
        """
        peak, warmup = self.learning_rate, self.warmup_steps
        final, decay_steps = self.final_lr_ratio * peak, max(num_steps - warmup, 1)
        match self.schedule:
            case "cosine":
                decay = optax.cosine_decay_schedule(peak, decay_steps, self.final_lr_ratio)
            case "linear":
                decay = optax.linear_schedule(peak, final, decay_steps)
            case "constant":
                decay = optax.constant_schedule(peak)
            case "wsd":
                cooldown = min(round(self.decay_fraction * num_steps), decay_steps)
                decay = stable_decay(
                    peak, final, stable_steps=decay_steps - cooldown, decay_steps=cooldown
                )
            case "warm_restarts":
                decay = warm_restarts(
                    peak,
                    final,
                    num_steps=decay_steps,
                    first_cycle=self.restart_steps,
                    factor=self.restart_factor,
                )
        rise = optax.linear_schedule(0.0, peak, warmup)
        return optax.join_schedules([rise, decay], [warmup]) if warmup else decay


def muon_dimension_numbers(logical_axes: chex.ArrayTree | None) -> chex.ArrayTree:
    """Find the input and output axes of each parameter that is a matrix, for Muon."""
    # The axis "embed" is one side of the matrix, all other axes but the stacked ones are the other.
    # Muon updates embeddings and norms by Adam.
    if logical_axes is None:
        raise ArgumentError(
            "optimizer.name='muon' needs the logical axes of the parameters to find the matrices, "
            "but logical_axes is None. Pass logical_axes=model.logical_axes."
        )

    def dimension_numbers(names: tuple[str | None, ...]) -> Any:
        matrix = [i for i, name in enumerate(names) if name not in STACKED_AXES]
        embed = [i for i in matrix if names[i] == "embed"]
        rest = [i for i in matrix if names[i] != "embed"]
        if len(embed) != 1 or not rest or "vocab" in names:
            return None
        sides = (embed, rest) if embed[0] < rest[0] else (rest, embed)
        return optax.contrib.MuonDimensionNumbers(*map(tuple, sides))

    return jax.tree.map(dimension_numbers, logical_axes, is_leaf=lambda x: isinstance(x, tuple))


# ---- learning rate schedules that optax does not have: warmup-stable-decay, and warm restarts


def stable_decay(
    peak: float, final: float, *, stable_steps: int, decay_steps: int
) -> optax.Schedule:
    """Make a schedule that is constant first and decays at the end (WSD, without its warmup)."""
    # MiniCPM (arXiv:2404.06395, section 4), with the 1-sqrt decay of arXiv:2405.18392, section 3.

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.clip((jnp.asarray(count) - stable_steps) / max(decay_steps, 1), 0, 1)
        if not decay_steps:
            done = (jnp.asarray(count) >= stable_steps).astype(jnp.float32)
        return final + (peak - final) * (1 - jnp.sqrt(done))

    return rate


def warm_restarts(
    peak: float, final: float, *, num_steps: int, first_cycle: int, factor: int = 2
) -> optax.Schedule:
    """Make a schedule of cosine cycles, each from the peak and longer than the one before (SGDR).

    Cycle i has T_i = T_0 f^i steps, with T_0 = `first_cycle`. With T_cur steps since its start:

        eta = final + (peak - final) (1 + cos(pi T_cur / T_i)) / 2.

    Reference:
        Loshchilov and Hutter, arXiv:1608.03983, equation 5.
    """
    starts, lengths = [0], [first_cycle]
    while starts[-1] + lengths[-1] < num_steps:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * factor)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        cycle = jnp.searchsorted(np.array(starts), count, side="right") - 1
        done = (count - jnp.array(starts)[cycle]) / jnp.array(lengths)[cycle]
        return final + (peak - final) * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1))) / 2

    return rate
