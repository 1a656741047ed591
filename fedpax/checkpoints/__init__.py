"""Checkpoints of runs: saved, verified, restored, and exported as models."""

from fedpax.checkpoints.participant_states import resize_weights
from fedpax.checkpoints.saved_state import load_field, load_params
from fedpax.lazy_names import warn_deprecated

__all__ = [
    "load_field",
    "load_params",
    "resize_weights",
]


def __getattr__(name: str) -> object:
    """Return the function with the former name `participant_weights`."""
    if name == "participant_weights":  # `fedpax.algorithms` has another function of this name
        new = f"{__name__}.resize_weights"
        warn_deprecated(f"{__name__}.{name}", new, removed_in="0.3.0")
        return resize_weights
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
