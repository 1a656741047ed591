"""The cohort of a round: what its participants train on, as one value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Num

if TYPE_CHECKING:  # chex imports absl.flags
    import chex

MASK = "mask"
"""The field of a dict of batches that tells examples from padding."""


class Cohort(NamedTuple):
    """The participants of one round and their batches; every array has the participants in front.

    Every method takes one: `round(state, cohort)`. Islands, and clients of equal size, need the
    batches alone: `Cohort(batches)`. `fedpax.data.cohort_rounds` fills in all fields.

    Where `batches` is a dict with a field `"mask"`, an example (or token) whose mask is 0 or False
    is padding. A step whose batch is padding alone changes nothing: no parameter, no optimizer
    state, no step count and no metric. A participant without a step has weight 0.

    Attributes:
        batches: a pytree of arrays `[participants, steps, batch, ...]`. `"mask"` in a dict:
            bool or number `[participants, steps, batch, ...]`.
        num_examples: number `[participants]`, the weight of each participant in means. Default
            None: every participant with at least one step has the same weight.
        num_steps: int `[participants]`, how many of a participant's batches it trains on, the first
            ones. Later batches are not computed. Default None: compute every step, and discard
            those that are padding. `jax.grad` through a round with `num_steps` raises, since JAX
            cannot differentiate a loop of variable length backwards; forward mode works.
        client_ids: int `[participants]`, each client's index in its population, -1 where fewer
            clients were available than the cohort has places. Default None: unknown, for methods
            that keep no state of clients.

    Example:
        >>> import numpy as np
        >>> x = np.ones((2, 3, 4, 5), np.float32)  # clients, steps, batch, features
        >>> cohort = Cohort({"x": x}, num_examples=np.array([12, 8]), num_steps=np.array([3, 2]))
        >>> cohort.client_ids is None
        True
    """

    batches: chex.ArrayTree
    num_examples: Num[jax.Array | np.ndarray, " participants"] | None = None
    num_steps: Int[jax.Array | np.ndarray, " participants"] | None = None
    client_ids: Int[jax.Array | np.ndarray, " participants"] | None = None


def check_cohort(method: str, cohort: Any, participants: int) -> None:
    """Check that a round was given a cohort whose arrays fit one another.

    Args:
        method: the method's name, for the message.
        cohort: the second argument of the method's round.
        participants: the size of the method's placement.

    Raises:
        TypeError: `cohort` is no `Cohort`, or `num_steps` or `client_ids` holds no integers.
        ValueError: no batches, a leaf without the axes `[participants, steps]`, leaves with
            different numbers of steps, or a field of another shape than `[participants]`.

    Example:
        >>> check_cohort("fedavg", {"x": np.ones((2, 1))}, 2)
        Traceback (most recent call last):
            ...
        TypeError: fedavg: the second argument of round is a dict, expected a fedpax.Cohort. ...
    """
    if not isinstance(cohort, Cohort):
        raise TypeError(
            f"{method}: the second argument of round is a {type(cohort).__name__}, expected a "
            "fedpax.Cohort. Give fedpax.Cohort(batches), with num_examples= and num_steps= where "
            "clients differ."
        )
    leaves = jax.tree.leaves_with_path(cohort.batches)
    if not leaves:
        raise ValueError(
            f"{method}: cohort.batches has no arrays, expected leaves of shape "
            f"[{participants}, steps, batch, ...]."
        )
    num_steps: dict[int, str] = {}
    for path, leaf in leaves:
        shape = np.shape(leaf)
        name = f"cohort.batches{jax.tree_util.keystr(path)}"
        if len(shape) < 2 or shape[0] != participants:
            raise ValueError(
                f"{method}: {name} has shape {list(shape)}, expected [{participants}, steps, "
                f"batch, ...]: {participants} is the number of participants that {method} was made "
                "for. Stack the participants' batches along the first axis."
            )
        num_steps.setdefault(shape[1], name)
    if len(num_steps) > 1:
        found = " and ".join(f"{name} has {steps}" for steps, name in sorted(num_steps.items()))
        raise ValueError(
            f"{method}: the leaves of cohort.batches have different numbers of steps (axis 1): "
            f"{found}. Pad the shorter ones, and mark the padding in a field {MASK!r}."
        )
    for field in ("num_examples", "num_steps", "client_ids"):
        value = getattr(cohort, field)
        if value is None:
            continue
        if not hasattr(value, "shape") and not isinstance(value, int | float):
            raise TypeError(
                f"{method}: cohort.{field} is a {type(value).__name__}, expected an array "
                f"[{participants}]. Convert it with jnp.asarray."
            )
        if np.shape(value) != (participants,):
            raise ValueError(
                f"{method}: cohort.{field} has shape {list(np.shape(value))}, expected "
                f"[{participants}]: one entry for each participant."
            )
        dtype = jax.numpy.result_type(value)
        if field != "num_examples" and not jax.numpy.issubdtype(dtype, jax.numpy.integer):
            raise TypeError(
                f"{method}: cohort.{field} has dtype {dtype}, expected integers. Cast it with "
                ".astype(int)."
            )
