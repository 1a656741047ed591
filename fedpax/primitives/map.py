"""`federated_map`: a function, run by every participant on its own values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import Primitive, evaluate, trace
from fedpax.primitives.broadcast import broadcast
from fedpax.primitives.call import define_call
from fedpax.primitives.layout import (
    check_divisible,
    placed_aval,
    shard_over_placement,
    unplaced_aval,
)
from fedpax.primitives.participant_loop import materialize, run_participants
from fedpax.primitives.placement import (
    ChunkSize,
    Placement,
    check_chunk_size,
    check_placed,
    enter,
    resolve_placement,
)

federated_map_p = Primitive("federated_map")
federated_map_p.multiple_results = True


def federated_map(
    fn: Callable[..., Any],
    *args: Any,
    placement: str | None = None,
    chunk_size: ChunkSize = None,
) -> Any:
    """Runs a function on every participant: `out[i] = fn(*[a[i] for a in args])`.

    Server values that `fn` closes over are broadcast to the participants. Inside `fn` the model
    axes of a mesh are as outside; participants cannot see each other.

    Args:
        fn: takes one participant's slices, returns a pytree of arrays or numbers. Under
            `jax.checkpoint` it is run again where its results are wanted later, in a derivative or
            behind a reduction, instead of keeping them for every participant.
        *args: pytrees of arrays `[n, ...]`, placed; any dtype. May be none at all.
        placement: the placement's name; needed where the program has several.
        chunk_size: how many participants a device runs at once. A smaller number needs less
            memory; 1 runs `fn` unbatched, so that its conditionals and loops stay what they are.
            "auto" is 1 on CPU, where a core gains nothing from a batch of clients. On GPU and TPU
            it is as many as hold 1 GiB between them, by what `fn` keeps alive at once according to
            its jaxpr (a model's parameters, gradients and activations): work enough for a device,
            and little of its memory; at least 1, and made smaller until the chunks are of about
            one size. None takes the program's setting.

    Returns:
        What `fn` returns, with an axis of size `n` in front of every leaf.

    Raises:
        RuntimeError: outside of a program.
        TypeError: an argument's leaf, or a result of `fn`, that is no array and no number.
        ValueError: a leaf without the placement's axis, an unknown placement, none named where
            there are several, a placement that the mesh does not divide, or `chunk_size` < 1.

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
    check_divisible(target)
    if not callable(fn):
        raise TypeError(
            f"federated_map(): fn is of type {type(fn).__name__}, expected a function of one "
            "participant's values. Pass the function first, then the placed values."
        )
    tree: Any = jax.tree.structure(args)
    leaves = []
    for i, arg in enumerate(args):
        leaves += check_placed("federated_map", arg, target, f"args[{i}]")
    leaves = [shard_over_placement(leaf, target) for leaf in leaves]
    out_trees: list[Any] = []

    def flat(*slices):
        with enter(target.name):
            out = fn(*jax.tree.unflatten(tree, slices))
        outputs, out_tree = jax.tree.flatten_with_path(out)
        out_trees.append(out_tree)
        return [_check_output(leaf, path) for path, leaf in outputs]

    jaxpr, closed_over = trace(flat, [unplaced_aval(jax.typeof(leaf)) for leaf in leaves])
    outputs = federated_map_p.bind(
        *[broadcast(c, target) for c in closed_over],
        *leaves,
        jaxpr=jaxpr,
        placement=target,
        chunk_size=active.chunk_size if chunk_size is None else chunk_size,
    )
    return jax.tree.unflatten(out_trees[0], outputs)


def _check_output(leaf: Any, path: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf
    except TypeError:
        raise TypeError(
            f"federated_map(): fn returned {type(leaf).__name__} at out{jax.tree_util.keystr(path)}"
            ", expected arrays or numbers. Return arrays, or None for nothing."
        ) from None


def _implementation(*args, jaxpr, placement, chunk_size):
    def one(number, shared, slices):
        return evaluate(jaxpr, *map(materialize, slices))

    return run_participants(one, (), args, (), placement, chunk_size)


def _inner(aval, *, placement: Placement, chunk_size):
    return unplaced_aval(aval)


def _outer(aval, *, placement: Placement, chunk_size):
    return placed_aval(aval, placement)


define_call(
    federated_map_p, inner=_inner, outer=_outer, batch_dim=1, implementation=_implementation
)
