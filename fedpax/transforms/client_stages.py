"""The participant's side of a plan: one function for each loop, with its messages."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.errors import ArgumentError
from fedpax.primitives._jax import ClosedJaxpr, Var, aval_of, eliminate_dead_code, evaluate
from fedpax.primitives.monoids import ADDITION, MAXIMUM, MINIMUM, Monoid, apply_by_monoid
from fedpax.transforms.marks import Noise
from fedpax.transforms.part_of_jaxpr import EqualValues
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.streaming import loop_body, loop_monoids
from fedpax.transforms.streaming_plan import StreamingPlan
from fedpax.transforms.value_names import CONSTANT, Names, operation_of, type_of

ClientFn = Callable[
    [Any, Sequence[Any], Sequence[Any], Mapping[str, Any]],
    tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]],
]

# The monoids whose totals are single arrays, so that equal terms can be sent once.
ELEMENTWISE = (ADDITION, MAXIMUM, MINIMUM)


class Value(NamedTuple):
    """A value that a participant receives, has, sends or keeps."""

    name: str
    shape: tuple[int, ...]  # for one participant
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape, dtype=int)) * int(self.dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}, {self.nbytes:,} B"


class Stage(NamedTuple):
    """The messages of one stage, as one participant sees them."""

    shared: tuple[Value, ...]
    rows: tuple[Value, ...]
    own: tuple[Value, ...]
    noise: tuple[Noise, ...]  # random numbers that the participant draws and tells nobody
    terms: tuple[Value, ...]
    shown: tuple[Value, ...]  # the server reads them participant by participant
    kept: tuple[Value, ...]  # values that it keeps: new states, and values that a later stage reads


class ClientStage(NamedTuple):
    """The function of one participant in the loop of a phase."""

    number: int
    phase: int
    size: int
    body: ClosedJaxpr  # `(index, *unplaced, *slices) -> (*stored values, *terms)`
    shared: tuple[Var, ...]
    # for each unplaced input, the name of the known value; None for the next shared one
    unplaced: tuple[str | None, ...]
    rows: tuple[Var, ...]
    # for each slice, the name of the own value; None for the next row
    slices: tuple[str | None, ...]
    stored: tuple[Var, ...]
    shown: tuple[Var, ...]
    # name of a kept value -> the stored value, or its name at an earlier stage
    kept: Mapping[str, Var | str]
    monoids: tuple[Monoid, ...]
    sent: tuple[int, ...]
    places: tuple[int, ...]  # of each term among those that are sent
    weights: Mapping[int, int]  # place of a mean's weighted sum -> place of its weight
    messages: Stage

    def client(
        self, index: Any, shared: Sequence[Any], rows: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Run the stage for one participant; see `Stages.client`."""
        expected = [v.name for v in self.messages.own] + [v.name for v in self.messages.noise]
        missing = [name for name in expected if name not in own]
        if missing:
            raise ArgumentError(
                f"client({self.number}): own has no {missing[0]!r}, expected {expected}. Pass the "
                "participant's values by these names, what the earlier stages of the round "
                "returned as kept, and draw_noise() of the stage."
            )
        sent = iter(shared)
        unplaced = [next(sent) if name is None else own[name] for name in self.unplaced]
        received = iter(rows)
        slices = [next(received) if name is None else own[name] for name in self.slices]
        outputs = evaluate(self.body, jnp.int32(index), *unplaced, *slices)
        stored = dict(zip(self.stored, outputs, strict=False))
        terms = outputs[len(self.stored) :]
        return (
            tuple(terms[i] for i in self.sent),
            tuple(stored[v] for v in self.shown),
            {n: own[v] if isinstance(v, str) else stored[v] for n, v in self.kept.items()},
        )

    def merge(self, some: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
        """Merge the terms of two groups of participants."""
        return tuple(
            apply_by_monoid(self._sent_monoids(), lambda m, a, b: m.merge(a, b), some, others)
        )

    def fold(self, terms: Sequence[Any]) -> tuple[Any, ...]:
        """Merge the rows of arrays of terms."""
        return tuple(apply_by_monoid(self._sent_monoids(), lambda m, a: m.reduce(a), terms))

    def read(
        self, terms: Sequence[Any], shown: Sequence[Any], participants: Sequence[int]
    ) -> tuple[list[Any], dict[Var, Any]]:
        """Return the totals and the stored values for the server, given a reply."""
        where = f"The reply to stage {self.number}"
        indices = np.asarray(participants, int)
        if len(beyond := indices[(indices < 0) | (indices >= self.size)]):
            raise ArgumentError(
                f"{where} counts participant {beyond[0]}, expected numbers from 0 to "
                f"{self.size - 1}. Send the indices that the participants ran with."
            )
        answered = np.zeros(self.size, bool)
        answered[indices] = True
        if len(indices) != answered.sum():
            raise ArgumentError(f"{where} counts a participant twice. Merge each answer once.")
        if not len(indices):
            terms, shown = self.identities(), [None] * len(self.shown)
        for arrays, values, noun in (
            (terms, self.messages.terms, "terms"),
            (shown, self.messages.shown, "shown values"),
        ):
            if len(arrays) != len(values):
                raise ArgumentError(
                    f"{where} has {len(arrays)} {noun}, expected {len(values)}. Send what client() "
                    "returns."
                )
        stored = {
            v: self._place(x, indices, value)
            for v, x, value in zip(self.shown, shown, self.messages.shown, strict=True)
        }
        return [terms[i] for i in self.places], stored

    def _place(self, rows: Any, indices: np.ndarray, value: Value) -> Any:
        """Place the rows of the participants that answered among zeros."""
        if len(indices) == self.size and np.array_equal(indices, np.arange(self.size)):
            return rows
        placed = jnp.zeros((self.size, *value.shape), value.dtype)
        return placed if rows is None else placed.at[indices].set(rows)

    def identities(self) -> list[Any]:
        """Return the terms without participants."""
        avals = [self.body.out_avals[len(self.stored) + i] for i in self.sent]
        values = apply_by_monoid(
            self._sent_monoids(), lambda m, own: m.identity([a.dtype for a in own]), avals
        )
        return [jnp.broadcast_to(x, a.shape) for x, a in zip(values, avals, strict=True)]

    @property
    def adds(self) -> bool:
        """Whether all terms that are sent are sums."""
        return all(monoid == ADDITION for monoid in self._sent_monoids())

    def _sent_monoids(self) -> list[Monoid]:
        return [self.monoids[i] for i in self.sent]


def first_noisy_request(
    plan: StreamingPlan, stages: Sequence[ClientStage], noise: Collection[Var]
) -> int | None:
    """Return the first stage whose request depends on noise of the server; None without one."""
    noisy = set(noise)
    for eqn in plan.jaxpr.eqns:
        if any(v in noisy for v in plan.operands(eqn) if isinstance(v, Var)):
            noisy.update(eqn.outvars)
    return next((s.number for s in stages if noisy.intersection([*s.shared, *s.rows])), None)


def has_opened_noise(noisy_request: int | None, noises: Sequence[Any], stage: int) -> bool:
    """Return whether a round that repeats from a stage spends the epsilon of its noise twice."""
    return (noisy_request is not None and noisy_request <= stage) or any(noises[:stage])


class StageBuilder:
    """Makes the stages of a plan; `noise` has the standard deviations of own values."""

    def __init__(
        self,
        plan: StreamingPlan,
        server: ServerParts,
        server_names: Sequence[str],
        own: Sequence[str],
        kept: Sequence[str],
        known: Collection[str],
        noise: Mapping[str, float],
    ) -> None:
        self.plan, self.noise = plan, noise
        servers = zip(plan.jaxpr.invars, server_names, strict=False)
        self.known = {v: name for v, name in servers if name in known}
        self.own = dict(zip(plan.jaxpr.invars[len(server_names) :], own, strict=True))
        given = zip(plan.jaxpr.invars, (*server_names, *own), strict=True)
        self.names = Names(plan.jaxpr, {v: [(name, type_of(v))] for v, name in given})
        results = len(server.outputs) - len(kept)
        # Kept values are results of maps, and no literals.
        outputs = [v for v in server.outputs[results:] if isinstance(v, Var)]
        self.kept = list(zip(kept, outputs, strict=True))
        self.read_by_server = {v for inputs in server.inputs for v in inputs}
        self.read_by_server.update(v for v in server.outputs[:results] if isinstance(v, Var))
        self.phases = [p for p in sorted(plan.loops) if plan.stored[p] or plan.reductions.get(p)]
        self.read_by_loops: dict[int, list[Var]] = {}
        for phase in self.phases:
            shared, self.read_by_loops[phase] = plan.loop_inputs(phase)
            self.read_by_server.update(shared)
        self.carried: dict[Var, str] = {}

    def stages(self) -> list[ClientStage]:
        """Make the stages."""
        stages = [self._stage(number, phase) for number, phase in enumerate(self.phases)]
        names = [v.name for stage in stages for v in stage.messages.noise]
        if len(set(names)) < len(names):
            raise ArgumentError(
                "stages() found noise that two stages read, expected one: the function of the map "
                "would run twice. Return what the second stage needs from another federated_map()."
            )
        return stages

    def _stage(self, number: int, phase: int) -> ClientStage:
        plan = self.plan
        unplaced, placed = plan.loop_inputs(phase)
        shared = [v for v in unplaced if v not in self.known]
        slices = [self.carried.get(v, self.own.get(v)) for v in placed]
        rows = [v for v, name in zip(placed, slices, strict=True) if name is None]
        stored = list(plan.stored[phase])
        types = [jax.ShapeDtypeStruct(*_kind(self._slice(v))) for v in placed]
        body = eliminate_dead_code(
            jax.make_jaxpr(loop_body(plan, phase))(
                jax.ShapeDtypeStruct((), jnp.int32), list(map(aval_of, unplaced)), types
            )
        )
        kept = self._kept(number, stored)
        own = {name: v for v, name in zip(placed, slices, strict=True) if name is not None}
        own |= {self.carried[v]: v for v in kept.values() if v not in stored}
        shown = [v for v in stored if v in self.read_by_server]
        monoids = loop_monoids(plan, phase)
        sent, places = _sent_terms(body, len(stored), monoids)
        terms, names = body.out_avals[len(stored) :], list(self._term_names(phase))
        return ClientStage(
            number=number,
            phase=phase,
            size=plan.placement.size,
            body=body,
            shared=tuple(shared),
            unplaced=tuple(self.known.get(v) for v in unplaced),
            rows=tuple(rows),
            slices=tuple(slices),
            stored=tuple(stored),
            shown=tuple(shown),
            kept={n: v if v in stored else self.carried[v] for n, v in kept.items()},
            monoids=tuple(monoids),
            sent=sent,
            places=places,
            weights=dict(self._weights(phase, places)),
            messages=Stage(
                shared=tuple(Value(self.names.of(v), *_kind(aval_of(v))) for v in shared),
                rows=tuple(Value(self.names.of(v), *_kind(self._slice(v))) for v in rows),
                own=(
                    *(
                        Value(name, *_kind(self._slice(v)))
                        for name, v in own.items()
                        if name not in self.noise
                    ),
                    *(Value(n, *_kind(aval_of(v))) for v, n in self.known.items() if v in unplaced),
                ),
                noise=tuple(
                    Noise(name, *_kind(self._slice(v)), self.noise[name])
                    for name, v in own.items()
                    if name in self.noise
                ),
                terms=tuple(Value(names[i], *_kind(terms[i])) for i in sent),
                shown=tuple(Value(self.names.of_placed(v), *_kind(self._slice(v))) for v in shown),
                kept=tuple(Value(name, *_kind(self._slice(v))) for name, v in kept.items()),
            ),
        )

    def _kept(self, number: int, stored: Sequence[Var]) -> dict[str, Var]:
        """Return what a participant keeps at a stage; values for later stages get names here."""
        later = {v for phase in self.phases[number + 1 :] for v in self.read_by_loops[phase]}
        is_last = number == len(self.phases) - 1
        if not is_last:
            later.update(v for _, v in self.kept)
        kept: dict[str, Var] = {}
        for v in stored:
            if v in later:
                name = f"stage {number}: {self.names.of_placed(v)}"
                copies = sum(name == other.partition(" #")[0] for other in self.carried.values())
                self.carried[v] = f"{name} #{copies + 1}" if copies else name
                kept[self.carried[v]] = v
        return kept | (dict(self.kept) if is_last else {})

    def _term_names(self, phase: int) -> Iterator[str]:
        for reduction in self.plan.reductions.get(phase, ()):
            operands = self.plan.operands(reduction.eqn)
            operation = operation_of(reduction.eqn)
            for i, _ in enumerate(reduction.monoids):
                is_weight = i == 1 and operation == "mean"
                name = self.names.of_placed(operands[min(i, len(operands) - 1)])
                if name == CONSTANT and (is_weight or operation == "sum"):
                    yield f"number of {self.plan.placement.name}"
                else:
                    yield f"{'sum' if is_weight else operation} of {name}"

    def _weights(self, phase: int, places: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the places of the two terms of each mean."""
        number = 0
        for reduction in self.plan.reductions.get(phase, ()):
            if operation_of(reduction.eqn) == "mean":
                yield places[number], places[number + 1]
            number += len(reduction.monoids)

    def _slice(self, v: Var) -> jax.ShapeDtypeStruct:
        """Return the type of one participant's slice of a placed value."""
        aval = aval_of(v)
        axis = self.plan.axis[v] if self.plan.is_stored(v) else 0
        shape = tuple(size for i, size in enumerate(aval.shape) if i != axis)
        return jax.ShapeDtypeStruct(shape, aval.dtype)


def _sent_terms(
    body: ClosedJaxpr, num_stored: int, monoids: Sequence[Monoid]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the terms that are sent, once if they are equal, and each term's place among them."""
    equal = EqualValues(body.jaxpr)
    place: dict[Hashable, int] = {}
    sent: list[int] = []
    places: list[int] = []
    for i, (v, monoid) in enumerate(zip(body.jaxpr.outvars[num_stored:], monoids, strict=True)):
        key: Hashable = i
        if monoid in ELEMENTWISE:
            key = ELEMENTWISE.index(monoid), equal.number(v)
        if key not in place:
            place[key] = len(sent)
            sent.append(i)
        places.append(place[key])
    return tuple(sent), tuple(places)


def _kind(aval: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(aval.shape), aval.dtype
