"""Saved states for an experiment: the same leaves, and as many participants."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float

from fedpax.algorithm import State
from fedpax.checkpoints.checkpoint_files import lineage
from fedpax.checkpoints.orbax_files import ocp, open_to_read
from fedpax.checkpoints.saved_stores import CLIENTS, stores_of
from fedpax.console import count_of
from fedpax.errors import ArgumentError

ParticipantRule: TypeAlias = Literal["average", "copy"]
"""The rule that makes participants' states from the states of another number of participants."""

FIXED = "fixed_participants"
"""The property of a state that returns why its number of participants cannot change."""


def resize_weights(
    num_saved: int, num_participants: int, rule: ParticipantRule = "average"
) -> Float[np.ndarray, "participants saved"]:
    """Return the weight of each saved participant in the state of each new one.

    With n saved and m new participants, counted from 0, the weights of "average" are

        W_ij = m |[i / m, (i + 1) / m) intersected with [j / n, (j + 1) / n)|.

    Rows sum to 1 and columns to m / n, so the mean over participants is kept.

    "copy" gives new participant i the state of saved participant i mod n. With m < n, the states of
    the last n - m participants are dropped, and the mean changes.

    Example:
        >>> resize_weights(4, 3).tolist()
        [[0.75, 0.25, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.25, 0.75]]
    """
    check_rule(rule)
    new, saved = np.arange(num_participants)[:, None], np.arange(num_saved)[None, :]
    if rule == "copy":
        return (new % num_saved == saved).astype(np.float64)
    # In units of 1 / (n m), in which all ends are integers.
    stop = np.minimum((new + 1) * num_saved, (saved + 1) * num_participants)
    start = np.maximum(new * num_saved, saved * num_participants)
    return np.maximum(stop - start, 0) / num_saved


def check_rule(rule: str) -> None:
    """Check the name of a rule."""
    if rule not in ("average", "copy"):
        raise ArgumentError(
            f"participant_states={rule!r}, expected 'average' or 'copy'. Set "
            "--participant_states=average to keep the mean over participants."
        )


def kept_participants(
    saved: Sequence[int] | None, now: Sequence[int] | None
) -> list[int | None] | None:
    """Return for each participant its index among the saved ones, by their numbers."""
    if saved is None or now is None:
        return None
    return [saved.index(number) if number in saved else None for number in now]


def resize_participants(
    saved: jax.Array,
    like: jax.ShapeDtypeStruct,
    rule: ParticipantRule = "average",
    kept: Sequence[int | None] | None = None,
) -> jax.Array:
    """Make a placed array for another number of participants."""
    # Means are in float32 or wider. Values that cannot be averaged are copied from the saved
    # participant of the largest weight, and random keys are folded with the new index.
    if saved.shape == like.shape:
        return saved
    weights = resize_weights(saved.shape[0], like.shape[0], rule)
    if kept is not None:
        if rule == "average":
            weights = np.full_like(weights, 1 / len(saved))
        for i, j in enumerate(kept):
            if j is not None:
                weights[i] = np.arange(len(saved)) == j
    is_new = np.array([kept is None or kept[i] is None for i in range(len(weights))])
    copied_alone = bool(np.all(weights.max(axis=1) == 1))
    is_key = jnp.issubdtype(saved.dtype, jax.dtypes.prng_key)

    def resize(saved: jax.Array) -> jax.Array:
        if copied_alone or not jnp.issubdtype(saved.dtype, jnp.inexact):
            chosen = saved[weights.argmax(axis=1)]
            if not is_key:
                return chosen
            fold = jnp.vectorize(jax.random.fold_in)
            index = jnp.arange(len(chosen)).reshape(-1, *[1] * (chosen.ndim - 1))
            new = jnp.asarray(is_new).reshape(index.shape)
            return jnp.where(new, fold(chosen, index), chosen)
        total: Any = 0
        wide = jnp.promote_types(saved.dtype, jnp.float32)
        for j, column in enumerate(weights.T):
            factor = jnp.asarray(column, wide).reshape(-1, *[1] * (saved.ndim - 1))
            # A weight of 0 does not remove the NaN of another participant; a select does.
            total += jnp.where(factor > 0, factor * saved[j].astype(wide), 0)
        return total.astype(saved.dtype)

    mesh = jax.typeof(saved).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:  # slices of a sharded axis need automatic axes
        resize = jax.sharding.auto_axes(resize, out_sharding=like.sharding.spec)
    return jax.jit(resize, out_shardings=like.sharding)(saved)


def check_resizable(state: State, num_saved: int, num_participants: int) -> None:
    """Check that a method allows another number of participants."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, FIXED))
    for reason in (getattr(node, FIXED) for node in nodes if hasattr(node, FIXED)):
        raise ArgumentError(
            f"The checkpoint was saved with {count_of(num_saved, 'participant')} and the "
            f"experiment has {num_participants}, expected the same number: {reason}. Set the "
            "former number, or start a new run from the exported model (`fedpax export`, "
            "--model.weights)."
        )


class SavedLeaves(NamedTuple):
    """The leaves of a checkpoint's state, without their values."""

    shapes: dict[tuple[str, ...], tuple[int, ...]]  # by path
    # the number of clients of each store, by its path; empty if an earlier version saved it
    clients: Mapping[str, int]


def saved_leaves(folder: Path, step: int) -> SavedLeaves:
    """Return the leaves of a checkpoint's state, without reading the arrays."""
    with open_to_read(folder) as manager:
        ancestors = lineage(folder, step)
        metadata = manager.item_metadata(step)["state"]
        saved = ocp.tree.to_flat_dict(metadata)
        stores = {tuple(path) for _, parent in ancestors if parent for path in parent.stores}
        if stores:
            whole = ocp.tree.to_flat_dict(manager.item_metadata(ancestors[0][0])["state"])
            rows = {n: leaf for n, leaf in whole.items() if any(n[: len(s)] == s for s in stores)}
            saved = {**rows, **saved}
        shapes = {path: tuple(leaf.shape) for path, leaf in saved.items()}
        return SavedLeaves(shapes, (metadata.custom_metadata or {}).get(CLIENTS, {}))


def saved_struct(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    path: tuple[str, ...],
    num_participants: int | None = None,
    num_saved: int | None = None,
) -> jax.ShapeDtypeStruct:
    """Return a leaf with the saved number of participants; itself if the shapes are equal."""
    if has_saved_shape(leaf, saved, path, num_participants, num_saved):
        return leaf
    # Sharded if the axis divides their number: a device reads only its share.
    sharding: Any = leaf.sharding
    axis = tuple(sharding.spec)[:1]
    first = axis[0] if axis and axis[0] is not None else None
    names = first if isinstance(first, tuple) else (first,)
    if first is not None and saved[0] % math.prod(sharding.mesh.shape[name] for name in names):
        first = None
    sharding = NamedSharding(sharding.mesh, PartitionSpec(first, *sharding.spec[1:]))
    return jax.ShapeDtypeStruct((saved[0], *leaf.shape[1:]), leaf.dtype, sharding=sharding)


def has_saved_shape(
    leaf: jax.ShapeDtypeStruct,
    saved: tuple[int, ...],
    path: tuple[str, ...],
    num_participants: int | None = None,
    num_saved: int | None = None,
) -> bool:
    """Return whether a leaf has its saved shape, and not another number of participants."""
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
    """Check that a checkpoint has the leaves that an experiment has."""
    if wanted.keys() != saved.keys():
        names = sorted(".".join(path) for path in wanted.keys() ^ saved.keys())
        raise ArgumentError(
            f"The checkpoint of round {step} and the experiment have different states: "
            f"{', '.join(names[:5])} {'and others ' if len(names) > 5 else ''}in only one of "
            "them, expected the same leaves. Use the model and the method that were saved, or "
            "another --job_log_dir: with --training.begin_from, the folder of this run, a new run "
            "starts from its model."
        )


def shapes_of_same_clients(like: Any, saved: SavedLeaves) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the saved shapes, with the experiment's numbers of rows for equal clients' stores."""
    # A row belongs to one client, or is padding, whose number depends on the devices.
    shapes = dict(saved.shapes)
    for path, store in stores_of(like).items():
        for name, leaf in ocp.tree.to_flat_dict({"rows": store.rows}).items():
            rows, *rest = shapes[*path, *name]
            # Without a record, only equal numbers of rows can be of equal clients.
            unit, before = "rows", rows
            now = leaf.shape[0]
            if (known := saved.clients.get(".".join(path))) is not None:
                unit, before, now = "clients", known, store.num_clients
            if before != now:
                raise ArgumentError(
                    f"The checkpoint's {'.'.join(path)} has {before} {unit}, expected {now} for "
                    f"the experiment's {store.num_clients} clients: a row is the state of one "
                    "client. Set the number of clients that was saved, or start a new run from the "
                    "saved model (--training.begin_from), in which all clients begin with a new "
                    "state."
                )
            shapes[*path, *name] = (leaf.shape[0], *rest)
    return shapes
