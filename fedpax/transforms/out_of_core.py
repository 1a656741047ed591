"""Programs whose participants do not fit the devices: they run in pieces, from the host's memory.

A program's phases (`fedpax.transforms.phases`) say what the server computes and what one loop over
the participants does. Here the server's part of a phase is compiled once and the loop once for a
piece of the participants; the totals of the pieces are combined as those of devices are.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import ClosedJaxpr, Literal, Var, eliminate_dead_code
from fedpax.primitives.layout import mesh_axis
from fedpax.transforms.phases import Atom, plan_phases
from fedpax.transforms.streaming import (
    finish_reductions,
    inline,
    merge_totals,
    placements_of,
    run_loop,
    run_server,
    whole_value,
)


def out_of_core(program: Callable[..., Any], participants: int) -> Callable[..., Any]:
    """Runs a program on so many of its participants at a time, with the result of all at once.

    Placed arguments stay on the host, as NumPy arrays or whatever can be sliced like them (a memory
    map of a file): a piece of them is copied to the devices while the piece before it is computed,
    and no more than two pieces are there at a time. What the program returns of each participant
    comes back as NumPy arrays. The arithmetic is the program's, sums are added up piece by piece.
    What the server itself reads of all participants at once, as to sort them, is on the devices as
    a whole all the same; `fedpax.explain` names it.

    Each part is compiled once for each set of shapes. On a mesh a piece is laid out over the
    placement's axis.

    Args:
        program: a function decorated with `fedpax.program`, with one placement at its top level,
            or a function that calls such programs, as the gradient of one does.
        participants: how many of them run at a time; the last piece takes the rest.

    Returns:
        A function of the same arguments and results. It cannot be traced: not jitted, not
        differentiated (differentiate the program, and run its derivative in pieces).

    Raises:
        ValueError: `participants` is below 1; at the call, the mesh's axis does not divide it, or
            there is not one placement whose maps stand at a program's top level.
        TypeError: at the call, a traced argument.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import fedpax
        >>> @fedpax.program(clients=5)
        ... def mean_square(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: (w - x) ** 2, x))
        >>> fedpax.out_of_core(mean_square, 2)(1.0, np.arange(5.0)).item()
        3.0
    """
    if participants < 1:
        raise ValueError(
            f"out_of_core(): participants is {participants}, expected at least 1. Take as many as "
            "fit the devices."
        )

    @functools.lru_cache(maxsize=32)
    def prepare(tree: Any, avals: tuple, mesh: Any) -> tuple["_Pieces", Any]:
        closed, out_shape = jax.make_jaxpr(
            lambda *leaves: _call(program, tree, leaves), return_shape=True
        )(*avals)
        return _Pieces(_written_out(closed), participants), jax.tree.structure(out_shape)

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                "out_of_core() runs on the host and cannot be traced by jax.jit or jax.grad. "
                "Transform the program instead: out_of_core(jax.grad(program), ...)."
            )
        mesh = jax.sharding.get_abstract_mesh()
        pieces, out_tree = prepare(tree, tuple(map(_aval, leaves)), mesh)
        return jax.tree.unflatten(out_tree, pieces.run(leaves))

    return run


def _call(program: Callable[..., Any], tree: Any, leaves: Sequence[Any]) -> Any:
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return program(*args, **kwargs)


def _aval(leaf: Any) -> Any:
    """The type that a leaf has on the devices, where it need not be yet."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "shape"):
        return jax.typeof(leaf)
    return jax.core.ShapedArray(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with its programs written out, so that their phases stand at the top."""
    return eliminate_dead_code(inline(closed))


def _read(values: dict[Var, Any], v: Atom) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


class _Pieces:
    """The parts of a program for arguments of given types, compiled when they first run.

    Part s is what the server does between the loop of phase s - 1 and that of phase s; the last
    part comes behind all loops.
    """

    def __init__(self, closed: ClosedJaxpr, participants: int) -> None:
        placements = placements_of(closed.jaxpr)
        if len(placements) != 1:
            raise ValueError(
                "out_of_core() needs a program with maps of one placement at its top level, but "
                f"this one has {' and '.join(map(str, placements)) or 'none'}. Give the program "
                "itself, or one round of it where it has many."
            )
        self.closed = closed
        self.plan = plan_phases(closed.jaxpr, placements[0])
        self.participants = min(participants, placements[0].size)
        self.axis = mesh_axis(placements[0])
        if self.axis is not None:
            devices = jax.sharding.get_abstract_mesh().shape[self.axis]
            if rest := self.participants % devices:
                below = self.participants - rest
                raise ValueError(
                    f"out_of_core(): {self.participants} {self.axis} at a time cannot be laid out "
                    f"over the mesh's axis of {devices}: take "
                    f"{f'{below} or ' if below else ''}{below + devices}."
                )
        self.outputs = [self.plan.resolve(v) for v in closed.jaxpr.outvars]
        self.reads = [self._reads(part) for part in range(self.plan.last + 2)]
        self.gives = [self._gives(part) for part in range(self.plan.last + 2)]
        self.parts = [
            jax.jit(functools.partial(self._part, part)) for part in range(self.plan.last + 2)
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
        for part in range(self.plan.last + 2):
            made = self.parts[part]([values[v] for v in self.reads[part]], totals)
            values.update(zip(self.gives[part], made, strict=True))
            totals = []
            if part in self.plan.loops:
                stored, totals = self._run_pieces(part, values)
                values.update(stored)
        return [_read(values, v) for v in self.outputs]

    def _run_pieces(self, phase: int, values: dict[Var, Any]) -> tuple[dict[Var, Any], list]:
        shared, placed = self.plan.reads(phase)
        servers = [values[v] for v in shared]
        whole_arrays = [_on_host(values[v]) for v in placed]
        size = self.plan.placement.size
        merged: list = []
        stored: list[list] = []
        before: Any = None
        for start in range(0, size, self.participants):
            stop = min(size, start + self.participants)
            slices = [self._place(a[start:stop]) for a in whole_arrays]
            own, totals = self.loop(phase, stop - start, start, servers, slices)
            merged = self.merge(phase, merged, totals) if start else totals
            # The piece before must be through before a third is copied to the devices.
            if before is not None:
                stored.append([_on_host(x) for x in before[0]])
                jax.block_until_ready(before)
            before = own, totals if start else [jnp.copy(t) for t in totals]
        stored.append([_on_host(x) for x in before[0]])
        columns = zip(*stored, strict=True)
        return dict(zip(self.plan.stored[phase], map(_join, columns), strict=True)), merged

    def _place(self, piece: Any) -> Any:
        if self.axis is None:
            return jax.device_put(piece)
        return jax.device_put(piece, NamedSharding(jax.sharding.get_mesh(), P(self.axis)))

    def _loop(
        self, phase: int, size: int, first: Any, servers: Sequence[Any], slices: Sequence[Any]
    ) -> Any:
        shared, placed = self.plan.reads(phase)
        # Two tables: a value can be read by the server's side and by the participants'.
        of_servers = dict(zip(shared, servers, strict=True))
        of_participants = dict(zip(placed, slices, strict=True))
        placement = self.plan.placement._replace(size=size)
        stored, totals = run_loop(
            self.plan, phase, of_servers.__getitem__, of_participants.__getitem__, placement, first
        )
        return list(stored.values()), totals

    def _part(self, part: int, inputs: Sequence[Any], totals: Sequence[Any]) -> list:
        values = dict(zip(self.reads[part], inputs, strict=True))
        if part - 1 in self.plan.loops:
            values.update(finish_reductions(self.plan, part - 1, totals))
        run_server(self.plan, part, values)
        return [whole_value(self.plan, values, v) for v in self.gives[part]]

    def _sources(self, v: Atom) -> Iterator[Var]:
        """What a value as a whole is computed from: itself, unless it is made of others."""
        if isinstance(v, Literal):
            return
        if v not in self.plan.producer or v in self.plan.stored.get(self.plan.phase_of(v), ()):
            yield v
            return
        for operand in self.plan.operands(self.plan.producer[v][0]):
            yield from self._sources(operand)

    def _reads(self, part: int) -> list[Var]:
        """What a part needs that it does not compute."""
        wanted: list[Atom] = []
        for eqn in self.plan.server.get(part, ()):
            wanted += self.plan.operands(eqn)
        if part == self.plan.last + 1:
            wanted += [v for v in self.outputs if self._is_made_of_others(v)]
        found = dict.fromkeys(source for v in wanted for source in self._sources(v))
        return [v for v in found if v not in self._made(part)]

    def _gives(self, part: int) -> list[Var]:
        """What a part computes that others need, or the program returns."""
        made = self._made(part)
        others = [p for p in range(self.plan.last + 2) if p != part]
        wanted = [v for p in others for v in self._reads(p)]
        for phase in self.plan.loops:
            shared, placed = self.plan.reads(phase)
            wanted += [*shared, *placed]
        wanted += [v for v in self.outputs if isinstance(v, Var)]
        found = [v for v in dict.fromkeys(wanted) if v in made]
        if part == self.plan.last + 1:
            outputs = [v for v in dict.fromkeys(self.outputs) if isinstance(v, Var)]
            found += [v for v in outputs if self._is_made_of_others(v)]
        return found

    def _made(self, part: int) -> set[Var]:
        eqns = [*self.plan.server.get(part, ()), *self.plan.reductions.get(part - 1, ())]
        return {v for eqn in eqns for v in eqn.outvars}

    def _is_made_of_others(self, v: Atom) -> bool:
        """Whether a value is made of others only when it is wanted, as a whole broadcast is."""
        return isinstance(v, Var) and list(self._sources(v)) != [v]


def _on_host(value: Any) -> Any:
    """The value as something that can be sliced without the devices, if it can be that."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return np.asarray(value) if isinstance(value, jax.Array) else value


def _join(pieces: Sequence[Any]) -> Any:
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    return jnp.concatenate(pieces)
