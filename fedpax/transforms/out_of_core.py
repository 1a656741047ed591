"""Out-of-core execution: placed arguments stay on the host, and run on devices in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import ClosedJaxpr, Literal, Var, aval_of, eliminate_dead_code
from fedpax.primitives.casts import device_array, is_host_number, needs_cast
from fedpax.primitives.layout import mesh_axis
from fedpax.primitives.user_functions import argument_names, check_not_deleted
from fedpax.transforms.inlining import inline, placements_of
from fedpax.transforms.planner import make_plan
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.streaming import merge_totals, run_loop, stream
from fedpax.transforms.streaming_plan import Atom

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def out_of_core(
    program: Callable[Arguments, Result], chunk_size: int
) -> Callable[Arguments, Result]:
    """Run a program whose placed arguments do not fit the devices' memory.

    Sums are accumulated chunk by chunk.

    - Placed arguments stay on the host, as NumPy arrays or objects that can be sliced like one.
    - The next chunk is copied while one is computed: at most two are on the devices.
    - Results of shape `[n, ...]` are returned as NumPy arrays.
    - A value that the server computes from all participants at once is on the devices as a whole.
      `fedpax.explain` lists these values.
    - On a mesh, a chunk is sharded over the placement's axis.

    Args:
        program: a function decorated with `fedpax.program` that has maps of one placement at its
            top level; or a function that calls such programs, for example a gradient. Bind static
            arguments first, with `functools.partial`.
        chunk_size: number of participants on all devices together; that of `fedpax.program` is for
            one device.

    Returns:
        A function with the arguments and results of `program`. It cannot be transformed by
        `jax.jit` or `jax.grad`: transform the program, and run the result out of core.

    Raises:
        RuntimeError: at the call, an argument was donated to an earlier call.
        TypeError: at the call, a traced argument, or an array that is not numbers.
        ValueError: `chunk_size` below 1; at the call, a `chunk_size` that the mesh axis does not
            divide, a program without maps, or with maps of several placements, at its top level, or
            a value that JAX cannot hold, such as an int64 beyond int32.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import fedpax
        >>> @fedpax.program(clients=5)
        ... def mean_square(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))
        >>> fedpax.out_of_core(mean_square, chunk_size=2)(1.0, np.arange(5.0)).item()
        3.0
    """
    if chunk_size < 1:
        raise ArgumentError(
            f"out_of_core(): chunk_size is {chunk_size}, expected at least 1. Two chunks are on "
            "the devices at a time: pass at most half the number of participants that fit."
        )

    @functools.lru_cache(maxsize=32)
    def prepare(tree: Any, avals: tuple, mesh: Any) -> tuple[_ChunkedProgram, Any]:
        closed, out_shape = jax.make_jaxpr(
            lambda *leaves: _call(program, tree, leaves), return_shape=True
        )(*avals)
        closed = eliminate_dead_code(inline(closed, stream))
        return _ChunkedProgram(closed, chunk_size), jax.tree.structure(out_shape)

    @functools.wraps(program)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ArgumentTypeError(
                "out_of_core() runs on the host and cannot be traced by jax.jit or jax.grad. "
                "Transform the program instead: out_of_core(jax.grad(program), ...)."
            )
        paths = [path for path, _ in jax.tree.leaves_with_path((args, kwargs))]
        names = argument_names(program, len(args))
        leaves = [_checked(*pair, names) for pair in zip(leaves, paths, strict=True)]
        mesh = jax.sharding.get_abstract_mesh()
        chunked, out_tree = prepare(tree, tuple(map(_aval, leaves)), mesh)
        return jax.tree.unflatten(out_tree, chunked.run(leaves))

    return run


def _call(program: Callable[..., Any], tree: Any, leaves: Sequence[Any]) -> Any:
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return program(*args, **kwargs)


class _CheckedRows:
    """A user's array whose dtype JAX would change: each chunk is checked when it is read."""

    def __init__(self, array: Any, name: str) -> None:
        self._array, self._name = array, name
        self.shape = array.shape
        self.dtype = device_array(np.zeros(0, array.dtype), name).dtype

    def __getitem__(self, rows: Any) -> np.ndarray:
        return device_array(self._array[rows], self._name)


def _checked(leaf: Any, path: Any, names: Sequence[str]) -> Any:
    """Return a leaf of the arguments such that JAX cannot change its values without an error."""
    in_kwargs, key, *rest = path
    argument = str(key.key) if in_kwargs.idx else names[key.idx]
    name = f"out_of_core(): argument {argument}{jax.tree_util.keystr(tuple(rest))}"
    check_not_deleted(leaf, name)
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "shape"):
        if is_host_number(leaf):
            device_array(leaf, name)
        return leaf
    return _CheckedRows(leaf, name) if needs_cast(np.zeros(0, leaf.dtype)) else leaf


def _whole(value: Any) -> Any:
    return value[...] if hasattr(value, "shape") and not isinstance(value, jax.Array) else value


def _aval(leaf: Any) -> Any:
    """Return the type that a leaf has once it is on the devices."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "shape"):
        return jax.typeof(leaf)
    return jax.core.ShapedArray(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


class _ChunkedProgram:
    """The compiled parts of a program, for arguments of given types, each compiled on first use."""

    def __init__(self, closed: ClosedJaxpr, chunk_size: int) -> None:
        placements = placements_of(closed.jaxpr)
        if len(placements) != 1:
            raise ArgumentError(
                "out_of_core() needs a program with maps of one placement at its top level, but "
                f"this one has {' and '.join(map(str, placements)) or 'none'}. Pass the program "
                "itself, or a single round if it runs many in a loop."
            )
        self.closed = closed
        self.plan = make_plan(closed.jaxpr, placements[0])
        self.chunk_size = min(chunk_size, placements[0].size)
        self.axis = mesh_axis(placements[0])
        if self.axis is not None:
            devices = jax.sharding.get_abstract_mesh().shape[self.axis]
            if rest := self.chunk_size % devices:
                below = self.chunk_size - rest
                raise ArgumentError(
                    f"out_of_core(): chunk_size is {self.chunk_size}, expected a multiple of "
                    f"{devices}, the size of the mesh axis {self.axis!r}. Pass "
                    f"{f'{below} or ' if below else ''}{below + devices}."
                )
        self.server = ServerParts(self.plan)
        self.parts = [
            jax.jit(functools.partial(self.server.run, part)) for part in range(self.server.number)
        ]
        self.loop = jax.jit(self._loop, static_argnums=(0, 1))
        self.merge = jax.jit(
            functools.partial(merge_totals, self.plan), static_argnums=0, donate_argnums=1
        )

    def run(self, leaves: Sequence[Any]) -> list:
        jaxpr = self.closed.jaxpr
        values = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        values.update(zip(jaxpr.invars, leaves, strict=True))
        totals: list = []
        for part, compiled in enumerate(self.parts):
            results = compiled([_whole(values[v]) for v in self.server.inputs[part]], totals)
            values.update(zip(self.server.results[part], results, strict=True))
            totals = []
            if part in self.plan.loops:
                stored, totals = self._run_chunks(part, values)
                values.update(stored)
        return [self._output(values, v) for v in self.server.outputs]

    def _output(self, values: dict[Var, Any], v: Atom) -> Any:
        if isinstance(v, Literal):
            return jnp.asarray(v.val, aval_of(v).dtype)
        axis = self.plan.axis[v] if self.plan.is_stored(v) else 0
        value = _whole(values[v])
        return np.moveaxis(value, 0, axis) if axis else value

    def _run_chunks(self, phase: int, values: dict[Var, Any]) -> tuple[dict[Var, Any], list]:
        """Run the loop of a phase; return the stored values on the host, and the totals."""
        shared, placed = self.plan.loop_inputs(phase)
        servers = [_whole(values[v]) for v in shared]
        host_arrays = [_to_host(values[v]) for v in placed]
        size = self.plan.placement.size
        merged: list = []
        stored: list[list] = []
        previous: Any = None
        for start in range(0, size, self.chunk_size):
            stop = min(size, start + self.chunk_size)
            slices = [self._to_devices(a[start:stop]) for a in host_arrays]
            rows, totals = self.loop(phase, stop - start, start, servers, slices)
            merged = self.merge(phase, merged, totals) if start else totals
            # Wait for the previous chunk, so that no third chunk is copied to the devices.
            if previous is not None:
                stored.append([_to_host(x) for x in previous[0]])
                jax.block_until_ready(previous)
            previous = rows, totals if start else [jnp.copy(t) for t in totals]
        stored.append([_to_host(x) for x in previous[0]])
        columns = zip(*stored, strict=True)
        return dict(zip(self.plan.stored[phase], map(_concatenate, columns), strict=True)), merged

    def _to_devices(self, chunk: Any) -> jax.Array:
        if self.axis is None:
            return jax.device_put(chunk)
        return jax.device_put(chunk, NamedSharding(jax.sharding.get_mesh(), P(self.axis)))

    def _loop(
        self, phase: int, size: int, first: Any, servers: Sequence[Any], slices: Sequence[Any]
    ) -> tuple[list, list]:
        shared, placed = self.plan.loop_inputs(phase)
        # Two tables, because the same value can be read as a server value and as a placed value.
        server_values = dict(zip(shared, servers, strict=True))
        placed_values = dict(zip(placed, slices, strict=True))
        placement = self.plan.placement._replace(size=size)
        stored, totals = run_loop(
            self.plan, phase, server_values.__getitem__, placed_values.__getitem__, placement, first
        )
        return list(stored.values()), totals


def _to_host(value: Any) -> Any:
    """Return a value that can be sliced without the devices; random keys stay JAX arrays."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return np.asarray(value) if isinstance(value, jax.Array) else value


def _concatenate(chunks: Sequence[Any]) -> Any:
    if isinstance(chunks[0], np.ndarray):
        return np.concatenate(chunks)
    return jnp.concatenate(chunks)
