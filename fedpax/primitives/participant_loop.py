"""The loop over participants: on each device some of them at a time, reduced as they come."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import ClosedJaxpr, eliminate_dead_code, evaluate, with_manual_axis
from fedpax.primitives.layout import explicit_axis, mesh_axis, shard_over_placement, unplaced_aval
from fedpax.primitives.monoids import Monoid, apply_by_monoid
from fedpax.primitives.peak_memory import num_bytes, peak_live_bytes
from fedpax.primitives.placement import ChunkSize, Placement

# What "auto" lets the participants of a GPU or TPU hold between them, in bytes.
AUTO_CHUNK_BYTES = 2**30


class LazySlice(NamedTuple):
    """A participant's value, as the place where it lies among those of all the others.

    What loops inside of the participant read of it, they read there: nothing is copied.

    Attributes:
        whole: an array whose first axes are of placements, the outermost first; in a pytree of
            types or of mesh axes its type, or its axes.
        places: int32 scalars, where along each of these axes; likewise.
    """

    whole: Any
    places: tuple[Any, ...]


def materialize(value: Any) -> jax.Array:
    """A value, taken out of where it lies if it is a `LazySlice`."""
    if not isinstance(value, LazySlice):
        return value
    first = len(value.places)
    starts = (*value.places, *[jnp.int32(0)] * (value.whole.ndim - first))
    sizes = (*[1] * first, *value.whole.shape[first:])
    return jax.lax.squeeze(jax.lax.dynamic_slice(value.whole, starts, sizes), range(first))


def type_of(value: Any) -> Any:
    """The type of an array, or of what a `LazySlice` shows."""
    if not isinstance(value, LazySlice):
        return jax.typeof(value)
    aval = jax.typeof(value.whole)
    for _ in value.places:
        aval = unplaced_aval(aval)
    return aval


def run_participants(
    one: Callable[[jax.Array, list, list], list],
    shared: Sequence[jax.Array],
    placed: Sequence[Any],
    monoids: Sequence[Monoid],
    placement: Placement,
    chunk_size: ChunkSize,
    lent: Sequence[bool] | None = None,
    first: Any = 0,
) -> list:
    """Runs a function on every participant, and reduces what it returns as they come.

    Args:
        one: `(number, shared, slices) -> outputs` of one participant: its number among all, an
            int32 scalar, the shared values, and its slices of the placed ones.
        shared: server values.
        placed: arrays `[n, ...]`, or `LazySlice`s of them.
        monoids: what each of the last outputs is combined by; those before are stacked.
        placement: who runs it.
        chunk_size: how many of them a device runs at once.
        lent: which placed values `one` takes as `LazySlice`s where there is a loop; None for none.
        first: the number of the first participant.

    Returns:
        Arrays `[n, ...]`, then the totals over all participants.
    """
    views = [_laid_out(v, placement) for v in placed]
    axis = mesh_axis(placement)
    devices = 1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis]
    local = placement.size // devices
    loops = chunk_size == "auto" or (chunk_size or local) < local
    lends = [loops and wanted for wanted in lent or [False] * len(views)]
    slices = [
        _on_a_device(v, local) if lend else unplaced_aval(type_of(v))
        for v, lend in zip(views, lends, strict=True)
    ]
    types = jax.ShapeDtypeStruct((), jnp.int32), list(map(jax.typeof, shared)), slices
    jaxpr = eliminate_dead_code(jax.make_jaxpr(one)(*types))
    numbered = _reads_first(jaxpr)
    others = [False, *[True] * len(shared)]
    for lend, slice_ in zip(lends, slices, strict=True):
        others += [lend] * len(jax.tree.leaves(slice_))
    fits = max(1, AUTO_CHUNK_BYTES // _bytes_of_one(jaxpr, others))
    loop = _Loop(
        functools.partial(evaluate, jaxpr),
        jaxpr.out_avals,
        shared,
        monoids,
        lends,
        local,
        first if numbered else 0,
        fits,
    )
    if axis is None:
        return loop.run(views, chunk_size)
    loop = loop._replace(one=with_manual_axis(jaxpr, axis))

    def on_device(shared, first, views):
        here = loop._replace(shared=shared, first=0 if first is None else first[0])
        outputs = here.run(views, chunk_size)
        # Alone on its axis a device has the totals, and XLA's partitioner fails at a collective.
        if devices == 1:
            return outputs
        stacked, totals = here.split(outputs)
        return [*stacked, *apply_by_monoid(monoids, lambda m, own: m.collective(own, axis), totals)]

    firsts = None
    if numbered:
        firsts = shard_over_placement(
            first + local * jnp.arange(devices, dtype=jnp.int32), placement
        )
    # All differentiation has been done on the jaxpr, so nothing needs to know which values vary.
    outputs = jax.shard_map(
        on_device,
        axis_names={axis},
        in_specs=(P(), P(axis), [_spec(v, axis) for v in views]),
        out_specs=[*[P(axis)] * (len(jaxpr.out_avals) - len(monoids)), *[P()] * len(monoids)],
        check_vma=False,
    )(list(shared), firsts, views)
    return [_as_typed(x) for x in outputs]


def _laid_out(value: Any, placement: Placement) -> LazySlice:
    """A placed value as a `LazySlice`, with the placement's mesh axis on its participants' axis."""
    if isinstance(value, LazySlice):
        if jax.typeof(value.whole).sharding.spec[len(value.places)] == explicit_axis(placement):
            return value
        value = materialize(value)
    return LazySlice(shard_over_placement(value, placement), ())


def _spec(view: LazySlice, axis: str) -> LazySlice:
    return LazySlice(P(*[None] * len(view.places), axis), tuple(P() for _ in view.places))


def _on_a_device(view: LazySlice, participants: int) -> LazySlice:
    """The types of a `LazySlice` of one of the participants on a device."""
    aval, at = jax.typeof(view.whole), len(view.places)
    shape, spec = list(aval.shape), list(aval.sharding.spec)
    shape[at], spec[at] = participants, None
    whole = aval.update(shape=tuple(shape), sharding=aval.sharding.update(spec=P(*spec)))
    place = jax.ShapeDtypeStruct((), jnp.int32)
    return LazySlice(whole, (place,) * (at + 1))


def _reads_first(jaxpr: ClosedJaxpr) -> bool:
    """Whether anything in a function needs its first argument."""
    number = jaxpr.jaxpr.invars[0]
    return any(v is number for eqn in jaxpr.jaxpr.eqns for v in eqn.invars) or any(
        v is number for v in jaxpr.jaxpr.outvars
    )


def _as_typed(x: jax.Array) -> jax.Array:
    """Tells the compiler the explicit axes in an array's type, which it may otherwise give up.

    JAX 0.10.2 says of a shard_map's results only where the manual axis lies; returned from `jit` on
    a mesh of mixed axes, they would be replicated over the explicit ones, and typed so.
    """
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, spec) if any(entry is not None for entry in spec) else x


def _bytes_of_one(jaxpr: ClosedJaxpr, others: Sequence[bool]) -> int:
    """What one participant holds, without the arguments that are others' too."""
    inner = jaxpr.jaxpr
    theirs = sum(num_bytes(v) for v, o in zip(inner.invars, others, strict=True) if o)
    return max(1, peak_live_bytes(inner) - theirs)


class _Loop(NamedTuple):
    """The participants of one device, some of them batched, one chunk after another.

    Attributes:
        one: what a participant runs: its number, shared values and slices in, a list out.
        out_avals: the types of what it returns.
        shared: server values.
        monoids: what the last of these are combined by; those before are stacked.
        lends: which placed values it takes as `LazySlice`s.
        participants: how many there are.
        first: the number of the first.
        fits: how many of them "auto" batches on an accelerator.
    """

    one: Callable[..., list]
    out_avals: Sequence[Any]
    shared: Sequence[jax.Array]
    monoids: Sequence[Monoid]
    lends: Sequence[bool]
    participants: int
    first: Any
    fits: int

    def run(self, placed: Sequence[LazySlice], chunk_size: ChunkSize) -> list:
        if chunk_size == "auto":
            return jax.lax.platform_dependent(
                *placed,
                cpu=lambda *placed: self.run(placed, 1),
                default=lambda *placed: self.run(placed, self.even_chunk()),
            )
        size = min(chunk_size or self.participants, self.participants)
        chunks, rest = divmod(self.participants, size)
        if chunks == 1 and not rest:
            return self.chunk(size, 0, placed)

        # What is stacked takes the place of an argument of its type, row by row: a state that is
        # donated needs no second buffer. An argument that is not is copied there.
        owners = self.owners(placed)

        def take(size: int, carry: tuple) -> tuple:
            start, stored, totals = carry
            current = list(placed)
            for i, whole in zip(owners, stored, strict=True):
                if i is not None:
                    current[i] = LazySlice(whole, ())
            own, terms = self.split(self.chunk(size, start, current))
            write = jax.lax.dynamic_update_slice_in_dim
            stored = [write(whole, o, start, 0) for whole, o in zip(stored, own, strict=True)]
            totals = apply_by_monoid(self.monoids, lambda m, a, b: m.merge(a, b), totals, terms)
            return start + size, stored, totals

        # The starts are counted and not scanned over: an array of them would grow with the clients.
        # The results are carried and not stacked, so that the rest is written into the same arrays.
        room = [
            _unwritten(self.participants, aval) if i is None else placed[i].whole
            for i, aval in zip(owners, self.split(self.out_avals)[0], strict=True)
        ]
        carry, _ = jax.lax.scan(
            lambda carry, _: (take(size, carry), None), (0, room, self.start()), length=chunks
        )
        _, stored, totals = take(rest, carry) if rest else carry
        return [*stored, *totals]

    def even_chunk(self) -> int:
        """The chunk of "auto": as few chunks as fit, and all about as large."""
        chunks = -(-self.participants // self.fits)
        return -(-self.participants // chunks)

    def chunk(self, size: int, start: Any, placed: Sequence[LazySlice]) -> list:
        """Runs `size` participants: outputs come back stacked, or combined."""
        several = size > 1
        places = start + jnp.arange(size, dtype=jnp.int32) if several else jnp.int32(start)
        arguments = [places + self.first, *self.shared]
        axes: list[int | None] = [0, *[None] * len(self.shared)]
        for view, lend in zip(placed, self.lends, strict=True):
            if lend:
                arguments += [view.whole, *view.places, places]
                axes += [None, *[None] * len(view.places), 0]
            else:
                rows = self.rows(view, start, size)
                arguments.append(rows if several else jax.lax.squeeze(rows, [0]))
                axes.append(0)
        if several:
            stacked, terms = self.split(jax.vmap(self.one, in_axes=axes)(*arguments))
            return [*stacked, *apply_by_monoid(self.monoids, lambda m, own: m.reduce(own), terms)]
        # Not batched: conditionals stay conditionals and convolutions stay ungrouped.
        stacked, terms = self.split(self.one(*arguments))
        return [*(jnp.expand_dims(x, 0) for x in stacked), *terms]

    def rows(self, view: LazySlice, start: Any, size: int) -> jax.Array:
        """The slices of some participants, taken out of where they lie."""
        first = len(view.places)
        if size == self.participants and not first:
            return view.whole
        starts = (*view.places, start, *[0] * (view.whole.ndim - first - 1))
        sizes = (*[1] * first, size, *view.whole.shape[first + 1 :])
        rows = jax.lax.dynamic_slice(view.whole, [jnp.int32(i) for i in starts], sizes)
        return jax.lax.squeeze(rows, range(first))

    def split(self, outputs: Sequence[Any]) -> tuple[list, list]:
        """What is stacked, and what is combined."""
        stacked = len(outputs) - len(self.monoids)
        return list(outputs[:stacked]), list(outputs[stacked:])

    def owners(self, placed: Sequence[LazySlice]) -> list[int | None]:
        """For each of them the first argument of its type that no other has, if there is one."""
        free = [
            (i, _layout(unplaced_aval(type_of(v))))
            for i, v in enumerate(placed)
            if not v.places and _knows_mesh(v.whole)
        ]
        found: list[int | None] = []
        for aval in self.split(self.out_avals)[0]:
            own = next((entry for entry in free if entry[1] == _layout(aval)), None)
            found.append(own and own[0])
            if own:
                free.remove(own)
        return found

    def start(self) -> list:
        """The totals of nobody."""
        _, avals = self.split(self.out_avals)
        values = apply_by_monoid(
            self.monoids, lambda m, own: m.start([a.dtype for a in own]), avals
        )
        return list(map(_filled, values, avals))


def _knows_mesh(x: jax.Array) -> bool:
    """Whether an array's type names the mesh where it must: an array of NumPy has none."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return not (explicit and jax.typeof(x).sharding.mesh.empty)


def _layout(aval: Any) -> tuple:
    return aval.shape, aval.dtype, aval.sharding.spec


def _unwritten(participants: int, aval: Any) -> jax.Array:
    # Explicit axes are in an array's type even where nothing is sharded over them.
    typed = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    spec = P(None, *aval.sharding.spec) if typed else None
    return jax.lax.empty((participants, *aval.shape), aval.dtype, out_sharding=spec)


def _filled(value: jax.Array, aval: Any) -> jax.Array:
    spec = aval.sharding.spec
    if all(entry is None for entry in spec):
        return jnp.broadcast_to(value, aval.shape)
    return jnp.broadcast_to(value, aval.shape, out_sharding=spec)
