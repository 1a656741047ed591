"""The server's parts of a plan, and a program's arguments and results, as flat arrays."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.errors import ArgumentTypeError
from fedpax.primitives._jax import ClosedJaxpr, Literal, Var, aval_of
from fedpax.primitives.casts import device_array, is_host_number
from fedpax.primitives.placement import Placement
from fedpax.primitives.user_functions import argument_names, check_not_deleted
from fedpax.transforms.client_stages import ClientStage, Stage
from fedpax.transforms.ownership import Signature
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.streaming_plan import Atom, StreamingPlan


class Part(NamedTuple):
    """A part of the server's work, whose values have numbers."""

    run: Callable[..., list[Any]]  # `(*inputs, *terms of the stage before) -> results`
    types: list[jax.ShapeDtypeStruct]
    inputs: list[int]
    results: list[int]
    # the stage that follows; None at the end, or where participants have nothing to do
    stage: int | None
    shared: list[int]
    rows: list[int]  # numbers of the values of which participants receive their rows
    shown: list[int]


class Wiring(NamedTuple):
    """The server's parts."""

    parts: list[Part]
    arguments: dict[str, int]
    results: dict[str, int]


def output_of(plan: StreamingPlan, values: dict[Var, Any], v: Atom) -> Any:
    """Return a result of a program, given the values that the server has."""
    if isinstance(v, Literal):
        return jnp.asarray(v.val, aval_of(v).dtype)
    axis = plan.axis[v] if plan.is_stored(v) else 0
    return jnp.moveaxis(values[v], 0, axis) if axis else values[v]


def wire(
    plan: StreamingPlan,
    server: ServerParts,
    stages: Sequence[ClientStage],
    constants: Sequence[Any],
    arguments: Sequence[str],
    results: Sequence[str],
) -> Wiring:
    """Make a function of each part of the server, with numbers for its values."""
    fixed = dict(zip(plan.jaxpr.constvars, constants, strict=True))
    outputs = server.outputs[: len(results)]
    numbers: dict[Var, int] = {}
    by_phase = {stage.phase: stage for stage in stages}

    def number(v: Var) -> int:
        return numbers.setdefault(v, len(numbers))

    def make(index: int) -> Part:
        before, stage = by_phase.get(index - 1), by_phase.get(index)
        is_first, is_last = index == 0, index == server.number - 1
        needed = [*server.inputs[index]]
        if is_last:
            computed = server.results[index]
            read = (v for v in outputs if isinstance(v, Var) and v not in computed)
            needed = list(dict.fromkeys([*needed, *read]))
        given = [v for v in needed if not (is_first and v in fixed)]

        def run(*flat: Any) -> list[Any]:
            values = {**(fixed if is_first else {}), **dict(zip(given, flat, strict=False))}
            sent = flat[len(given) :]
            totals = [] if before is None else [sent[i] for i in before.places]
            inputs = [values[v] for v in server.inputs[index]]
            values.update(
                zip(server.results[index], server.run(index, inputs, totals), strict=True)
            )
            whole = [values[v] for v in server.results[index]]
            if is_first:
                whole += [jnp.asarray(x) for x in fixed.values()]
            return whole + ([output_of(plan, values, v) for v in outputs] if is_last else [])

        types = [_type(plan, v) for v in given]
        if before is not None:
            types += [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in before.messages.terms]
        returned = [*server.results[index], *(fixed if is_first else ())]
        part = Part(
            run,
            types,
            [number(v) for v in given],
            [number(v) for v in returned],
            None if stage is None else stage.number,
            [number(v) for v in stage.shared] if stage is not None else [],
            [number(v) for v in stage.rows] if stage is not None else [],
            [number(v) for v in stage.shown] if stage is not None else [],
        )
        return part

    named = dict(zip(arguments, map(number, plan.jaxpr.invars), strict=False))
    parts = [make(index) for index in range(server.number)]
    final = [len(numbers) + i for i in range(len(outputs))]
    parts[-1].results.extend(final)
    read = {number for part in parts for number in (*part.inputs, *part.shared, *part.rows)}
    named = {name: number for name, number in named.items() if number in read}
    return Wiring(parts, named, dict(zip(results, final, strict=True)))


def _type(plan: StreamingPlan, v: Var) -> jax.ShapeDtypeStruct:
    """Return the type of a value as the server holds it: stored values have participants first."""
    aval = aval_of(v)
    axis = plan.axis[v] if plan.is_stored(v) else 0
    shape = [size for i, size in enumerate(aval.shape) if i != axis]
    return jax.ShapeDtypeStruct((*aval.shape[axis : axis + 1], *shape), aval.dtype)


# ---- the arguments and the results of a program, as flat arrays with names and types


class ProgramIO(NamedTuple):
    """The arguments and the results of a program."""

    tree: Any
    names: tuple[str, ...]
    avals: tuple[Any, ...]
    out_tree: Any
    result_names: tuple[str, ...]
    out_avals: tuple[Any, ...]
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
    types = tuple(map(_aval_of_leaf, leaves))
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


def _aval_of_leaf(leaf: Any) -> Any:
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
        places = range(first, first)
        same = False
        if position < len(avals):
            places = range(first, first + len(jax.tree.leaves(avals[position])))
            structure: Any = jax.tree.structure
            same = structure(result) == structure(avals[position])
        first = places.stop
        same = same and kinds == [(types[i].shape, types[i].dtype) for i in places]
        replaced += places if same else [None] * count
    return tuple(replaced)


HEADINGS = {
    "receives": "shared",
    "its row": "rows",
    "has": "own",
    "draws": "noise",
    "sends": "terms",
    "shows": "shown",
    "keeps": "kept",
}
"""The words for what a participant does with a kind of values -> the kind."""


def describe(name: str, placement: Placement, stages: Sequence[Stage]) -> str:
    """Describe each stage: what a participant receives, has, sends and keeps, with bytes."""
    count = len(stages)
    lines = [
        f"{name}: {count} {'stage' if count == 1 else 'stages'} for each of {placement.size} "
        f"{placement.name}"
    ]
    for number, stage in enumerate(stages):
        down = sum(v.nbytes for v in (*stage.shared, *stage.rows))
        up = sum(v.nbytes for v in (*stage.terms, *stage.shown))
        lines.append(f"stage {number}: receives {down:,} B, sends {up:,} B")
        for heading, values in HEADINGS.items():
            lines += [f"  {heading:<8} {v}" for v in getattr(stage, values)]
    return "\n".join(lines)
