"""The leaves of a checkpoint, compared with those of an experiment."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.training.participant_states import saved_placed_struct


def saved_struct(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    path: tuple[str, ...],
    num_participants: int | None = None,
    num_saved: int | None = None,
) -> jax.ShapeDtypeStruct:
    """Return a leaf's abstract value with the number of participants that was saved.

    Args:
        leaf: the leaf's abstract value in the experiment.
        saved: the shape in the checkpoint.
        path: the leaf's path in the state.
        num_participants: the placement's size. Default None: all shapes must be equal.
        num_saved: the size with which the state was saved. Default None: unknown.

    Returns:
        `leaf` itself if the shapes are equal; with the saved shape if it holds one entry per
        participant.

    Raises:
        ValueError: the shapes differ otherwise.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        saved = saved[: leaf.ndim]  # random keys are saved as numbers, with one more axis
    if leaf.shape == saved:
        return leaf
    is_placed = (
        path[0] != "params"
        and leaf.shape[:1] == (num_participants,)
        and saved != ()
        and num_saved in (None, saved[0])
        and leaf.shape[1:] == saved[1:]
    )
    if not is_placed:
        raise ValueError(
            f"The checkpoint's {'.'.join(path)} has shape {list(saved)}, expected "
            f"{list(leaf.shape)} as in the experiment. Use the model that was saved, or another "
            "--job_log_dir."
        )
    return saved_placed_struct(leaf, saved[0])


def check_same_leaves(
    wanted: Mapping[tuple[str, ...], Any], saved: Mapping[tuple[str, ...], Any], step: int
) -> None:
    """Check that a checkpoint has the leaves that an experiment has.

    Args:
        wanted: the experiment's leaves by path.
        saved: the checkpoint's leaves by path.
        step: the checkpoint's round.

    Raises:
        ValueError: a leaf is in only one of them.
    """
    if wanted.keys() != saved.keys():
        names = sorted(".".join(path) for path in wanted.keys() ^ saved.keys())
        raise ValueError(
            f"The checkpoint of round {step} and the experiment have different states: "
            f"{', '.join(names[:5])} {'and others ' if len(names) > 5 else ''}in only one of "
            "them, expected the same leaves. Use the model and the method that were saved, or "
            "another --job_log_dir; `fedpax export` and --model.weights start a new run from this "
            "model."
        )
