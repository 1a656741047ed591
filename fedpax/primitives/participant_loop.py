"""run_participants: the loop over participants, divided among the devices of a mesh."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpax.chips import chip_of
from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    aval_of,
    bind_again,
    context_of,
    eliminate_dead_code,
    evaluate,
)
from fedpax.primitives.client_rows import ClientRows, LazySlice, RowRing, aval_of_value, materialize
from fedpax.primitives.device_loop import DeviceLoop
from fedpax.primitives.jaxpr_analysis import depends_on, num_bytes, peak_live_bytes
from fedpax.primitives.layout import (
    explicit_axis,
    mesh_axis,
    shard_over_placement,
    unplaced_aval,
)
from fedpax.primitives.monoids import ADDITION, Monoid, apply_by_monoid
from fedpax.primitives.placement import ChunkSize, Placement
from fedpax.primitives.unit_axis import keep_unit_axis

# chunk_size="auto" runs as many participants at once on a GPU or TPU as fit in this part of the
# chip's memory, and in this many bytes if the chip is smaller or unknown.
AUTO_CHUNK_PART, AUTO_CHUNK_BYTES = 16, 2**30


def run_participants(
    participant_fn: Callable[[jax.Array, list, list], list],
    server_values: Sequence[jax.Array],
    placed_values: Sequence[jax.Array | LazySlice | ClientRows],
    monoids: Sequence[Monoid],
    placement: Placement,
    chunk_size: ChunkSize,
    lazy: Sequence[bool] | None = None,
    first_index: int | jax.Array = 0,
    in_place: Mapping[int, int] = MappingProxyType({}),
) -> list[jax.Array]:
    """Run a function on every participant; stack its first outputs and reduce its last outputs."""
    slices_of = [_shard(v, placement) for v in placed_values]
    axis = mesh_axis(placement)
    devices = 1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis]
    local = placement.size // devices
    chunk_size = chunk_size if local > 1 else None  # one participant needs no loop
    loops = chunk_size == "auto" or (chunk_size or local) < local
    lazy = [
        loops and wanted and not isinstance(v, ClientRows)
        for wanted, v in zip(lazy or [False] * len(slices_of), slices_of, strict=True)
    ]
    slice_types = [
        _local_slice_type(v, local)
        if is_lazy and isinstance(v, LazySlice)
        else unplaced_aval(aval_of_value(v))
        for v, is_lazy in zip(slices_of, lazy, strict=True)
    ]
    index_type = jax.ShapeDtypeStruct((), jnp.int32)
    types = index_type, list(map(jax.typeof, server_values)), slice_types
    traced = jax.make_jaxpr(participant_fn)(*types)
    num_stacked = len(traced.out_avals) - len(monoids)
    kept, totals = _different_totals(traced.jaxpr, monoids)
    outvars = [
        *traced.jaxpr.outvars[:num_stacked],
        *(traced.jaxpr.outvars[num_stacked + i] for i in kept),
    ]
    monoids = [monoids[i] for i in kept]
    jaxpr = eliminate_dead_code(traced.replace(jaxpr=traced.jaxpr.replace(outvars=outvars)))
    uses_index = _uses_index(jaxpr)
    shared = [False, *[True] * len(server_values)]
    for is_lazy, slice_type in zip(lazy, slice_types, strict=True):
        shared += [is_lazy] * len(jax.tree.leaves(slice_type))
    device_jaxpr = jaxpr
    if local == 1:
        placed = [False] * (1 + len(server_values)) + [True] * len(slices_of)
        device_jaxpr = keep_unit_axis(jaxpr, placed, num_stacked)
    ring = None if axis is None else RowRing(axis, devices)
    loop = DeviceLoop(
        functools.partial(evaluate, device_jaxpr),
        jaxpr.out_avals,
        server_values,
        monoids,
        lazy,
        _outputs_by_slice(jaxpr, 1 + len(server_values), slice_types),
        local,
        first_index if uses_index else 0,
        largest_auto_chunk(jaxpr, shared) if chunk_size == "auto" else 1,
        in_place,
        ring,
    )
    if axis is None:
        results = loop.run(slices_of, chunk_size)
    else:
        loop = loop._replace(participant_fn=with_manual_axis(device_jaxpr, axis))
        first_indices = _first_indices(first_index, devices, placement) if uses_index else None
        results = _run_on_devices(loop, axis, first_indices, slices_of, chunk_size)
    return [*results[:num_stacked], *(results[num_stacked + i] for i in totals)]


def _different_totals(jaxpr: Jaxpr, monoids: Sequence[Monoid]) -> tuple[list[int], list[int]]:
    """Return the totals that differ, and for each total its place among these."""
    converted = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"}

    def term(v: Any) -> Any:
        if isinstance(v, Literal) or v not in converted:
            return id(v)
        return term(converted[v].invars[0]), aval_of(v).dtype

    places: dict[Any, int] = {}
    kept: list[int] = []
    totals: list[int] = []
    terms = jaxpr.outvars[len(jaxpr.outvars) - len(monoids) :]
    for i, (v, monoid) in enumerate(zip(terms, monoids, strict=True)):
        key = term(v) if monoid is ADDITION else ("of its own", i)
        if key not in places:
            places[key] = len(kept)
            kept.append(i)
        totals.append(places[key])
    return kept, totals


def _run_on_devices(
    loop: DeviceLoop,
    axis: str,
    first_indices: jax.Array | None,
    slices_of: list[LazySlice | ClientRows],
    chunk_size: ChunkSize,
) -> list[jax.Array]:
    """Run a loop on each device of an axis of the mesh, and reduce the totals over the devices."""
    monoids, devices = loop.monoids, jax.sharding.get_abstract_mesh().shape[axis]

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

    num_stacked = len(loop.out_avals) - len(monoids)
    outputs = jax.shard_map(
        on_device,
        axis_names={axis},
        in_specs=(P(), P(axis), [_in_spec(v, axis) for v in slices_of]),
        out_specs=[*[P(axis)] * num_stacked, *[P()] * len(monoids)],
        # The jaxpr is differentiated already, so it need not know which values vary over the axis.
        check_vma=False,
    )(list(loop.server_values), first_indices, slices_of)
    return [_reshard_to_type(x) for x in outputs]


def _shard(value: Any, placement: Placement) -> LazySlice | ClientRows:
    """Return a placed value as a `LazySlice` whose participants' axis is sharded by the mesh."""
    if isinstance(value, ClientRows):
        return value
    if isinstance(value, LazySlice):
        spec = jax.typeof(value.array).sharding.spec
        if spec[len(value.indices)] == explicit_axis(placement):
            return value
        value = materialize(value)
    return LazySlice(shard_over_placement(value, placement), ())


def _first_indices(first: Any, devices: int, placement: Placement) -> jax.Array:
    """Return the index of the first participant on each device, `[devices]`, sharded."""
    starts = placement.size // devices * jnp.arange(devices, dtype=jnp.int32)
    return shard_over_placement(first + starts, placement)


def _in_spec(value: LazySlice | ClientRows, axis: str) -> LazySlice | ClientRows:
    if isinstance(value, ClientRows):
        return ClientRows(P(axis), P())
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
    dependent, first = [], num_shared
    for slice_type in slice_types:
        after = first + len(jax.tree.leaves(slice_type))
        marked = [first <= i < after for i in range(len(jaxpr.in_avals))]
        dependent.append([o for o, depends in enumerate(depends_on(jaxpr, marked)) if depends])
        first = after
    return dependent


def _reshard_to_type(x: jax.Array) -> jax.Array:
    """Constrain an array to the explicit axes in its type."""
    # JAX 0.10.2 replicates the result of a `shard_map` over the explicit axes of a mixed mesh.
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, spec) if any(entry is not None for entry in spec) else x


def largest_auto_chunk(
    jaxpr: ClosedJaxpr, shared: Sequence[bool], device_kind: str | None = None
) -> int:
    """Return how many participants fit at once, without the arguments that they share."""
    if device_kind is None:
        device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
        device_kind = device.device_kind
    chip, inner = chip_of(device_kind), jaxpr.jaxpr
    fitting = max(AUTO_CHUNK_BYTES, int(chip.hbm_bytes / AUTO_CHUNK_PART) if chip else 0)
    shared_bytes = sum(num_bytes(v) for v, s in zip(inner.invars, shared, strict=True) if s)
    return max(1, fitting // max(1, peak_live_bytes(inner) - shared_bytes))


# ---- run a jaxpr inside a `shard_map` that makes one more mesh axis manual


def with_manual_axis(jaxpr: ClosedJaxpr, axis: str) -> Callable[..., list[jax.Array]]:
    """Return a jaxpr as a function for a region that is manual over a mesh axis."""
    # A jaxpr contains the mesh it was traced on, and JAX raises where the type of an axis differs.
    # This interpreter binds each equation, and retraces inner jaxprs, with the axis manual.
    return functools.partial(_Interpreter(axis).run, jaxpr)


def _without_mesh(const: Any) -> Any:
    """Convert a constant to NumPy, because the type of a JAX array contains its mesh."""
    # Literals of a jaxpr have such a type too, but are not instances of `jax.Array`.
    concrete = hasattr(const, "aval") and not isinstance(const, jax.core.Tracer)
    if concrete and not jnp.issubdtype(const.dtype, jax.dtypes.extended):
        return np.asarray(const)
    return const


class _Interpreter:
    """Bind equations again with one mesh axis manual."""

    def __init__(self, axis: str):
        self.axis = axis

    def run(self, closed: ClosedJaxpr, *args: Any) -> list:
        jaxpr = closed.jaxpr
        consts = map(_without_mesh, closed.consts)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v):
            return _without_mesh(v.val) if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            with ExitStack() as stack:
                stack.enter_context(context_of(eqn))
                mesh = jax.sharding.get_abstract_mesh()
                if not mesh.empty:
                    stack.enter_context(jax.sharding.use_abstract_mesh(self.mesh(mesh)))
                outputs = self.bind(eqn, inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def bind(self, eqn: JaxprEqn, inputs: list) -> list:
        if "call_jaxpr" in eqn.params and eqn.primitive.name.startswith("custom_"):
            # A custom derivative. Differentiation is complete, so only its function is needed.
            return self.run(eqn.params["call_jaxpr"], *inputs)
        if eqn.primitive.name == "shard_map":
            # Its function must be traced where the axes that it makes manual have names.
            body = ClosedJaxpr(eqn.params["jaxpr"], ())
            outputs = jax.shard_map(
                lambda *args: tuple(self.run(body, *args)),
                in_specs=tuple(eqn.params["in_specs"]),
                out_specs=tuple(eqn.params["out_specs"]),
                axis_names=set(eqn.params["newly_manual_axes"]),
                check_vma=eqn.params["check_vma"],  # the types of its collectives depend on it
            )(*inputs)
            return list(outputs)
        if eqn.primitive.name == "pallas_call":
            # A kernel contains no mesh; only the types of the results do.
            types = tuple(self.aval(a) for a in eqn.params["out_avals"])
            return bind_again(eqn, inputs, eqn.params | {"out_avals": types})
        params = {name: self.param(value) for name, value in eqn.params.items()}
        return bind_again(eqn, inputs, params)

    def param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, Jaxpr):
            return self.jaxpr(ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, NamedSharding):
            return NamedSharding(self.mesh(value.mesh), value.spec)
        if isinstance(value, AbstractMesh):
            return self.mesh(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.param, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.param, value))
        return value

    def jaxpr(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        avals = [self.aval(a) for a in closed.in_avals]
        return jax.make_jaxpr(functools.partial(self.run, closed))(*avals)

    def aval(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return aval
        return aval.update(sharding=sharding.update(mesh=self.mesh(sharding.mesh)))

    def mesh(self, mesh: Mesh | AbstractMesh) -> AbstractMesh:
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        if self.axis not in abstract.axis_names:
            return abstract
        return abstract.update_axis_types({self.axis: AxisType.Manual})
