"""Checkpoints of runs: saved, verified, restored, and exported as models."""

from fedpax.checkpoints.participant_states import participant_weights
from fedpax.checkpoints.saved_state import load_field, load_params

__all__ = [
    "load_field",
    "load_params",
    "participant_weights",
]
