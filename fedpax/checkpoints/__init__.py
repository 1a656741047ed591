"""Checkpoints of runs: saved, verified, restored, and exported as models."""

from fedpax.checkpoints.saved_state import load_params

__all__ = ["load_params"]
