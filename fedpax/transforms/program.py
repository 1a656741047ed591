"""`program`: a function with declared placements, as one differentiable primitive."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import ClosedJaxpr, trace
from fedpax.primitives.call_rules import define_call
from fedpax.primitives.casts import conversion, device_array, is_host_number
from fedpax.primitives.integer_sums import (
    IntegerSum,
    check_sums,
    collect_sums,
    has_unusual_weights,
    is_eager,
)
from fedpax.primitives.layout import check_placement_divisible, find_mesh
from fedpax.primitives.placement import (
    ActivePlacement,
    ArrayTree,
    ChunkSize,
    Placement,
    activate,
    active_placements,
    check_array,
    declare_placements,
    federated_program_p,
)
from fedpax.primitives.user_functions import (
    StaticArguments,
    argument_names,
    check_not_deleted,
    function_name,
    named_like,
    resolve_static,
    split_static,
)
from fedpax.transforms.placed_closures import levels_to_user, warn_of_placed_closures
from fedpax.transforms.streaming import run_streamed

OPTIONS = ("placements", "chunk_size", "static_argnums", "static_argnames")

# A keyword that contains one of these words names a setting and not a group of participants.
SETTING_WORDS = frozenset(
    "argnames argnums batch chunk cohort epochs num number per population rounds seed size sizes "
    "static steps".split()
)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


class Program(Protocol[Arguments, Result]):
    """A function with declared placements, as `fedpax.program` returns it."""

    __name__: str

    @property
    def __wrapped__(self) -> Callable[Arguments, Result]:
        """The decorated function."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the program."""

    def with_options(self, **options: Any) -> Program[Arguments, Result]:
        """Return the same program with other settings.

        Args:
            **options: keywords of `fedpax.program`. Names of placements set their sizes, or add
                placements.

        Example:
            >>> import jax.numpy as jnp
            >>> import fedpax
            >>> @fedpax.program(clients=2)
            ... def total(x):
            ...     return fedpax.federated_sum(fedpax.federated_map(jnp.square, x))
            >>> total.with_options(clients=3, chunk_size=1)(jnp.array([1.0, 2.0, 3.0])).item()
            14.0
        """


def program(
    unparenthesized: Callable[..., Any] | None = None,
    /,
    *,
    placements: Mapping[str, int] | None = None,
    chunk_size: ChunkSize = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    **sizes: int,
) -> Callable[[Callable[Arguments, Result]], Program[Arguments, Result]]:
    """Declare the participants of a function that calls `federated_*` functions.

    The decorated function takes and returns pytrees of arrays. It can be jitted, differentiated,
    batched, and called in other programs. A mesh axis with the name of a placement shards the
    participants (a similar name, such as `client`, gives a UserWarning).

    Args:
        unparenthesized: not an option; it detects `@fedpax.program` without parentheses.
        placements: more placements, by name, as in `sizes`.
        chunk_size: number of participants that a device runs at once, for all maps of the program
            that do not set their own: a positive int, "auto" (see `federated_map`), or None: all.
        static_argnums: positions of arguments that are Python values and not arrays, as in
            `jax.jit`. Default None: inferred from `static_argnames`.
        static_argnames: names of such arguments. Default None: inferred from `static_argnums`.
        **sizes: number of participants by placement name, for example `clients=1000`.

    Returns:
        A decorator that returns a `Program`. Without `jax.jit` around it, every call traces the
        function again; the compiled code is cached in both cases.

    Raises:
        RuntimeError: at the call: an argument was donated to an earlier call.
        TypeError: a size is not an int, a keyword looks like a misspelt option, or the parentheses
            are missing. At the call: an argument is neither static nor an array or a number.
        ValueError: there is no placement, a size or `chunk_size` is below 1, or a static argument
            is not one of the function's. At the call: an enclosing program declares the same
            placement, the mesh axis does not divide a placement, a static argument is not hashable,
            or JAX cannot hold a value, such as 3e9 in an int64 array without `jax_enable_x64`
            (which `jax.jit` around the program wraps silently).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=2, static_argnames="power")
        ... def loss(w, x, power=2):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** power, x))
        >>> jax.jit(jax.grad(loss))(1.0, jnp.array([2.0, 4.0])).item()
        -4.0
    """
    if unparenthesized is not None:
        raise ArgumentTypeError(
            f"fedpax.program got {unparenthesized!r} instead of placements. Name the participants "
            "in parentheses: @fedpax.program(clients=1000)."
        )
    if not isinstance(placements, Mapping | None):
        raise ArgumentTypeError(
            f"fedpax.program() got placements={placements!r}, expected sizes by name. Pass for "
            "example placements={'clients': 1000}."
        )
    both = set(sizes) & set(placements or {})
    if both:
        raise ArgumentError(
            f"fedpax.program() got {sorted(both)} both in placements= and as keywords, expected "
            "each once. Remove one of them."
        )
    for name, size in sizes.items():
        _check_is_no_option(name, size)
    declared = {**(placements or {}), **sizes}
    entries = declare_placements(declared, chunk_size)

    def decorate(fn: Callable[Arguments, Result]) -> Program[Arguments, Result]:
        if not callable(fn):
            raise ArgumentTypeError(
                f"fedpax.program(...) decorates a function, got {type(fn).__name__}. "
                "Write @fedpax.program(clients=1000) above a def."
            )
        static = resolve_static(fn, static_argnums, static_argnames)

        def run(*args: Any, **kwargs: Any) -> ArrayTree:
            return _call(fn, entries, static, args, kwargs)

        def with_options(**options: Any) -> Program[Arguments, Result]:
            others = {k: v for k, v in options.items() if k not in OPTIONS}
            renewed: dict[str, Any] = {
                "chunk_size": chunk_size,
                "static_argnums": static_argnums,
                "static_argnames": static_argnames,
            }
            renewed |= {k: v for k, v in options.items() if k in OPTIONS}
            given = renewed.get("placements") or {}
            kept = {k: v for k, v in declared.items() if k not in others and k not in given}
            return program(**renewed | {"placements": {**kept, **given}}, **others)(fn)

        decorated: Any = named_like(fn, run)
        decorated.__wrapped__ = fn
        with_options.__doc__ = Program.with_options.__doc__
        decorated.with_options = with_options
        return decorated

    return decorate


def _check_is_no_option(name: str, value: Any) -> None:
    """Raise a TypeError if a keyword that would declare a placement looks like an option."""
    is_size = hasattr(value, "__index__") and not isinstance(value, bool)
    close = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.75 if is_size else 0.6)
    words = SETTING_WORDS.intersection(name.lower().split("_"))
    if not close and not words:
        return
    guess = f"Did you mean {close[0]}={value!r}? " if close else ""
    raise ArgumentTypeError(
        f"fedpax.program() got the unknown option {name}={value!r}, expected one of "
        f"{', '.join(OPTIONS)}. {guess}chunk_size is the number of participants that a device runs "
        f"at once. To declare a placement of this name, pass placements={{{name!r}: ...}}."
    )


def _call(
    fn: Callable[..., Any],
    entries: tuple[ActivePlacement, ...],
    static: StaticArguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    check_means: bool = False,
) -> ArrayTree:
    """Trace a program's function on the types of its arguments, and bind the primitive."""
    name = function_name(fn)
    enclosing = active_placements()
    for entry in enclosing:
        if entry.placement.name in (active.placement.name for active in entries):
            raise ArgumentError(
                f"The program {name!r} declares the placement {entry.placement.name!r}, which an "
                "enclosing program declares too. Rename one of the two."
            )
    names = argument_names(fn, len(args))
    _check_hashable(name, names, static, args, kwargs)
    traced, traced_by_name, merge = split_static(static, args, kwargs)
    names = [n for i, n in enumerate(names) if i not in static.argnums]
    leaves = [
        _check_argument(name, leaf, path, names)
        for path, leaf in jax.tree.leaves_with_path((traced, traced_by_name))
    ]
    structure = jax.tree.structure((traced, traced_by_name))
    out_trees: list[Any] = []
    names_of_sums: list[str] = []  # the sums themselves are tracers, which must not outlive a trace
    eager = is_eager(leaves)

    def run(*traced: ArrayTree, **traced_by_name: ArrayTree) -> list[jax.Array]:
        args, kwargs = merge(*traced, **traced_by_name)
        deeper = (entry._replace(depth=len(enclosing)) for entry in entries)
        with activate((*enclosing, *deeper)), collect_sums(eager, check_means) as sums:
            out = fn(*args, **kwargs)
        names_of_sums[:] = [sum_.where for sum_ in sums]
        outputs, out_tree = jax.tree.flatten_with_path(out)
        out_trees.append(out_tree)
        results = [
            check_array(
                f"program {name}",
                leaf,
                "the result" + jax.tree_util.keystr(path),
                "Return arrays, or None for nothing.",
            )
            for path, leaf in outputs
        ]
        return [*results, *(x for sum_ in sums for x in (sum_.total, sum_.estimate))]

    avals = list(map(jax.typeof, leaves))
    types, types_by_name = jax.tree.unflatten(structure, avals)
    mesh = find_mesh(avals)
    _warn_of_similar_axis(name, mesh, [e.placement for e in (*enclosing, *entries)])
    with jax.sharding.use_abstract_mesh(mesh):
        for entry in entries:
            check_placement_divisible(entry.placement)
        jaxpr, closed_over = trace(named_like(fn, run, static), *types, **types_by_name)
        warn_of_placed_closures(fn, jaxpr, [entry.placement for entry in entries])
        outputs = federated_program_p.bind(
            *closed_over,
            *leaves,
            jaxpr=jaxpr,
            placements=tuple(e.placement for e in entries),
            name=name,
        )
    if names_of_sums:
        count = len(names_of_sums)
        outputs, both = outputs[: -2 * count], outputs[-2 * count :]
        known = list(map(IntegerSum, names_of_sums, both[::2], both[1::2]))
        check_sums(known)
        if has_unusual_weights(known) and not (check_means or jaxpr.effects):
            # Only then, because it takes as long again.
            return _call(fn, entries, static, args, kwargs, check_means=True)
    return jax.tree.unflatten(out_trees[0], outputs)


def _warn_of_similar_axis(
    program: str, mesh: AbstractMesh, placements: Sequence[Placement]
) -> None:
    """Warn if the mesh shards no placement, and an axis has almost the name of one."""
    sizes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    axes = [axis for axis, size, kind in sizes if size > 1 and kind != AxisType.Manual]
    if any(placement.name in mesh.axis_names for placement in placements):
        return
    for name, size in placements:
        if close := difflib.get_close_matches(name, axes, n=1, cutoff=0.75):
            warnings.warn(
                f"program {program}: the mesh has an axis {close[0]!r} and none named {name!r}, so "
                f"each device computes all {size} {name}. Give the axis the placement's name: "
                f"fedpax.make_mesh({name}={mesh.shape[close[0]]}).",
                stacklevel=levels_to_user(),
            )
            return


def _check_hashable(
    function: str,
    names: Sequence[str],
    static: StaticArguments,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    by_position = [(names[i], args[i]) for i in static.argnums if i < len(args)]
    by_name = [(k, v) for k, v in kwargs.items() if k in static.argnames]
    for name, value in (*by_position, *by_name):
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"program {function}: the static argument {name} is of type "
                f"{type(value).__name__}, expected a hashable value. Pass for example a tuple "
                "instead of a list, and pass arrays as arguments that are not static."
            ) from None


def _check_argument(function: str, leaf: Any, path: tuple, names: Sequence[str]) -> Any:
    """Return a leaf of a program's arguments, or raise an error that names it."""
    position, key, *rest = path
    name = names[key.idx] if position.idx == 0 else str(key.key)
    declared = name.partition("[")[0]
    where = f"argument {name}{jax.tree_util.keystr(tuple(rest))}"
    if is_host_number(leaf):
        array = device_array(leaf, f"program {function}: {where}")
        # A Python number stays as it is: converted, it would lose its weak type.
        return array if isinstance(leaf, np.ndarray | np.generic) else leaf
    check_not_deleted(leaf, f"program {function}: {where}")
    try:
        jax.typeof(leaf)
    except TypeError:
        pass
    else:
        if not conversion(leaf):  # strings have a type in JAX
            return leaf
    remedy = (
        f"Declare it static: @fedpax.program(..., static_argnames={declared!r})."
        if not rest and name == declared
        else "Remove it from the pytree, or use it in the function as a closure."
    )
    return check_array(f"program {function}", leaf, where, remedy)


def _implementation(
    *args: Any, jaxpr: ClosedJaxpr, placements: tuple[Placement, ...], name: str
) -> list[jax.Array]:
    with jax.named_scope(name):
        return run_streamed(jaxpr, *args)


def _same(aval: Any, *, placements: tuple[Placement, ...], name: str) -> Any:
    return aval


define_call(
    federated_program_p,
    inner_aval=_same,
    outer_aval=_same,
    batch_dim=0,
    implementation=_implementation,
)
