"""Arguments of runs that take seconds, and the type of the fixture that runs a command."""

from collections.abc import Callable
from pathlib import Path

EXPERIMENTS = Path(__file__).parent.parent
REGRESSION = "small_regression:regression"
NAMED = f"--exp={REGRESSION}"  # to read its runs: the folder's own name runs no code
TINY_TRANSFORMER = (
    "--model.num_layers=1",
    "--model.embed_dim=24",
    "--model.num_heads=2",
    "--model.num_kv_heads=1",
    "--model.mlp_dim=52",
    "--model.scale_embeddings=False",
    "--data.seq_len=16",
    "--data.heldout_tokens=1024",
)

EVERY = ("--training.rounds=4", "--training.evaluate_every=2", "--training.checkpoint_every=2")

Command = Callable[..., tuple[int, str, str]]
