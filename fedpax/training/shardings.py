"""Where an algorithm's state lives, derived from where its parameters live."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.training.algorithm import Params, State


def state_shardings(
    state: State,
    params: Params,
    params_shardings: Any,
    mesh: Mesh,
    *,
    placement: str,
    participants: int,
) -> Any:
    """Gives every leaf of a state the sharding of the parameter that it belongs to.

    A leaf belongs to a parameter if its path in the state ends with the parameter's path and its
    last axes are the parameter's: the server's model, momentum. Axes in front of them are what
    each participant keeps, and the placement's mesh axis shards the first. So it does for any
    other leaf with one entry a participant, such as the islands' counts of steps; the rest is on
    every device. The compiler would infer none of this: the zeros of a fresh optimizer state do
    not depend on the parameters.

    Args:
        state: the state's abstract values, from ``jax.eval_shape``.
        params: the parameters' abstract values.
        params_shardings: a tree of ``NamedSharding`` with the structure of ``params``.
        mesh: the mesh.
        placement: the placement's name, whether or not the mesh has an axis of that name.
        participants: the placement's size.

    Returns:
        A tree of ``NamedSharding`` with the structure of ``state``.

    Raises:
        ValueError: if ``params_shardings`` has another structure than ``params``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> mesh = jax.make_mesh((1, 1), ("clients", "fsdp"), axis_types=(AxisType.Auto,) * 2)
        >>> like = jax.ShapeDtypeStruct
        >>> params = {"w": like((6,), jnp.float32)}
        >>> sharded = {"w": NamedSharding(mesh, PartitionSpec("fsdp"))}
        >>> state = {"momentum": {"w": like((3, 6), jnp.float32)}, "step": like((), jnp.int32)}
        >>> result = state_shardings(
        ...     state, params, sharded, mesh, placement="clients", participants=3)
        >>> tuple(result["momentum"]["w"].spec), tuple(result["step"].spec)
        (('clients', 'fsdp'), ())
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    given: Any = jax.tree.structure(params_shardings)
    if given != structure:
        raise ValueError(
            f"shardings.params has the structure {given}, but the "
            f"parameters have {structure}: give one NamedSharding for each parameter."
        )
    known = [
        (path, leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(params_shardings), strict=True)
    ]
    # The longest path first: "layer.w" must not be taken for "w".
    known.sort(key=lambda entry: -len(entry[0]))
    divides = placement in mesh.shape and participants % mesh.shape[placement] == 0

    def sharding_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        own: tuple[Any, ...] = ()
        front = leaf.shape
        for name, shape, spec in known:
            before = leaf.ndim - len(shape)
            belongs = path[len(path) - len(name) :] == name
            if belongs and before >= 0 and leaf.shape[before:] == shape:
                own, front = tuple(spec), leaf.shape[:before]
                break
        placed = divides and front[:1] == (participants,)
        first = ((placement if placed else None),) + (None,) * (len(front) - 1) if front else ()
        spec = PartitionSpec(*first, *own) if placed or own else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding_of, state)
