"""Mark the values that a participant sends or that the server computes, for `fedpax.cost`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fedpax.transforms.marks import SENT, SERVER


def mark_sent(values: chex.ArrayTree, *, instead_of: chex.ArrayTree) -> chex.ArrayTree:
    """Mark values that a participant sends instead of its update. Inside a mapped function.

    `fedpax.cost` counts their bytes as the compressed size of the update.

    Args:
        values: a pytree of arrays, such as packed codes and their scale.
        instead_of: the update that they replace, a pytree of arrays; only its size is read.

    Example:
        >>> import jax.numpy as jnp
        >>> mark_sent(jnp.array([1, 2], jnp.uint8), instead_of=jnp.ones(16)).tolist()
        [1, 2]
    """
    replaced = [jnp.size(x) * jnp.result_type(x).itemsize for x in jax.tree.leaves(instead_of)]
    leaves, tree = jax.tree.flatten(values)
    if str(jax.tree.structure(instead_of)) != str(tree):
        replaced = [sum(replaced), *[0] * (len(leaves) - 1)]  # the first value counts for all
    marked = [checkpoint_name(x, f"{SENT} {n}") for x, n in zip(leaves, replaced, strict=True)]
    return jax.tree.unflatten(tree, marked)


def mark_server(values: chex.ArrayTree) -> chex.ArrayTree:
    """Mark values as computed by the server. Inside a mapped function."""
    # A server shares much work, such as the recovery of masks, among the participants' devices by a
    # map. `fedpax.cost` counts the FLOPs of this map as the server's, and no bytes.
    return jax.tree.map(lambda x: checkpoint_name(x, SERVER), values)


# ---- let a method compute while the two transfers of an aggregator are under way

TransferWork: TypeAlias = Callable[[chex.ArrayTree, float], chex.ArrayTree]

_work: contextvars.ContextVar[TransferWork | None] = contextvars.ContextVar("work", default=None)


@contextlib.contextmanager
def under_transfers(work: TransferWork) -> Iterator[None]:
    """Do a method's work under the transfers of the aggregators in this context."""
    # With a single transfer, the method does its work after `aggregate`.
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def work_under_transfer(received: chex.ArrayTree, *, fraction: float) -> chex.ArrayTree:
    """Do the work of `under_transfers`, if there is any, up to a fraction."""
    work = _work.get()
    return received if work is None else work(received, fraction)


# ---- count what a round tells of each participant

# The cache of `jax.jit` depends on a user context.
_releases = jax.make_user_context(1)


def several_releases(number: int) -> contextlib.AbstractContextManager[None]:
    """Count each aggregate as one of several releases of a round, such as one for each fragment."""
    return _releases(_releases.value * number)


def releases_per_round() -> int:
    """Return the number of times that a round tells something of each participant's update."""
    return int(_releases.value)
