"""Participants' states for another number of participants: averaged, or copied."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float

from fedpax.algorithm import State
from fedpax.console import count_of
from fedpax.errors import ArgumentError

ParticipantRule: TypeAlias = Literal["average", "copy"]
"""The rule that makes participants' states from the states of another number of participants."""

FIXED = "fixed_participants"
"""The property of a state that returns why its number of participants cannot change."""


def participant_weights(
    num_saved: int, num_participants: int, rule: ParticipantRule = "average"
) -> Float[np.ndarray, "participants saved"]:
    """Return the weight of each saved participant in the state of each new one.

    With n saved and m new participants, counted from 0, the weights of "average" are

        W_ij = m |[i / m, (i + 1) / m) intersected with [j / n, (j + 1) / n)|.

    Both divide the interval from 0 to 1 into equal parts, and a new participant averages the saved
    ones that its part overlaps. 4 -> 2 averages neighbors, 2 -> 4 copies each state to two, and
    4 -> 3 mixes 3 : 1, 2 : 2 and 1 : 3. Rows sum to 1 and columns to m / n, so the mean over
    participants is kept, both of the models and of the updates that error feedback has not sent
    yet.

    "copy" gives new participant i the state of saved participant i mod n. With m < n, the states of
    the last n - m participants are dropped, and the mean changes.

    Example:
        >>> participant_weights(4, 3).tolist()
        [[0.75, 0.25, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.25, 0.75]]
        >>> participant_weights(2, 3, "copy").tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
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
    """Make a placed array for another number of participants.

    Floating-point values are averaged in float32 or wider by `participant_weights`; a state that is
    only copied keeps its bits. Other values come from the saved participant of the largest weight,
    and random keys from it are folded with the new participant's index.
    """
    if saved.shape == like.shape:
        return saved
    weights = participant_weights(saved.shape[0], like.shape[0], rule)
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


def saved_placed_struct(leaf: jax.ShapeDtypeStruct, num_saved: int) -> jax.ShapeDtypeStruct:
    """Return a placed leaf's abstract value with another number of participants."""
    # Participants stay sharded over the placement's mesh axis if the axis divides their number, so
    # that a device reads only its share; otherwise each device reads all participants.
    sharding: Any = leaf.sharding
    axis = tuple(sharding.spec)[:1]
    first = axis[0] if axis and axis[0] is not None else None
    if first is not None and num_saved % _axis_size(sharding, first):
        first = None
    spec = PartitionSpec(first, *sharding.spec[1:])
    sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct((num_saved, *leaf.shape[1:]), leaf.dtype, sharding=sharding)


def _axis_size(sharding: NamedSharding, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else (axes,)
    return int(np.prod([sharding.mesh.shape[name] for name in names]))


def check_resizable(state: State, num_saved: int, num_participants: int) -> None:
    """Check that a method allows another number of participants."""
    for reason in _reasons(state):
        raise ArgumentError(
            f"The checkpoint was saved with {count_of(num_saved, 'participant')} and the "
            f"experiment has {num_participants}, expected the same number: {reason}. Set the "
            "former number, or start a new run from the exported model (`fedpax export`, "
            "--model.weights)."
        )


def _reasons(state: State) -> Iterator[str]:
    """Yield the reason of each part of a state that fixes the number of participants."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, FIXED))
    return (getattr(node, FIXED) for node in nodes if hasattr(node, FIXED))
