"""Shardings of an algorithm's state, derived from the shardings of the parameters."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.algorithm import Params, State
from fedpax.clients.store import ClientStore
from fedpax.errors import ArgumentError
from fedpax.parallel.axes import ShardingTree


def state_shardings(
    state: State,
    params: Params,
    params_shardings: ShardingTree,
    mesh: Mesh,
    *,
    placement: str,
    num_participants: int,
) -> ShardingTree:
    """Derive the shardings of a state from the shardings of the parameters.

    A leaf belongs to a parameter if the leaf's path ends with the parameter's path and the leaf's
    last axes are the parameter's axes: the server's model and momentum, for example. Such a leaf
    keeps the parameter's sharding on these axes. Axes in front of them hold one entry per
    participant, and the first of them is sharded over the placement's mesh axis.

    A leaf may also hold some rows of a parameter, such as the momentum of a fragment of stacked
    layers: its first axis is shorter than the parameter's, which is not sharded. As many vectors
    as participants are such rows if they lie in a tree with rows of stacked matrices.

    The rows of a `ClientStore` are sharded over the placement's mesh axis, as `client_store` makes
    them. A leaf that belongs to no parameter, but whose first axis has one entry per participant
    (such as the islands' step counts), is sharded over the placement's mesh axis. All other leaves
    are replicated.

    The compiler cannot infer these shardings: the zeros of a new optimizer state do not depend on
    the parameters.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    try:
        specs = jax.tree.broadcast(params_shardings, params, is_leaf=_is_sharding)
    except ValueError:
        raise ArgumentError(
            f"shardings.params has the structure {jax.tree.structure(params_shardings)}, expected "
            f"the parameters' structure, {structure}, or one NamedSharding for all. Pass one "
            "NamedSharding for each parameter."
        ) from None
    known = [
        (path, leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(specs), strict=True)
    ]
    # Longest path first: a leaf "layer.w" must match the parameter "layer.w" before "w".
    known.sort(key=lambda entry: -len(entry[0]))
    divides = placement in mesh.shape and num_participants % mesh.shape[placement] == 0

    def parameter_of(path: tuple[Any, ...], leaf: Any) -> tuple[Any, int, PartitionSpec] | None:
        """Return the path before the parameter's, the axes before the parameter's, and its spec."""
        for name, shape, spec in known:
            front, before = path[: len(path) - len(name)], leaf.ndim - len(shape)
            if path[len(front) :] != name or before < 0:
                continue
            own = leaf.shape[before:]
            unsharded = tuple(spec)[:1] in ((), (None,))
            is_rows = len(shape) > 1 and own[1:] == shape[1:] and own[0] < shape[0] and unsharded
            if is_rows and leaf.shape[:1] == own[:1] == (num_participants,) and leaf.ndim == 2:
                is_rows = front in fragments
            if own == shape or is_rows:
                return front, before, spec
        return None

    # Trees that hold rows of stacked matrices hold rows of stacked vectors too.
    fragments: set[tuple[Any, ...]] = set()
    for path, leaf in jax.tree.leaves_with_path(state):
        parameter = parameter_of(path, leaf)
        if parameter and parameter[1] == 0 and leaf.ndim > 2:
            fragments.add(parameter[0])

    def sharding_of(
        path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, *, is_row: bool = False
    ) -> NamedSharding:
        parameter = parameter_of(path, leaf)
        own = tuple(parameter[2]) if parameter else ()
        front = leaf.shape[: parameter[1]] if parameter else leaf.shape
        placed = (is_row and placement in mesh.shape) or (
            divides and front[:1] == (num_participants,)
        )
        first = ((placement if placed else None),) + (None,) * (len(front) - 1) if front else ()
        spec = PartitionSpec(*first, *own) if placed or own else PartitionSpec()
        return NamedSharding(mesh, spec)

    def shardings_of(path: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, ClientStore):
            return sharding_of(path, node)
        return jax.tree_util.tree_map_with_path(
            lambda end, leaf: sharding_of((*path, *end), leaf, is_row=True), node
        )

    return jax.tree_util.tree_map_with_path(
        shardings_of, state, is_leaf=lambda node: isinstance(node, ClientStore)
    )


def _is_sharding(leaf: Any) -> bool:
    return isinstance(leaf, NamedSharding)
