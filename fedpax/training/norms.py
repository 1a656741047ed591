"""Norms of updates, and tests for numbers that are not finite, as parts of a compiled round."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpax.algorithm import Metrics, Params, State
from fedpax.parallel.compiler_options import run_once_options


def report_update_norm(
    round: Callable[..., tuple[State, Metrics]],
) -> Callable[..., tuple[State, Metrics]]:
    """Add `"update_norm"` to a round's metrics: the norm of the change of the server's model.

    A state whose `params` is not a field, but computed from its fields, gets no norm: computing it
    can need communication.

    Example:
        >>> from typing import NamedTuple
        >>> class State(NamedTuple):
        ...     params: jax.Array
        >>> round = report_update_norm(lambda state, x: (State(state.params - x), {"loss": x[0]}))
        >>> round(State(jnp.ones(2)), jnp.array([3.0, 4.0]))[1]["update_norm"].item()
        5.0
    """

    def reporting(state: State, cohort: Any, *frozen: Any) -> tuple[State, Metrics]:
        after, metrics = round(state, cohort, *frozen)
        if has_params_field(state):
            metrics = metrics | {"update_norm": update_norm(state.params, after.params)}
        return after, metrics

    return reporting


def update_norm(before: Params, after: Params) -> Float[Array, ""]:
    """Return the Euclidean norm of the change of all parameters, in float32."""
    squares = [
        jnp.sum(jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    return jnp.sqrt(jnp.sum(jnp.array(squares)))


def turned_non_finite(before: State, after: State) -> Bool[Array, ""]:
    """Return whether a number of a state was finite before a round and is not after it.

    An infinity that a method keeps in its state, such as the smallest loss so far, is allowed.

    Example:
        >>> before = {"params": jnp.zeros(2), "least": jnp.inf}
        >>> bool(turned_non_finite(before, before | {"params": jnp.ones(2)}))
        False
        >>> bool(turned_non_finite(before, before | {"params": jnp.array([1.0, jnp.nan])}))
        True
    """
    turned = [
        jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if _is_inexact(new)
    ]
    return jnp.any(jnp.array(turned, bool))


class FiniteCheck:
    """A check of a run's states for numbers that are not finite.

    A leaf that was finite at the start of the run must stay finite. The model must be finite even
    if it was not: a run can begin from a damaged one.
    """

    def __init__(self, state: State) -> None:
        on_host = jax.default_backend() == "cpu" and jax.process_count() == 1
        self._finite_leaves: Callable[[State], Any] = (
            _finite_leaves_on_host
            if on_host and has_params_field(state)
            else jax.jit(_finite_leaves, compiler_options=run_once_options(jax.default_backend()))
        )
        self._at_start = self._finite_leaves(state)  # on the devices: nothing waits for it

    def find(self, state: State) -> str | None:
        """Return the path of the first leaf that must be finite and is not, or None."""
        finite, at_start = jax.device_get((self._finite_leaves(state), self._at_start))
        for path, is_finite in finite.items():
            if not is_finite and (at_start[path] or path.startswith(".params")):
                return path
        return None


def _real_leaves(state: State) -> dict[str, Array]:
    """Return by path the leaves of a real dtype, and the leaves of the model."""
    leaves = _by_path("", state)
    if not has_params_field(state):
        leaves |= _by_path(".params", state.params)
    return {path: leaf for path, leaf in leaves.items() if _is_inexact(leaf)}


def _finite_leaves(state: State) -> dict[str, Bool[Array, ""]]:
    """Return for each real leaf whether it is finite."""
    return {path: jnp.all(jnp.isfinite(x)) for path, x in _real_leaves(state).items()}


def _finite_leaves_on_host(state: State) -> dict[str, bool]:
    """Return the same for arrays in the host's memory, which need no program to be compiled."""
    return {path: _is_finite(leaf) for path, leaf in _real_leaves(state).items()}


def _is_finite(leaf: Array) -> bool:
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    arrays = [np.asarray(shard.data) for shard in shards if shard.replica_id == 0]
    pieces = (
        array[begin : begin + 2**20]
        for array in (array.reshape(-1) for array in arrays or [np.asarray(leaf)])
        for begin in range(0, array.size, 2**20)
    )
    return all(bool(np.isfinite(piece).all()) for piece in pieces)


def _by_path(prefix: str, tree: chex.ArrayTree) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def has_params_field(state: State) -> bool:
    """Return whether a state stores its model, and does not compute it from its fields."""
    return "params" in getattr(state, "_fields", ("params",))
