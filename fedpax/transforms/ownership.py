"""The division of a program's values between the server and the participants.

A participant *owns* arguments that are read row by row, and its state in a client store. A *kept*
value replaces an own value.
"""

import functools
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpax.errors import ArgumentError
from fedpax.primitives._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    eliminate_dead_code,
    read_atom,
    rebind,
    result_names,
)
from fedpax.primitives.broadcast import broadcast, federated_broadcast_p
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.mean import federated_mean_p, participant_count_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.sum import federated_sum_p
from fedpax.primitives.user_functions import in_source
from fedpax.transforms.inlining import inline, is_federated
from fedpax.transforms.marks import KEPT, SERVER, has_mark, identity_map, is_mark
from fedpax.transforms.part_of_jaxpr import evaluate_from, needed
from fedpax.transforms.streaming import stream
from fedpax.transforms.streaming_plan import Atom


class Signature(NamedTuple):
    """The flat arguments and results of a program."""

    names: tuple[str, ...]
    # for each result the position of the own argument that it replaces, or None
    replaced: tuple[int | None, ...]


class Owned(NamedTuple):
    """A value that participants own."""

    name: str
    argument: int  # the position among the leaves of the arguments that it is read from
    # the position of the result that takes its place after a round; None: it stays
    result: int | None
    in_store: bool


class Division(NamedTuple):
    """A program whose values are divided between the server and the participants."""

    # `(*server's arguments, *own values) -> (*server's results, *kept values)`; own and kept
    # values are placed
    core: ClosedJaxpr
    # positions of the server's arguments among the program's arguments, and the server's noise
    server_arguments: tuple[int, ...]
    server_results: tuple[int, ...]
    own: tuple[str, ...]  # the names of the own values; the last ones are noise
    # for each own value without noise, the position of the argument that it is read from
    own_arguments: tuple[int, ...]
    stores: frozenset[str]
    kept: tuple[str, ...]  # for each kept value, the name of the own value that it replaces
    read: ClosedJaxpr  # `(*arguments) -> own values`
    # `(*arguments, *kept values) -> results` that are not the server's, in order
    write: ClosedJaxpr


def one_placement(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Placement]:
    """Inline the calls of a program, and return it with the placement of its maps."""
    closed = eliminate_dead_code(inline(closed, inside=lambda inner: inner, with_lines=True))
    for eqn in closed.jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        if eqn.primitive is not federated_map_p and any(map(is_federated, inner)):
            raise ArgumentError(
                f"stages() found a federated_map() inside {eqn.primitive.name!r}{in_source(eqn)}, "
                "expected all maps outside of loops and conditionals: the server's loop would wait "
                "for the participants. Pass one iteration as the program, and loop over its stages."
            )
        if eqn.primitive is federated_map_p and any(has_mark(j, SERVER) for j in inner):
            raise ArgumentError(
                "stages() found a federated_map() that does the server's work (mark_server), "
                "expected maps of the participants' work. Compute it outside of federated_map()."
            )
    federated = (e for e in closed.jaxpr.eqns if e.primitive in (federated_map_p, *REDUCTIONS))
    placements = list(dict.fromkeys(eqn.params["placement"] for eqn in federated))
    if len(placements) != 1:
        listed = " and ".join(map(str, placements)) or "none"
        remedy = (
            "Put the maps of one inside a federated_map() of the other, or make two programs."
            if placements
            else "Pass a round with a federated_map()."
        )
        raise ArgumentError(
            f"stages() needs a program with maps of one placement at its top level, but this one "
            f"has {listed}. {remedy}"
        )
    return closed, placements[0]


def store_reads(closed: ClosedJaxpr) -> dict[Var, int]:
    """Return the values that participants read from a client store, and the store's argument."""
    position = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    store_of: dict[Var, int] = {}
    for eqn in closed.jaxpr.eqns:
        if not is_mark(eqn, KEPT):
            continue
        eqns, sources = needed(closed, eqn.outvars, ())
        if any(e.primitive is federated_map_p for e in eqns):
            continue  # a new state, which is written
        (state,) = eqn.outvars
        aval = aval_of(state)
        stores = [
            v
            for v in sources
            if aval_of(v).dtype == aval.dtype and aval_of(v).shape[1:] == aval.shape[1:]
        ]
        # The clients' indices have no more axes than the rows of a store of integers.
        stores.sort(key=lambda v: aval_of(v).shape[0] == aval.shape[0])
        if stores:
            store_of[state] = position[stores[0]]
    return store_of


def divide(
    closed: ClosedJaxpr,
    placement: Placement,
    signature: Signature,
    owned: Set[int],
    noise: Sequence[str] = (),
) -> Division:
    """Divide the values of a program between the server and the participants."""
    jaxpr = closed.jaxpr
    num_arguments, num_given = len(jaxpr.invars) - len(noise), len(signature.names)
    drawn = jaxpr.invars[num_arguments:]
    reads = {v: i for v, i in store_reads(closed).items() if i in owned}
    own = reads | {v: i for i, v in enumerate(jaxpr.invars) if i in owned - set(reads.values())}
    known = [*own, *drawn]
    kept: list[tuple[Var, int]] = []
    written: dict[int, int | None] = {}  # a result -> the kept value that it is, or None: a store
    for result, (v, i) in enumerate(zip(jaxpr.outvars, signature.replaced, strict=True)):
        if i is None or i not in owned or isinstance(v, Literal):
            continue
        if i in reads.values():
            eqns, _ = needed(closed, [v], known)
            new = [e.outvars[0] for e in eqns if is_mark(e, KEPT)]
            if len(new) > 1:  # no name tells them apart
                raise ArgumentError(
                    f"stages(): the store {signature.names[i]} is written {len(new)} times, or "
                    "together with other arrays, as on a mesh, expected once and by itself. Call "
                    "scatter_clients() once, and pass types (jax.ShapeDtypeStruct) in place of "
                    "arrays on a mesh."
                )
            kept += [(v, i) for v in new]
            written[result] = None
        elif v is jaxpr.invars[i]:
            written[result] = None
        else:
            written[result] = len(kept)
            kept.append((v, i))
    servers = {i: v for i, v in enumerate(jaxpr.invars[:num_arguments]) if i not in owned}
    results = [i for i in range(len(jaxpr.outvars)) if i not in written]
    missing = _missing(closed, [*(jaxpr.outvars[i] for i in results), *(v for v, _ in kept)], known)
    for i in sorted(missing.intersection(owned)):
        raise ArgumentError(
            f"stages(): the program reads the store {signature.names[i]} in other ways than by "
            "gather_clients() and scatter_clients(). Pass own= without it: the server then keeps "
            "the states, and sends them."
        )

    def write(*flat: jax.Array) -> list[Any]:
        arguments, new = flat[:num_given], flat[num_given:]
        values = dict(zip(jaxpr.invars, arguments, strict=False))
        values |= {v: x for (v, i), x in zip(kept, new, strict=True) if i in reads.values()}
        whole = [jaxpr.outvars[result] for result, k in written.items() if k is None]
        rest = iter(evaluate_from(closed, values, whole))
        return [next(rest) if k is None else new[k] for k in written.values()]

    names = _unique([signature.names[i] for i in own.values()])
    by_argument = dict(zip(own.values(), names, strict=True))
    core = _rewrite(
        closed,
        placement,
        list(servers.values()),
        known,
        [jaxpr.outvars[i] for i in results],
        [v for v, _ in kept],
    )
    avals = list(map(aval_of, jaxpr.invars[:num_given]))  # without the server's noise
    return Division(
        eliminate_dead_code(inline(core, stream, with_lines=True)),
        tuple(servers),
        tuple(results),
        (*names, *noise),
        tuple(own.values()),
        frozenset(by_argument[i] for i in reads.values()),
        tuple(by_argument[i] for _, i in kept),
        jax.make_jaxpr(
            lambda *flat: evaluate_from(closed, dict(zip(jaxpr.invars, flat, strict=False)), own)
        )(*avals),
        jax.make_jaxpr(write)(*avals, *(aval_of(v) for v, _ in kept)),
    )


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    occurrences: dict[str, int] = {}
    numbered = []
    for name in names:
        occurrences[name] = occurrences.get(name, 0) + 1
        numbered.append(name if occurrences[name] == 1 else f"{name} ({occurrences[name]})")
    return tuple(numbered)


def _missing(closed: ClosedJaxpr, outputs: Iterable[Atom], own: Container[Var]) -> set[int]:
    """Return the positions of the arguments that the rewritten program would need."""
    _, arguments = needed(closed, outputs, own, with_effects=True)
    return {i for i, v in enumerate(closed.jaxpr.invars) if v in arguments}


def _rewrite(
    closed: ClosedJaxpr,
    placement: Placement,
    servers: Sequence[Var],
    own: Sequence[Var],
    results: Sequence[Atom],
    kept: Sequence[Var],
) -> ClosedJaxpr:
    """Rewrite a program such that participants compute with what they own and receive."""
    eqns, _ = needed(closed, [*results, *kept], own, with_effects=True)
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in eqn.invars:
            if isinstance(v, Var):
                readers.setdefault(v, []).append(eqn)

    by_participants = functools.partial(identity_map, placement=placement)

    def is_read_otherwise(v: Var, *but_by: Any) -> bool:
        """Return whether a value is a result, or other primitives read it."""
        return v in results or any(e.primitive not in but_by for e in readers.get(v, ()))

    def ones() -> jax.Array:
        return by_participants(broadcast(jnp.float32(1), placement))

    def run(*arguments: jax.Array) -> list[Any]:
        values: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(servers, arguments, strict=False))
        values.update(zip(own, map(by_participants, arguments[len(servers) :]), strict=True))
        computed = set(own)  # the values that participants compute, and all that depend on them
        for eqn in eqns:
            inputs = [read_atom(v, values) for v in eqn.invars]
            federated = eqn.params.get("placement") == placement
            is_reduction = federated and eqn.primitive in REDUCTIONS
            if is_reduction:
                inputs = [
                    x if v in computed else by_participants(x)
                    for v, x in zip(eqn.invars, inputs, strict=True)
                ]
                if eqn.primitive is federated_mean_p and len(inputs) == 1:
                    inputs.append(ones())
            if federated and eqn.primitive is participant_count_p:
                outputs = [federated_sum_p.bind(ones(), placement=placement)]
            else:
                outputs = rebind(eqn, inputs)
            by_map = federated and eqn.primitive is federated_map_p
            if federated and eqn.primitive is federated_broadcast_p:
                # What only maps read is broadcast in front of them.
                if is_read_otherwise(eqn.outvars[0], federated_map_p):
                    outputs, by_map = list(map(by_participants, outputs)), True
            elif by_map:
                # Returned as it is, an own value would be the argument, which the server must not
                # read.
                names = result_names(eqn.params["jaxpr"])
                for i, argument in _forwarded(eqn):
                    shown = is_read_otherwise(eqn.outvars[i], federated_map_p, *REDUCTIONS)
                    if shown and argument in computed:
                        outputs[i] = identity_map(outputs[i], placement, names[i])
            if by_map or (not is_reduction and not computed.isdisjoint(_variables(eqn))):
                computed.update(eqn.outvars)
            for v, x in zip(eqn.outvars, outputs, strict=True):
                values.setdefault(v, x)
        new = [by_participants(values[v]) for v in kept]
        return [*(read_atom(v, values) for v in results), *new]

    avals = [aval_of(v) for v in (*servers, *own)]
    return jax.make_jaxpr(run)(*avals)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


def _forwarded(eqn: JaxprEqn) -> Iterator[tuple[int, Atom]]:
    """Yield the results of a map that are its arguments, and these."""
    inner = eqn.params["jaxpr"].jaxpr
    for i, v in enumerate(inner.outvars):
        if v in inner.invars:
            yield i, eqn.invars[inner.invars.index(v)]
