"""`program`: a function whose participants are declared, as one differentiable primitive."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedpax.primitives._jax import Primitive, evaluate, trace
from fedpax.primitives.call import define_call
from fedpax.primitives.layout import check_divisible, find_mesh
from fedpax.primitives.placement import (
    ChunkSize,
    activate,
    active,
    check_array,
    declare,
)

federated_program_p = Primitive("federated_program")
federated_program_p.multiple_results = True


def program(
    undeclared: Callable[..., Any] | None = None,
    /,
    *,
    placements: Mapping[str, int] | None = None,
    chunk_size: ChunkSize = None,
    **sizes: int,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the participants of a function that calls `federated_*` functions.

    The decorated function takes and returns pytrees of arrays. It can be jitted, differentiated,
    batched and used inside other programs; on a mesh with axes that bear the placements' names, its
    participants are laid out over these.

    Args:
        undeclared: nothing; it catches `@fedpax.program` without parentheses.
        placements: sizes by name, for example `{"clients": n}`; adds to the keywords.
        chunk_size: how many participants a device runs at once, for all maps of the program
            that do not say otherwise: an int, None for all of them, or "auto", which chooses by
            the device and by what one participant holds, as `federated_map` says.
        **sizes: sizes by name, for example `clients=1000`.

    Returns:
        A decorator. Called outside of any trace, what it returns traces the function every time,
        to see what it closes over by now, and compiles what has not been compiled yet; `jax.jit`
        spares the tracing.

    Raises:
        TypeError: a size that is no int, or no parentheses; at the call, an argument that is no
            array and no number.
        ValueError: no placement, a size below 1, `chunk_size` below 1; at the call, a
            placement that a program around this one has declared too, or that the mesh does not
            divide.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=2)
        ... def loss(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))
        >>> jax.jit(jax.grad(loss))(1.0, jnp.array([2.0, 4.0])).item()
        -4.0
    """
    if undeclared is not None:
        raise TypeError(
            f"fedpax.program got {undeclared!r} in the place of placements. Name the participants "
            "in parentheses: @fedpax.program(clients=1000)."
        )
    if not isinstance(placements, Mapping | None):
        raise TypeError(
            f"fedpax.program() got placements={placements!r}, expected sizes by name, such as "
            "placements={'clients': 1000}."
        )
    both = set(sizes) & set(placements or {})
    if both:
        raise ValueError(
            f"fedpax.program() got {sorted(both)} both in placements= and as keywords, expected "
            "each once. Leave one out."
        )
    entries = declare({**(placements or {}), **sizes}, chunk_size)
    names = [e.placement.name for e in entries]

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(fn):
            raise TypeError(
                f"fedpax.program(...) decorates a function, got {type(fn).__name__}. "
                "Write @fedpax.program(clients=1000) above a def."
            )
        name = getattr(fn, "__name__", type(fn).__name__)

        def bind(*args, **kwargs):
            leaves, tree = jax.tree.flatten((args, kwargs))
            out_trees: list[Any] = []

            def flat(*leaves):
                args, kwargs = jax.tree.unflatten(tree, leaves)
                around = active()
                own = (entry._replace(depth=len(around)) for entry in entries)
                with activate((*around, *own)):
                    out = fn(*args, **kwargs)
                outputs, out_tree = jax.tree.flatten_with_path(out)
                out_trees.append(out_tree)
                return [
                    check_array(f"program {name}", leaf, "the result" + jax.tree_util.keystr(path))
                    for path, leaf in outputs
                ]

            avals = [jax.typeof(leaf) for leaf in leaves]
            with jax.sharding.use_abstract_mesh(find_mesh(avals)):
                for entry in entries:
                    check_divisible(entry.placement)
                jaxpr, closed_over = trace(flat, avals)
                outputs = federated_program_p.bind(
                    *closed_over,
                    *leaves,
                    jaxpr=jaxpr,
                    placements=tuple(e.placement for e in entries),
                    name=name,
                )
            return jax.tree.unflatten(out_trees[0], outputs)

        @functools.wraps(fn)
        def wrapped(*args, **kwargs):
            for entry in active():
                if entry.placement.name in names:
                    raise ValueError(
                        f"The program {name!r} declares the placement {entry.placement.name!r}, "
                        "which a program around it has declared already. Rename one of the two."
                    )
            leaves = jax.tree.leaves_with_path((args, kwargs))
            for path, leaf in leaves:
                check_array(f"program {name}", leaf, _argument(path))
            return bind(*args, **kwargs)

        return wrapped

    return decorate


def _argument(path: tuple) -> str:
    """Names an argument as its caller knows it: `args[0]['w']` or `lr`."""
    kind, key, *rest = path
    inside = jax.tree_util.keystr(tuple(rest))
    return (f"args[{key.idx}]" if kind.idx == 0 else str(key.key)) + inside


def _implementation(*args, jaxpr, placements, name):
    with jax.named_scope(name):
        return evaluate(jaxpr, *args)


def _same(aval, *, placements, name):
    return aval


define_call(
    federated_program_p, inner=_same, outer=_same, batch_dim=0, implementation=_implementation
)
