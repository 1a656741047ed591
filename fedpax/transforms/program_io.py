"""The arguments and the results of a program, as flat arrays with names and types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from fedpax.errors import ArgumentTypeError
from fedpax.primitives._jax import ClosedJaxpr
from fedpax.primitives.argument_checks import argument_names, check_not_deleted
from fedpax.primitives.casts import device_array, is_host_number
from fedpax.transforms.ownership import Signature


class ProgramIO(NamedTuple):
    """The arguments and the results of a program."""

    tree: Any  # structure of the arguments
    names: tuple[str, ...]  # name of each argument
    avals: tuple[Any, ...]  # type of each argument
    out_tree: Any  # structure of the results
    result_names: tuple[str, ...]  # name of each result
    out_avals: tuple[Any, ...]  # type of each result
    # for each result, the position of the argument that it replaces, or None
    replaced: tuple[int | None, ...]

    def leaves(self, args: Sequence[Any], needed: Iterable[int]) -> list[Any]:
        """Return the flat arguments of a call; those that are needed are checked."""
        leaves, tree = jax.tree.flatten(tuple(args))
        if tree != self.tree:
            raise ArgumentTypeError(
                f"The arguments have the structure {tree}, expected {self.tree}, as in the call of "
                "fedpax.stages(). Call fedpax.stages() again for other arguments."
            )
        for i in needed:
            leaf, aval, name = leaves[i], self.avals[i], self.names[i]
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ArgumentTypeError(
                    f"{name} is a type, expected an array {aval.str_short()}: the server reads it. "
                    "Pass its value; types will do only for what participants own."
                )
            check_not_deleted(leaf, name)
            leaf = device_array(leaf, name) if is_host_number(leaf) else leaf
            if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
                raise ArgumentTypeError(
                    f"{name} is {leaf.dtype}{list(leaf.shape)}, expected {aval.dtype}"
                    f"{list(aval.shape)}, as in the call of fedpax.stages(). Call fedpax.stages() "
                    "again for other arguments."
                )
            leaves[i] = leaf
        return leaves


def trace_program(
    program: Callable[..., Any], avals: Sequence[Any]
) -> tuple[ClosedJaxpr, ProgramIO, Signature]:
    """Trace a program; return its jaxpr, inputs and outputs, and what its results replace."""
    leaves, tree = jax.tree.flatten(tuple(avals))
    types = tuple(map(_type, leaves))
    closed, out_shape = jax.make_jaxpr(
        lambda *leaves: program(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*types)
    paths = [path for path, _ in jax.tree.leaves_with_path(tuple(avals))]
    positions = argument_names(program, len(avals))
    names = tuple(positions[key.idx] + jax.tree_util.keystr(tuple(rest)) for key, *rest in paths)
    out_avals = tuple(closed.out_avals)
    results = tuple(
        f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(out_shape)
    )
    replaced = _replaced(avals, types, out_shape, out_avals)
    out_tree: Any = jax.tree.structure(out_shape)
    io = ProgramIO(tree, names, types, out_tree, results, out_avals, replaced)
    return closed, io, Signature(names, replaced)


def _type(leaf: Any) -> Any:
    """Return the type that an argument has on the devices."""
    if isinstance(leaf, jax.Array | int | float | complex):
        return jax.typeof(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys
        return jax.core.ShapedArray(leaf.shape, leaf.dtype)
    return jax.core.ShapedArray(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _replaced(
    avals: Sequence[Any], types: Sequence[Any], out: Any, out_types: Sequence[Any]
) -> tuple[int | None, ...]:
    """Return, for each result, the position of the argument whose place it takes, or None."""
    results = list(out) if type(out) in (tuple, list) else [out]
    replaced: list[int | None] = []
    first = 0
    for position, result in enumerate(results):
        count = len(jax.tree.leaves(result))
        kinds = [(a.shape, a.dtype) for a in out_types[len(replaced) : len(replaced) + count]]
        own = range(first, first)
        same = False
        if position < len(avals):
            own = range(first, first + len(jax.tree.leaves(avals[position])))
            structure: Any = jax.tree.structure
            same = structure(result) == structure(avals[position])
        first = own.stop
        same = same and kinds == [(types[i].shape, types[i].dtype) for i in own]
        replaced += own if same else [None] * count
    return tuple(replaced)
