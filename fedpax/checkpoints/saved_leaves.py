"""The leaves of a checkpoint, compared with those of an experiment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from fedpax.checkpoints.open_checkpoints import open_checkpoints
from fedpax.checkpoints.participant_states import saved_placed_struct
from fedpax.errors import ArgumentError


def saved_shapes(folder: Path, step: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the shapes of a checkpoint's leaves by path, without reading the arrays.

    Args:
        folder: a run's `checkpoints` folder.
        step: the checkpoint's round.
    """
    handlers = {"state": ocp.StandardCheckpointHandler(), "progress": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(create=False)
    with open_checkpoints(folder, options=options, item_handlers=handlers) as manager:
        saved = manager.item_metadata(step)["state"]
        return {path: tuple(leaf.shape) for path, leaf in ocp.tree.to_flat_dict(saved).items()}


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
    if has_saved_shape(leaf, saved, path, num_participants, num_saved):
        return leaf
    return saved_placed_struct(leaf, saved[0])


def has_saved_shape(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    path: tuple[str, ...],
    num_participants: int | None = None,
    num_saved: int | None = None,
) -> bool:
    """Return whether a leaf has the shape that was saved, and not another number of participants.

    Args, Raises: as `saved_struct`.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        saved = saved[: leaf.ndim]  # random keys are saved as numbers, with one more axis
    if leaf.shape == saved:
        return True
    is_placed = (
        path[0] != "params"
        and leaf.shape[:1] == (num_participants,)
        and saved != ()
        and num_saved in (None, saved[0])
        and leaf.shape[1:] == saved[1:]
    )
    if not is_placed:
        raise ArgumentError(
            f"The checkpoint's {'.'.join(path)} has shape {list(saved)}, expected "
            f"{list(leaf.shape)} as in the experiment. Use the model that was saved, or another "
            "--job_log_dir."
        )
    return False


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
        raise ArgumentError(
            f"The checkpoint of round {step} and the experiment have different states: "
            f"{', '.join(names[:5])} {'and others ' if len(names) > 5 else ''}in only one of "
            "them, expected the same leaves. Use the model and the method that were saved, or "
            "another --job_log_dir; `fedpax export` and --model.weights start a new run from this "
            "model."
        )
