"""`federated_map`: a function, run by every participant on its own values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedpax.primitives._jax import ClosedJaxpr, Primitive, evaluate, trace, with_manual_axis
from fedpax.primitives.broadcast import broadcast
from fedpax.primitives.call import define_call
from fedpax.primitives.layout import (
    check_divides,
    lay_out,
    mesh_axis,
    placed_aval,
    unplaced_aval,
)
from fedpax.primitives.live_bytes import live_bytes, size_of
from fedpax.primitives.placement import (
    ClientsPerStep,
    Placement,
    check_clients_per_step,
    check_placed,
    enter,
    resolve,
)
from fedpax.primitives.reduce import Monoid

# What "auto" lets the participants of a GPU or TPU hold between them, in bytes.
AUTO_BYTES = 2**30

federated_map_p = Primitive("federated_map")
federated_map_p.multiple_results = True


def federated_map(
    fn: Callable[..., Any],
    *args: Any,
    placement: str | None = None,
    clients_per_step: ClientsPerStep = None,
) -> Any:
    """Runs a function on every participant: `out[i] = fn(*[a[i] for a in args])`.

    Server values that `fn` closes over are broadcast to the participants. Inside `fn` the model
    axes of a mesh are as outside; participants cannot see each other.

    Args:
        fn: takes one participant's slices, returns a pytree of arrays or numbers. Under
            `jax.checkpoint` it is run again where its results are wanted later, in a derivative or
            behind a reduction, instead of keeping them for every participant.
        *args: pytrees of arrays `[n, ...]`, placed; any dtype. May be none at all.
        placement: the placement's name; needed where the program has several.
        clients_per_step: how many participants a device runs at once. A smaller number needs less
            memory; 1 runs `fn` unbatched, so that its conditionals and loops stay what they are.
            "auto" is 1 on CPU, where a core gains nothing from a batch of clients. On GPU and TPU
            it is as many as hold 1 GiB between them, by what `fn` keeps alive at once according to
            its jaxpr (a model's parameters, gradients and activations): work enough for a device,
            and little of its memory; at least 1, and made smaller until the chunks are of about
            one size. None takes the program's setting.

    Returns:
        What `fn` returns, with an axis of size `n` in front of every leaf.

    Raises:
        RuntimeError: outside of a program.
        TypeError: an argument's leaf, or a result of `fn`, that is no array and no number.
        ValueError: a leaf without the placement's axis, an unknown placement, none named where
            there are several, a placement that the mesh does not divide, or `clients_per_step` < 1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fedpax
        >>> @fedpax.program(clients=2)
        ... def step(w, x):
        ...     return fedpax.federated_map(lambda x: jax.grad(lambda w: (w * x) ** 2)(w), x)
        >>> step(1.0, jnp.array([1.0, 3.0])).tolist()
        [2.0, 18.0]
    """
    active = resolve("federated_map", placement)
    target = active.placement
    check_clients_per_step(clients_per_step)
    check_divides(target)
    if not callable(fn):
        raise TypeError(
            f"federated_map(): fn is of type {type(fn).__name__}, expected a function of one "
            "participant's values. Pass the function first, then the placed values."
        )
    tree: Any = jax.tree.structure(args)
    leaves = []
    for i, arg in enumerate(args):
        leaves += check_placed("federated_map", arg, target, f"args[{i}]")
    leaves = [lay_out(leaf, target) for leaf in leaves]
    out_trees: list[Any] = []

    def flat(*slices):
        with enter(target.name):
            out = fn(*jax.tree.unflatten(tree, slices))
        outputs, out_tree = jax.tree.flatten_with_path(out)
        out_trees.append(out_tree)
        return [_check_output(leaf, path) for path, leaf in outputs]

    jaxpr, closed_over = trace(flat, [unplaced_aval(jax.typeof(leaf)) for leaf in leaves])
    outputs = federated_map_p.bind(
        *[broadcast(c, target) for c in closed_over],
        *leaves,
        jaxpr=jaxpr,
        placement=target,
        clients_per_step=active.clients_per_step if clients_per_step is None else clients_per_step,
    )
    return jax.tree.unflatten(out_trees[0], outputs)


def _check_output(leaf: Any, path: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf
    except TypeError:
        raise TypeError(
            f"federated_map(): fn returned {type(leaf).__name__} at out{jax.tree_util.keystr(path)}"
            ", expected arrays or numbers. Return arrays, or None for nothing."
        ) from None


def _implementation(*args, jaxpr, placement, clients_per_step):
    whole = [None] * len(jaxpr.out_avals)
    return run_participants(jaxpr, (), args, whole, placement, clients_per_step)


def run_participants(
    jaxpr: ClosedJaxpr,
    shared: Sequence[jax.Array],
    placed: Sequence[jax.Array],
    reductions: Sequence[Monoid | None],
    placement: Placement,
    clients_per_step: ClientsPerStep,
) -> list:
    """Runs a function on every participant, and reduces what it returns as they come.

    Args:
        jaxpr: takes the shared values, then one participant's slices of the placed ones.
        shared: server values.
        placed: arrays `[n, ...]`.
        reductions: for each output how to combine it over the participants, or None to stack it.
        placement: who runs it.
        clients_per_step: how many of them a device runs at once.

    Returns:
        For each output an array `[n, ...]`, or its total over all participants.
    """
    placed = [lay_out(a, placement) for a in placed]
    axis = mesh_axis(placement)
    fits = max(1, AUTO_BYTES // _bytes_of_one(jaxpr, len(shared)))
    if axis is None:
        one: Callable[..., list] = functools.partial(evaluate, jaxpr)
        loop = _Loop(one, jaxpr.out_avals, shared, reductions, placement.size, fits)
        return loop.run(placed, clients_per_step)
    one = with_manual_axis(jaxpr, axis)
    devices = jax.sharding.get_abstract_mesh().shape[axis]
    local = placement.size // devices

    def on_device(shared, placed):
        loop = _Loop(one, jaxpr.out_avals, shared, reductions, local, fits)
        outputs = loop.run(placed, clients_per_step)
        # Alone on its axis a device has the totals, and XLA's partitioner fails at a collective.
        if devices == 1:
            return outputs
        for collective in dict.fromkeys(r.collective for r in reductions if r):
            chosen = [i for i, r in enumerate(reductions) if r and r.collective is collective]
            totals = collective([outputs[i] for i in chosen], axis)
            for i, total in zip(chosen, totals, strict=True):
                outputs[i] = total
        return outputs

    # All differentiation has been done on the jaxpr, so nothing needs to know which values vary.
    outputs = jax.shard_map(
        on_device,
        axis_names={axis},
        in_specs=(P(), P(axis)),
        out_specs=[P() if r else P(axis) for r in reductions],
        check_vma=False,
    )(list(shared), placed)
    return [_as_typed(x) for x in outputs]


def _as_typed(x: jax.Array) -> jax.Array:
    """Tells the compiler the explicit axes in an array's type, which it may otherwise give up.

    JAX 0.10.2 says of a shard_map's results only where the manual axis lies; returned from `jit` on
    a mesh of mixed axes, they would be replicated over the explicit ones, and typed so.
    """
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, spec) if any(entry is not None for entry in spec) else x


def _bytes_of_one(jaxpr: ClosedJaxpr, shared: int) -> int:
    """What one participant holds, without the server values that all of them share."""
    inner = jaxpr.jaxpr
    return max(1, live_bytes(inner) - sum(map(size_of, inner.invars[:shared])))


class _Loop(NamedTuple):
    """The participants of one device, some of them batched, one chunk after another.

    Attributes:
        one: what a participant runs: shared values and slices in, a list out.
        out_avals: the types of what it returns.
        shared: server values.
        reductions: for each output how to combine it, or None to stack it.
        participants: how many there are.
        fits: how many of them "auto" batches on an accelerator.
    """

    one: Callable[..., list]
    out_avals: Sequence[Any]
    shared: Sequence[jax.Array]
    reductions: Sequence[Monoid | None]
    participants: int
    fits: int

    def run(self, placed: Sequence[jax.Array], at_once: ClientsPerStep) -> list:
        if at_once == "auto":
            return jax.lax.platform_dependent(
                *placed,
                cpu=lambda *placed: self.run(placed, 1),
                default=lambda *placed: self.run(placed, self.even_chunk()),
            )
        size = min(at_once or self.participants, self.participants)
        chunks, rest = divmod(self.participants, size)
        if chunks == 1 and not rest:
            return self.chunk(size, placed)

        # What is stacked takes the place of an argument of its type, row by row: a state that is
        # donated needs no second buffer. An argument that is not is copied there.
        owners = self.owners(placed)

        def take(size: int, carry: tuple) -> tuple:
            start, stored, totals = carry
            current = list(placed)
            for i, whole in zip(owners, stored, strict=True):
                if i is not None:
                    current[i] = whole
            parts = [jax.lax.dynamic_slice_in_dim(a, start, size) for a in current]
            own, terms = self.split(self.chunk(size, parts))
            write = jax.lax.dynamic_update_slice_in_dim
            stored = [write(whole, o, start, 0) for whole, o in zip(stored, own, strict=True)]
            return start + size, stored, self.merge(totals, terms)

        # The starts are counted and not scanned over: an array of them would grow with the clients.
        # The results are carried and not stacked, so that the rest is written into the same arrays.
        room = [
            _unwritten(self.participants, aval) if i is None else placed[i]
            for i, aval in zip(owners, self.stacked(), strict=True)
        ]
        carry, _ = jax.lax.scan(
            lambda carry, _: (take(size, carry), None), (0, room, self.start()), length=chunks
        )
        _, stored, totals = take(rest, carry) if rest else carry
        in_order = iter(stored), iter(totals)
        return [next(in_order[r is not None]) for r in self.reductions]

    def even_chunk(self) -> int:
        """The chunk of "auto": as few chunks as fit, and all about as large."""
        chunks = -(-self.participants // self.fits)
        return -(-self.participants // chunks)

    def chunk(self, size: int, parts: Sequence[jax.Array]) -> list:
        """Runs `size` participants: outputs come back stacked, or combined."""
        if size > 1:
            outputs = jax.vmap(lambda *slices: self.one(*self.shared, *slices), axis_size=size)(
                *parts
            )
            return [
                r.reduce(o, axis=0) if r else o
                for r, o in zip(self.reductions, outputs, strict=True)
            ]
        # Not batched: conditionals stay conditionals and convolutions stay ungrouped.
        outputs = self.one(*self.shared, *[jax.lax.squeeze(p, [0]) for p in parts])
        return [
            o if r else jnp.expand_dims(o, 0) for r, o in zip(self.reductions, outputs, strict=True)
        ]

    def split(self, outputs: Sequence[jax.Array]) -> tuple[list, list]:
        pairs = list(zip(self.reductions, outputs, strict=True))
        return [o for r, o in pairs if not r], [o for r, o in pairs if r]

    def stacked(self) -> list:
        """The types of what one participant returns to be stacked."""
        return [a for r, a in zip(self.reductions, self.out_avals, strict=True) if not r]

    def owners(self, placed: Sequence[jax.Array]) -> list[int | None]:
        """For each of them the first argument of its type that no other has, if there is one."""
        free = [(i, _layout(unplaced_aval(jax.typeof(a)))) for i, a in enumerate(placed)]
        found: list[int | None] = []
        for aval in self.stacked():
            own = next((entry for entry in free if entry[1] == _layout(aval)), None)
            found.append(own and own[0])
            if own:
                free.remove(own)
        return found

    def start(self) -> list:
        return [
            _filled(r.start(aval.dtype), aval)
            for r, aval in zip(self.reductions, self.out_avals, strict=True)
            if r
        ]

    def merge(self, totals: Sequence[jax.Array], terms: Sequence[jax.Array]) -> list:
        merges = [r.merge for r in self.reductions if r]
        return [m(a, b) for m, a, b in zip(merges, totals, terms, strict=True)]


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


def _inner(aval, *, placement: Placement, clients_per_step):
    return unplaced_aval(aval)


def _outer(aval, *, placement: Placement, clients_per_step):
    return placed_aval(aval, placement)


define_call(
    federated_map_p, inner=_inner, outer=_outer, batch_dim=1, implementation=_implementation
)
