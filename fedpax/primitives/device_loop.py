"""DeviceLoop: the participants of one device run in chunks, and their reductions accumulate."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedpax.primitives.client_rows import (
    ClientRows,
    LazySlice,
    RowRing,
    aval_of_value,
    empty_rows,
    has_typed_mesh,
    read_clients,
    read_rows,
    write_clients,
    write_rows,
)
from fedpax.primitives.layout import unplaced_aval
from fedpax.primitives.monoids import Monoid, apply_by_monoid, reduce_terms
from fedpax.primitives.placement import ChunkSize

Placed: TypeAlias = LazySlice | ClientRows


class DeviceLoop(NamedTuple):
    """The participants of one device, run in chunks."""

    # `(index, *server values, *slices) -> list of outputs` of one participant. If the device has
    # one participant, slices and stacked outputs have an axis of size 1.
    participant_fn: Callable[..., list]
    out_avals: Sequence[Any]  # of one participant, without this axis
    server_values: Sequence[jax.Array]  # of all participants
    # the monoid of each of the last outputs. The outputs before them are stacked.
    monoids: Sequence[Monoid]
    lazy: Sequence[bool]  # for each placed value, whether `participant_fn` takes a `LazySlice`
    # for each placed value, the outputs that may depend on it
    outputs_by_slice: Sequence[Sequence[int]]
    participants: int
    first_index: int | jax.Array
    max_auto_chunk: int  # largest chunk that "auto" may choose on an accelerator; 1 without "auto"
    # stacked output -> the placed value, a `ClientRows`, into whose rows it is written
    in_place: Mapping[int, int] = MappingProxyType({})
    ring: RowRing | None = None  # the devices that share the rows of clients, if there are several

    def run(self, placed: Sequence[Placed], chunk_size: ChunkSize) -> list[jax.Array]:
        """Run all participants and return the stacked outputs, then the totals."""
        if chunk_size == "auto":
            return jax.lax.platform_dependent(
                *placed,
                cpu=lambda *placed: self.run(placed, 1),
                default=lambda *placed: self.run(
                    placed, equal_chunks(self.participants, self.max_auto_chunk)
                ),
            )
        size = min(chunk_size or self.participants, self.participants)
        chunks, rest = divmod(self.participants, size)
        if chunks == 1 and not rest:
            outputs = self.run_chunk(size, 0, placed)
            written = self.write_clients(0, outputs, placed)
            return [written.get(output, value) for output, value in enumerate(outputs)]

        # Written row by row into the buffer of an input of the same type, a donated state needs no
        # second buffer. XLA copies an input that is not donated.
        aliases = self.aliased_inputs(placed)
        # Where only the rows that overwrite an input depend on it, all reads precede the write.
        apart = [
            i
            for output, i in enumerate(aliases)
            if i is not None
            and output not in self.in_place
            and set(self.outputs_by_slice[i]) - {output}
        ]

        def step(size: int, carry: tuple, in_loop: bool) -> tuple:
            start, stacked, totals = carry
            current = list(placed)
            for i, buffer in zip(aliases, stacked, strict=True):
                if i is not None:
                    current[i] = _with_buffer(placed[i], buffer)
            rows, terms = self.split(self.run_chunk(size, start, current, apart))
            written = self.write_clients(start, rows, current)
            stacked = [
                written[output]
                if output in written
                else write_rows(all_, row, start, fusible=in_loop or i is None)
                for output, (all_, row, i) in enumerate(zip(stacked, rows, aliases, strict=True))
            ]
            totals = apply_by_monoid(self.monoids, lambda m, a, b: m.merge(a, b), totals, terms)
            return start + size, stacked, totals

        # The start is counted in the carry: an array of starts would grow with the clients. The
        # outputs are carried: stacked by the scan, they would be copied when the smaller last chunk
        # is appended.
        buffers = [
            empty_rows(self.participants, aval) if i is None else placed[i][0]
            for i, aval in zip(aliases, self.split(self.out_avals)[0], strict=True)
        ]
        carry, _ = jax.lax.scan(
            lambda carry, _: (step(size, carry, in_loop=chunks > 1), None),
            (0, buffers, self.identities()),
            length=chunks,
        )
        _, stacked, totals = step(rest, carry, in_loop=False) if rest else carry
        return [*stacked, *totals]

    def write_clients(
        self, start: Any, outputs: Sequence[Any], placed: Sequence[Placed]
    ) -> dict[int, jax.Array]:
        """Write the outputs of `in_place` into the rows of clients."""
        if not self.in_place:
            return {}
        values = [_client_rows(placed[i]) for i in self.in_place.values()]
        states = [outputs[output] for output in self.in_place]
        rows = write_clients(values, start, states, self.ring, in_loop=True)
        return dict(zip(self.in_place, rows, strict=True))

    def run_chunk(
        self,
        size: int,
        start: Any,
        placed: Sequence[Placed],
        apart: Sequence[int] = (),
    ) -> list[jax.Array]:
        """Run `size` participants and return their stacked outputs, then their totals."""
        several = size > 1
        local_index = start + jnp.arange(size, dtype=jnp.int32) if several else jnp.int32(start)
        arguments = [local_index + self.first_index, *self.server_values]
        axes: list[int | None] = [0, *[None] * len(self.server_values)]
        stores = {i: value for i, value in enumerate(placed) if isinstance(value, ClientRows)}
        states = (
            read_clients([*stores.values()], start, size, self.ring, in_loop=True) if stores else []
        )
        read = dict(zip(stores, states, strict=True))
        for i, (value, is_lazy) in enumerate(zip(placed, self.lazy, strict=True)):
            if is_lazy:
                assert isinstance(value, LazySlice)
                arguments += [value.array, *value.indices, local_index]
                axes += [None, *[None] * len(value.indices), 0]
            else:
                if isinstance(value, ClientRows):
                    rows = read[i]
                elif i in apart:
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

    def aliased_inputs(self, placed: Sequence[Placed]) -> list[int | None]:
        """Return the input buffer that each stacked output can overwrite, or None."""
        # Of equal shape, dtype and sharding, each once. Inputs that the output depends on are
        # first, such as the state that it replaces: XLA copies an input that another output reads.
        free = {
            i: _shape_and_layout(unplaced_aval(aval_of_value(v)))
            for i, v in enumerate(placed)
            if isinstance(v, LazySlice) and not v.indices and has_typed_mesh(v.array)
        }
        wanted = dict(enumerate(map(_shape_and_layout, self.split(self.out_avals)[0])))
        slices: list[int | None] = [self.in_place.get(output) for output in wanted]
        for only_dependent in (True, False):
            for output, layout in wanted.items():
                fitting = (
                    i
                    for i, store in free.items()
                    if store == layout
                    and (output in self.outputs_by_slice[i] or not only_dependent)
                )
                if slices[output] is None and (i := next(fitting, None)) is not None:
                    slices[output] = i
                    del free[i]
        return slices

    def identities(self) -> list[jax.Array]:
        """Return the initial totals: the identities of the monoids."""
        _, avals = self.split(self.out_avals)
        values = apply_by_monoid(
            self.monoids, lambda m, own: m.identity([a.dtype for a in own]), avals
        )
        arrays: dict[tuple, jax.Array] = {}  # leaves of one shape share their array
        for value, aval in zip(values, avals, strict=True):
            key = (id(value), *_shape_and_layout(aval))
            if key not in arrays:
                arrays[key] = _broadcast_to_aval(value, aval)
        return [arrays[id(v), *_shape_and_layout(a)] for v, a in zip(values, avals, strict=True)]


def equal_chunks(participants: int, largest: int) -> int:
    """Return the size of the fewest chunks of at most `largest`, of about equal size."""
    chunks = -(-participants // largest)
    return -(-participants // chunks)


def _client_rows(value: Placed) -> ClientRows:
    assert isinstance(value, ClientRows)
    return value


def _with_buffer(value: Placed, buffer: jax.Array) -> Placed:
    """Replace the array of a value that a loop overwrites."""
    if isinstance(value, ClientRows):
        return value._replace(rows=buffer)
    return LazySlice(buffer, ())


def _shape_and_layout(aval: Any) -> tuple:
    return aval.shape, aval.dtype, aval.sharding.spec


def _broadcast_to_aval(value: jax.Array, aval: Any) -> jax.Array:
    spec = aval.sharding.spec
    if all(entry is None for entry in spec):
        return jnp.broadcast_to(value, aval.shape)
    return jnp.broadcast_to(value, aval.shape, out_sharding=spec)
