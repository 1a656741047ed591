"""The loop over participants: each device runs a chunk of them at a time and reduces as it goes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import ClosedJaxpr, depends_on, eliminate_dead_code, evaluate
from fedpax.primitives.layout import (
    explicit_axis,
    mesh_axis,
    shard_over_placement,
    unplaced_aval,
)
from fedpax.primitives.leading_axis import keep_leading_axis
from fedpax.primitives.manual_axis import with_manual_axis
from fedpax.primitives.monoids import Monoid, apply_by_monoid, reduce_terms
from fedpax.primitives.peak_memory import num_bytes, peak_live_bytes
from fedpax.primitives.placement import ChunkSize, Placement
from fedpax.primitives.row_buffer import empty_rows, has_typed_mesh, read_rows, write_rows

# chunk_size="auto" runs as many participants at once on a GPU or TPU as fit in this many bytes.
AUTO_CHUNK_BYTES = 2**30


class LazySlice(NamedTuple):
    """A lazy slice: the full stacked array plus the index of one participant.

    A nested loop reads such a value directly from the full array, without a copy.

    Attributes:
        array: array whose first axes belong to placements, the outermost first. In a pytree of
            types or of partition specs: its type or its spec.
        indices: int32 scalars, the index along each of these axes. In a pytree of types or of
            partition specs: their types or specs.
    """

    array: Any
    indices: tuple[Any, ...]


def materialize(value: Any) -> jax.Array:
    """Return a value as an array; slice it out of the full array if it is a `LazySlice`."""
    if not isinstance(value, LazySlice):
        return value
    depth = len(value.indices)
    starts = (*value.indices, *[jnp.int32(0)] * (value.array.ndim - depth))
    sizes = (*[1] * depth, *value.array.shape[depth:])
    return jax.lax.squeeze(jax.lax.dynamic_slice(value.array, starts, sizes), range(depth))


def aval_of_value(value: Any) -> Any:
    """Return the type of an array, or of the array that a `LazySlice` materializes to."""
    if not isinstance(value, LazySlice):
        return jax.typeof(value)
    aval = jax.typeof(value.array)
    for _ in value.indices:
        aval = unplaced_aval(aval)
    return aval


def run_participants(
    participant_fn: Callable[[jax.Array, list, list], list],
    server_values: Sequence[jax.Array],
    placed_values: Sequence[jax.Array | LazySlice],
    monoids: Sequence[Monoid],
    placement: Placement,
    chunk_size: ChunkSize,
    lazy: Sequence[bool] | None = None,
    first_index: int | jax.Array = 0,
) -> list[jax.Array]:
    """Run a function on every participant; stack its first outputs and reduce its last outputs.

    Args:
        participant_fn: `(index, server values, slices) -> outputs` of one participant. The index is
            an int32 scalar; the slices are the participant's slices of the placed values.
        server_values: arrays that all participants share.
        placed_values: arrays `[n, ...]`, or lazy slices that materialize to such arrays.
        monoids: the monoid of each of the last outputs. The outputs before them are stacked.
        placement: the placement of `n` participants.
        chunk_size: number of participants that a device runs at once, as in `federated_map`.
        lazy: for each placed value, whether `participant_fn` takes its slice as a `LazySlice` when
            the participants run in a loop. Default None: all slices are arrays.
        first_index: index of the first participant.

    Returns:
        The stacked outputs `[n, ...]`, then the totals over all participants.
    """
    slices_of = [_shard(v, placement) for v in placed_values]
    axis = mesh_axis(placement)
    devices = 1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis]
    local = placement.size // devices
    if local == 1:
        chunk_size = None  # there is nothing to loop over
    loops = chunk_size == "auto" or (chunk_size or local) < local
    lazy = [loops and wanted for wanted in lazy or [False] * len(slices_of)]
    slice_types = [
        _local_slice_type(v, local) if is_lazy else unplaced_aval(aval_of_value(v))
        for v, is_lazy in zip(slices_of, lazy, strict=True)
    ]
    index_type = jax.ShapeDtypeStruct((), jnp.int32)
    types = index_type, list(map(jax.typeof, server_values)), slice_types
    jaxpr = eliminate_dead_code(jax.make_jaxpr(participant_fn)(*types))
    uses_index = _uses_index(jaxpr)
    shared = [False, *[True] * len(server_values)]
    for is_lazy, slice_type in zip(lazy, slice_types, strict=True):
        shared += [is_lazy] * len(jax.tree.leaves(slice_type))
    max_auto_chunk = 1
    if chunk_size == "auto":
        max_auto_chunk = max(1, AUTO_CHUNK_BYTES // _bytes_per_participant(jaxpr, shared))
    device_jaxpr = jaxpr
    if local == 1:
        placed = [False] * (1 + len(server_values)) + [True] * len(slices_of)
        device_jaxpr = keep_leading_axis(jaxpr, placed, len(jaxpr.out_avals) - len(monoids))
    loop = _DeviceLoop(
        functools.partial(evaluate, device_jaxpr),
        jaxpr.out_avals,
        server_values,
        monoids,
        lazy,
        _outputs_by_slice(jaxpr, 1 + len(server_values), slice_types),
        local,
        first_index if uses_index else 0,
        max_auto_chunk,
    )
    if axis is None:
        return loop.run(slices_of, chunk_size)
    loop = loop._replace(participant_fn=with_manual_axis(device_jaxpr, axis))

    def on_device(server_values, first, placed):
        device_loop = loop._replace(
            server_values=server_values, first_index=0 if first is None else first[0]
        )
        outputs = device_loop.run(placed, chunk_size)
        # With one device on the axis the totals are complete, and XLA's partitioner fails at a
        # collective over an axis of size 1.
        if devices == 1:
            return outputs
        stacked, totals = device_loop.split(outputs)
        return [*stacked, *apply_by_monoid(monoids, lambda m, own: m.all_reduce(own, axis), totals)]

    first_indices = None
    if uses_index:
        starts = local * jnp.arange(devices, dtype=jnp.int32)
        first_indices = shard_over_placement(first_index + starts, placement)
    num_stacked = len(jaxpr.out_avals) - len(monoids)
    outputs = jax.shard_map(
        on_device,
        axis_names={axis},
        in_specs=(P(), P(axis), [_in_spec(v, axis) for v in slices_of]),
        out_specs=[*[P(axis)] * num_stacked, *[P()] * len(monoids)],
        # The jaxpr is differentiated already, so it need not know which values vary over the axis.
        check_vma=False,
    )(list(server_values), first_indices, slices_of)
    return [_reshard_to_type(x) for x in outputs]


def _shard(value: jax.Array | LazySlice, placement: Placement) -> LazySlice:
    """Return a placed value as a `LazySlice` whose participants' axis is sharded by the mesh."""
    if isinstance(value, LazySlice):
        spec = jax.typeof(value.array).sharding.spec
        if spec[len(value.indices)] == explicit_axis(placement):
            return value
        value = materialize(value)
    return LazySlice(shard_over_placement(value, placement), ())


def _in_spec(value: LazySlice, axis: str) -> LazySlice:
    return LazySlice(P(*[None] * len(value.indices), axis), tuple(P() for _ in value.indices))


def _local_slice_type(value: LazySlice, participants: int) -> LazySlice:
    """Return the type of one participant's `LazySlice` of the participants on a device."""
    aval, depth = jax.typeof(value.array), len(value.indices)
    shape, spec = list(aval.shape), list(aval.sharding.spec)
    shape[depth], spec[depth] = participants, None
    array = aval.update(shape=tuple(shape), sharding=aval.sharding.update(spec=P(*spec)))
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return LazySlice(array, (index,) * (depth + 1))


def _uses_index(jaxpr: ClosedJaxpr) -> bool:
    """Return whether an equation or output reads the first argument."""
    index = jaxpr.jaxpr.invars[0]
    return any(v is index for eqn in jaxpr.jaxpr.eqns for v in eqn.invars) or any(
        v is index for v in jaxpr.jaxpr.outvars
    )


def _outputs_by_slice(
    jaxpr: ClosedJaxpr, num_shared: int, slice_types: Sequence[Any]
) -> list[list[int]]:
    """Return the outputs that may depend on each slice, which follow `num_shared` arguments."""
    found, first = [], num_shared
    for slice_type in slice_types:
        after = first + len(jax.tree.leaves(slice_type))
        marked = [first <= i < after for i in range(len(jaxpr.in_avals))]
        found.append([o for o, depends in enumerate(depends_on(jaxpr, marked)) if depends])
        first = after
    return found


def _reshard_to_type(x: jax.Array) -> jax.Array:
    """Constrain an array to the explicit axes in its type.

    JAX 0.10.2 lowers the result of a `shard_map` with a sharding over the manual axis alone. A
    program that returns such a result on a mesh of mixed axes would return it replicated over the
    explicit axes.
    """
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, spec) if any(entry is not None for entry in spec) else x


def _bytes_per_participant(jaxpr: ClosedJaxpr, shared: Sequence[bool]) -> int:
    """Return the peak bytes of one participant, without the arguments that participants share."""
    inner = jaxpr.jaxpr
    shared_bytes = sum(num_bytes(v) for v, s in zip(inner.invars, shared, strict=True) if s)
    return max(1, peak_live_bytes(inner) - shared_bytes)


class _DeviceLoop(NamedTuple):
    """The participants of one device, run in chunks.

    Attributes:
        participant_fn: `(index, *server values, *slices) -> list of outputs` of one participant.
            If the device has one participant, slices and stacked outputs have an axis of size 1.
        out_avals: types of the outputs of one participant, without this axis.
        server_values: arrays that all participants share.
        monoids: the monoid of each of the last outputs. The outputs before them are stacked.
        lazy: for each placed value, whether `participant_fn` takes a `LazySlice`.
        outputs_by_slice: for each placed value, the outputs that may depend on it.
        participants: number of participants on the device.
        first_index: index of the first participant.
        max_auto_chunk: largest chunk that "auto" may choose on an accelerator; 1 without "auto".
    """

    participant_fn: Callable[..., list]
    out_avals: Sequence[Any]
    server_values: Sequence[jax.Array]
    monoids: Sequence[Monoid]
    lazy: Sequence[bool]
    outputs_by_slice: Sequence[Sequence[int]]
    participants: int
    first_index: int | jax.Array
    max_auto_chunk: int

    def run(self, placed: Sequence[LazySlice], chunk_size: ChunkSize) -> list[jax.Array]:
        """Run all participants and return the stacked outputs, then the totals."""
        if chunk_size == "auto":
            return jax.lax.platform_dependent(
                *placed,
                cpu=lambda *placed: self.run(placed, 1),
                default=lambda *placed: self.run(placed, self.auto_chunk_size()),
            )
        size = min(chunk_size or self.participants, self.participants)
        chunks, rest = divmod(self.participants, size)
        if chunks == 1 and not rest:
            return self.run_chunk(size, 0, placed)

        # A stacked output is written row by row into the buffer of an input of the same type, so a
        # donated state needs no second buffer. XLA copies an input that is not donated.
        aliases = self.aliased_inputs(placed)
        # Where only the rows that overwrite an input depend on it, all reads precede the write.
        apart = [
            i
            for output, i in enumerate(aliases)
            if i is not None and set(self.outputs_by_slice[i]) - {output}
        ]

        def step(size: int, carry: tuple, in_loop: bool) -> tuple:
            start, stacked, totals = carry
            current = list(placed)
            for i, buffer in zip(aliases, stacked, strict=True):
                if i is not None:
                    current[i] = LazySlice(buffer, ())
            rows, terms = self.split(self.run_chunk(size, start, current, apart))
            stacked = [
                write_rows(all_, own, start, fusible=in_loop or i is None)
                for all_, own, i in zip(stacked, rows, aliases, strict=True)
            ]
            totals = apply_by_monoid(self.monoids, lambda m, a, b: m.merge(a, b), totals, terms)
            return start + size, stacked, totals

        # Two arrays are avoided here. The start is counted in the carry: scanned over, an array of
        # starts would grow with the clients. The outputs are carried: stacked by the scan, they
        # would be copied when the last, smaller chunk is appended.
        buffers = [
            empty_rows(self.participants, aval) if i is None else placed[i].array
            for i, aval in zip(aliases, self.split(self.out_avals)[0], strict=True)
        ]
        carry, _ = jax.lax.scan(
            lambda carry, _: (step(size, carry, in_loop=chunks > 1), None),
            (0, buffers, self.identities()),
            length=chunks,
        )
        _, stacked, totals = step(rest, carry, in_loop=False) if rest else carry
        return [*stacked, *totals]

    def auto_chunk_size(self) -> int:
        """Return the chunk size of "auto": the fewest chunks that fit, of about equal size."""
        chunks = -(-self.participants // self.max_auto_chunk)
        return -(-self.participants // chunks)

    def run_chunk(
        self,
        size: int,
        start: Any,
        placed: Sequence[LazySlice],
        apart: Sequence[int] = (),
    ) -> list[jax.Array]:
        """Run `size` participants and return their stacked outputs, then their totals."""
        several = size > 1
        local_index = start + jnp.arange(size, dtype=jnp.int32) if several else jnp.int32(start)
        arguments = [local_index + self.first_index, *self.server_values]
        axes: list[int | None] = [0, *[None] * len(self.server_values)]
        for i, (value, is_lazy) in enumerate(zip(placed, self.lazy, strict=True)):
            if is_lazy:
                arguments += [value.array, *value.indices, local_index]
                axes += [None, *[None] * len(value.indices), 0]
            else:
                if i in apart:
                    rows = read_rows(value.array, start, size)
                else:
                    rows = self.rows_of(value, start, size)
                keeps_axis = several or self.participants == 1
                arguments.append(rows if keeps_axis else jax.lax.squeeze(rows, [0]))
                axes.append(0)
        if several:
            outputs = jax.vmap(self.participant_fn, in_axes=axes)(*arguments)
            stacked, terms = self.split(outputs)
            return [*stacked, *apply_by_monoid(self.monoids, reduce_terms, terms)]
        # Without vmap a conditional stays a conditional and a convolution stays ungrouped.
        stacked, terms = self.split(self.participant_fn(*arguments))
        if self.participants == 1:
            return [*stacked, *terms]
        return [*(jnp.expand_dims(x, 0) for x in stacked), *terms]

    def rows_of(self, value: LazySlice, start: Any, size: int) -> jax.Array:
        """Slice the rows of `size` participants out of a placed value."""
        depth = len(value.indices)
        if size == self.participants and not depth:
            return value.array
        starts = (*value.indices, start, *[0] * (value.array.ndim - depth - 1))
        sizes = (*[1] * depth, size, *value.array.shape[depth + 1 :])
        rows = jax.lax.dynamic_slice(value.array, [jnp.int32(i) for i in starts], sizes)
        return jax.lax.squeeze(rows, range(depth))

    def split(self, outputs: Sequence[Any]) -> tuple[list, list]:
        """Split outputs into those that are stacked and those that are reduced."""
        stacked = len(outputs) - len(self.monoids)
        return list(outputs[:stacked]), list(outputs[stacked:])

    def aliased_inputs(self, placed: Sequence[LazySlice]) -> list[int | None]:
        """Assign input buffers to the stacked outputs.

        Returns:
            For each stacked output, the index of an input buffer with the same shape, dtype and
            sharding that it can alias, or None. No input is assigned twice. Inputs that the output
            depends on come first, such as the state that it replaces: XLA copies an input that
            another output still reads.
        """
        free = {
            i: _shape_and_layout(unplaced_aval(aval_of_value(v)))
            for i, v in enumerate(placed)
            if not v.indices and has_typed_mesh(v.array)
        }
        wanted = dict(enumerate(map(_shape_and_layout, self.split(self.out_avals)[0])))
        found: list[int | None] = [None] * len(wanted)
        for only_dependent in (True, False):
            for output, layout in wanted.items():
                fitting = (
                    i
                    for i, own in free.items()
                    if own == layout and (output in self.outputs_by_slice[i] or not only_dependent)
                )
                if found[output] is None and (i := next(fitting, None)) is not None:
                    found[output] = i
                    del free[i]
        return found

    def identities(self) -> list[jax.Array]:
        """Return the initial totals: the identities of the monoids."""
        _, avals = self.split(self.out_avals)
        values = apply_by_monoid(
            self.monoids, lambda m, own: m.identity([a.dtype for a in own]), avals
        )
        found: dict[tuple, jax.Array] = {}  # leaves of one shape share their array
        for value, aval in zip(values, avals, strict=True):
            key = (id(value), *_shape_and_layout(aval))
            if key not in found:
                found[key] = _broadcast_to_aval(value, aval)
        return [found[id(v), *_shape_and_layout(a)] for v, a in zip(values, avals, strict=True)]


def _shape_and_layout(aval: Any) -> tuple:
    return aval.shape, aval.dtype, aval.sharding.spec


def _broadcast_to_aval(value: jax.Array, aval: Any) -> jax.Array:
    spec = aval.sharding.spec
    if all(entry is None for entry in spec):
        return jnp.broadcast_to(value, aval.shape)
    return jnp.broadcast_to(value, aval.shape, out_sharding=spec)
