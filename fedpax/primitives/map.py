"""`federated_map`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, overload

import jax

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import Primitive, evaluate, name_results, trace
from fedpax.primitives.broadcast import broadcast_closure
from fedpax.primitives.call_rules import define_call
from fedpax.primitives.client_rows import materialize
from fedpax.primitives.layout import (
    check_placement_divisible,
    placed_aval,
    shard_over_placement,
    unplaced_aval,
)
from fedpax.primitives.participant_loop import run_participants
from fedpax.primitives.placement import (
    ArrayTree,
    ChunkSize,
    Placement,
    Tree,
    check_array,
    check_chunk_size,
    check_placed,
    enter_participant,
    resolve_placement,
)
from fedpax.primitives.user_functions import function_name, named_like

federated_map_p = Primitive("federated_map")
"""The primitive of `federated_map`."""
federated_map_p.multiple_results = True


@overload
def federated_map(
    fn: Callable[..., jax.typing.ArrayLike],
    *args: ArrayTree,
    placement: str | None = None,
    chunk_size: ChunkSize = None,
) -> jax.Array: ...
@overload
def federated_map(
    fn: Callable[..., Tree],
    *args: ArrayTree,
    placement: str | None = None,
    chunk_size: ChunkSize = None,
) -> Tree: ...
def federated_map(
    fn: Callable[..., ArrayTree],
    *args: ArrayTree,
    placement: str | None = None,
    chunk_size: ChunkSize = None,
) -> ArrayTree:
    """Run a function on every participant: `out[i] = fn(*[a[i] for a in args])`.

    Server values that `fn` closes over are broadcast to the participants. If `fn` closes over a
    placed value, every participant reads the values of all: a `PlacedClosureWarning` then names it,
    once per program. Pass `federated_broadcast(value)` if this is intended.

    Args:
        fn: takes one participant's slices and returns a pytree of arrays or numbers. If `fn` is
            under `jax.checkpoint`, its results are recomputed where a derivative or a later phase
            needs them, and not stored for every participant.
        *args: placed pytrees of arrays `[n, ...]` of any dtype; may be empty.
        placement: name of the placement. Default None: the only placement of the program.
        chunk_size: number of participants that a device runs at once.

            - None, the default: the program's setting, or else all participants.
            - A positive int. 1 runs `fn` unbatched, so that its conditionals and loops stay as
              they are.
            - "auto" on CPU: 1, because a core gains nothing from a batch of participants.
            - "auto" on GPU and TPU: the number of participants whose live values fit in a sixteenth
              of the chip's memory, or in 1 GiB if that is more or the chip is not in
              `fedpax.planning.CHIPS`; at least 1.

    Returns:
        The result of `fn`, with an axis of size `n` in front of every leaf.

    Raises:
        RuntimeError: called outside a program.
        TypeError: a leaf of an argument or of a result is not an array or a number.
        ValueError: a leaf lacks the placement's axis, the placement is unknown, the program has
            several placements and `placement` is None, the mesh axis does not divide the
            placement, or `chunk_size` is below 1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=2)
        ... def step(w, x):
        ...     return fedpax.federated_map(lambda x: jax.grad(lambda w: (w * x) ** 2)(w), x)
        >>> step(1.0, jnp.array([1.0, 3.0])).tolist()
        [2.0, 18.0]
    """
    active = resolve_placement("federated_map", placement)
    target = active.placement
    check_chunk_size(chunk_size)
    check_placement_divisible(target)
    if not callable(fn):
        raise ArgumentTypeError(
            f"federated_map(): fn is of type {type(fn).__name__}, expected a function of one "
            "participant's values. Pass the function first, then the placed values."
        )
    leaves: list[jax.Array] = []
    for i, arg in enumerate(args):
        leaves += check_placed("federated_map", arg, target, f"args[{i}]")
    leaves = [shard_over_placement(leaf, target) for leaf in leaves]
    slices = [unplaced_aval(jax.typeof(leaf)) for leaf in leaves]
    out_trees: list[Any] = []
    out_names: list[list[str]] = []

    def on_participant(*args: ArrayTree) -> list[jax.Array]:
        with enter_participant(target.name), _explain_axes(function_name(fn)):
            out = fn(*args)
        outputs, out_tree = jax.tree.flatten_with_path(out)
        out_trees.append(out_tree)
        out_names.append([function_name(fn) + jax.tree_util.keystr(path) for path, _ in outputs])
        return [
            check_array(
                "federated_map()",
                leaf,
                f"out{jax.tree_util.keystr(path)}, returned by {function_name(fn)}(),",
                "Return arrays, or None for nothing.",
            )
            for path, leaf in outputs
        ]

    types = jax.tree.unflatten(jax.tree.structure(args), slices)
    jaxpr, closed_over = trace(named_like(fn, on_participant), *types)
    jaxpr = name_results(jaxpr, out_names[0])
    outputs = federated_map_p.bind(
        *[broadcast_closure(c, target) for c in closed_over],
        *leaves,
        jaxpr=jaxpr,
        placement=target,
        chunk_size=active.chunk_size if chunk_size is None else chunk_size,
    )
    return jax.tree.unflatten(out_trees[0], outputs)


@contextlib.contextmanager
def _explain_axes(name: str) -> Iterator[None]:
    """Name the remedy for a collective over participants; JAX names another one."""
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        axis = str(error).partition(". ")[0]
        raise ArgumentError(
            f"federated_map(): {name}() has a collective, as of BatchNorm(axis_name=...): {axis}. "
            "Expected values of one participant alone. Leave axis_name out, or return the value, "
            "and reduce it by federated_mean behind the map."
        ) from error


def _implementation(*args, jaxpr, placement, chunk_size):
    def participant_fn(index, server_values, slices):
        return evaluate(jaxpr, *map(materialize, slices))

    return run_participants(participant_fn, (), args, (), placement, chunk_size)


def _inner_aval(aval, *, placement: Placement, chunk_size):
    return unplaced_aval(aval)


def _outer_aval(aval, *, placement: Placement, chunk_size):
    return placed_aval(aval, placement)


define_call(
    federated_map_p,
    inner_aval=_inner_aval,
    outer_aval=_outer_aval,
    batch_dim=1,
    implementation=_implementation,
)
