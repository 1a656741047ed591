"""The optimizers of training steps as configuration: optax's, a schedule, and a clip."""

import dataclasses
from typing import Any, Literal

import jax
import optax

# Axes of a parameter that make it a stack of matrices, each with an update of its own.
STACKED = {"layers", "repeats", "experts"}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer behind a clip, with linear warm-up and a way down to a fraction.

    Attributes:
        name: which of optax's.
        learning_rate: at the peak.
        schedule: from the peak to the last step.
        warmup_steps: steps to reach the peak.
        final_fraction: of the peak, at the last step; "constant" stays at the peak.
        b1: decay of the first moment, or of the momentum.
        b2: decay of the second moment.
        weight_decay: decoupled, multiplied by the learning rate.
        clip: the gradient's largest global norm.

    Raises:
        ValueError: for a learning rate, warm-up or clip that is out of range.
    """

    name: Literal["adamw", "adafactor", "lamb", "lars", "lion", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 20
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name, least in (("learning_rate", 0.0), ("clip", 0.0), ("warmup_steps", -1)):
            if not getattr(self, name) > least:  # so NaN is refused too
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)}: expected a number above {least:g}."
                )

    def make(self, steps: int, logical: Any = None) -> optax.GradientTransformation:
        """Makes the optimizer of a run.

        Args:
            steps: optimizer steps of the whole run.
            logical: the names of the parameters' axes, which tell Muon what is a matrix.

        Returns:
            The optimizer, a clip by the global norm before it.

        Raises:
            ValueError: Muon without `logical`.
        """
        rate = self.rate(steps)
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
                    consistent_rms=0.2,  # steps as large as Adam's, so that one rate serves both
                    muon_weight_dimension_numbers=matrices(logical),
                )
        return optax.chain(optax.clip_by_global_norm(self.clip), rule)

    def rate(self, steps: int) -> optax.Schedule:
        """The learning rate by step."""
        peak, warmup = self.learning_rate, self.warmup_steps
        final, after = self.final_fraction * peak, max(steps - warmup, 1)
        match self.schedule:
            case "cosine":
                down = optax.cosine_decay_schedule(peak, after, self.final_fraction)
            case "linear":
                down = optax.linear_schedule(peak, final, after)
            case "constant":
                down = optax.constant_schedule(peak)
        up = optax.linear_schedule(0.0, peak, warmup)
        return optax.join_schedules([up, down], [warmup]) if warmup else down


def matrices(logical: Any) -> Any:
    """Says which axes of each parameter are a matrix's inputs and outputs, for Muon.

    The embed axis is one side and the other axes the other, but those along which matrices are
    stacked. Embeddings and norms are no such matrices and get None: Adam steps.

    Args:
        logical: a tuple of axis names for each parameter.

    Returns:
        The same structure of `optax.contrib.MuonDimensionNumbers` or None.

    Raises:
        ValueError: no names.

    Example:
        >>> dimensions = matrices({"query": ("layers", "embed", "heads", "head_dim")})["query"]
        >>> dimensions.reduction_axis, dimensions.output_axis
        ((1,), (2, 3))
    """
    if logical is None:
        raise ValueError(
            "optimizer.name='muon' needs the names of the parameters' axes to know their matrices: "
            "pass logical=model.logical_axes."
        )

    def of(names: tuple[str | None, ...]) -> Any:
        inner = [i for i, name in enumerate(names) if name not in STACKED]
        embed = [i for i in inner if names[i] == "embed"]
        others = [i for i in inner if names[i] != "embed"]
        if len(embed) != 1 or not others or "vocab" in names:
            return None
        sides = (embed, others) if embed[0] < others[0] else (others, embed)
        return optax.contrib.MuonDimensionNumbers(*map(tuple, sides))

    return jax.tree.map(of, logical, is_leaf=lambda x: isinstance(x, tuple))
