"""Stages: a program as functions of the server and of one participant, with typed messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedpax.primitives._jax import Var, aval_of, evaluate
from fedpax.primitives.placement import trace_for_stages
from fedpax.primitives.user_functions import function_name
from fedpax.transforms.client_stages import ClientFn, Stage, StageBuilder, first_noisy_request
from fedpax.transforms.coded_terms import CodedStage, code_terms
from fedpax.transforms.division_checks import (
    check_means,
    divide_arguments,
    find_by_name,
    own_by_name,
    read_by_rows,
)
from fedpax.transforms.marks import Noise, least_masked, noise_as_arguments
from fedpax.transforms.ownership import Division, Owned, one_placement, store_reads
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.stage_noise import draw_noise
from fedpax.transforms.streaming_plan import StreamingPlan
from fedpax.transforms.wiring import ProgramIO, Wiring, describe, output_of, trace_program, wire


class Request(NamedTuple):
    """A message of the server to the participants of a stage."""

    stage: int
    shared: tuple[jax.Array, ...]
    rows: tuple[jax.Array, ...]  # arrays `[n, ...]`; participant i receives row i of each


class Reply(NamedTuple):
    """The answers of the participants to a `Request`; a plain tuple will do."""

    # the terms of the participants that answered, merged. Without an answer, `()`.
    terms: Sequence[Any]
    shown: Sequence[Any]  # arrays `[answers, ...]`, a row for each participant that answered
    participants: Sequence[int]  # the indices of these participants, in the order of the rows


def drive(server: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Answer each request of a generator, and return its result; None if an answer is None."""
    reply = None
    while True:
        try:
            request = server.send(reply)
        except StopIteration as end:
            return end.value
        if (reply := answer(request)) is None:
            return None


class Stages:
    """A program divided into stages, as `fedpax.stages` makes it.

    `len(stages)` is their number, and `stages[i]` lists the messages of one (`Stage`).

    Attributes:
        placement: the participants' name and number.
        least_masked: the fewest participants of a sum that the server may see, if terms must be
            masked (`secure_mean`, `private_secure_mean`). None: terms need no masks.
        server_noise: the noise that the server draws at each run, as for `private_mean`.
        noisy_request: the first stage whose request depends on this noise. None: no stage.
    """

    def __init__(
        self,
        name: str,
        io: ProgramIO,
        division: Division,
        plan: StreamingPlan,
        known: Collection[int] = (),
        noise: Mapping[str, float] | None = None,
        least_masked: int | None = None,
        server_noise: Sequence[Noise] = (),
    ) -> None:
        self.least_masked, self.server_noise = least_masked, tuple(server_noise)
        self.name, self.placement = name, plan.placement
        self._io, self._division, self._plan = io, division, plan
        self._server = ServerParts(plan)
        self._parts = [
            jax.jit(functools.partial(self._server.run, part))
            for part in range(self._server.number)
        ]
        servers = self._server_names()
        self._known = {io.names[i]: i for i in sorted(known)}
        self._stages = StageBuilder(
            plan, self._server, servers, division.own, division.kept, self._known, noise or {}
        ).stages()
        drawn = [v for v, n in zip(plan.jaxpr.invars, servers, strict=False) if n not in io.names]
        self.noisy_request = first_noisy_request(plan, self._stages, drawn)
        self._clients = [jax.jit(stage.client) for stage in self._stages]
        self._coded = [code_terms(stage) for stage in self._stages]
        self._merges = [jax.jit(stage.merge) for stage in self._stages]
        self._folds = [jax.jit(stage.fold) for stage in self._stages]
        self._read = jax.jit(functools.partial(evaluate, division.read))
        self._write = jax.jit(functools.partial(evaluate, division.write))

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, stage: int) -> Stage:
        return self._stages[stage].messages

    def __iter__(self) -> Iterator[Stage]:
        return iter([stage.messages for stage in self._stages])

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The name of each leaf of the arguments."""
        return self._io.names

    @property
    def result_names(self) -> tuple[str, ...]:
        """The name of each leaf of the results."""
        return self._io.result_names

    @property
    def replaced(self) -> dict[int, int]:
        """Positions of results that become arguments of the next round -> the arguments'."""
        return {i: k for i, k in enumerate(self._io.replaced) if k is not None}

    @property
    def owned(self) -> tuple[Owned, ...]:
        """What participants own."""
        results = {argument: result for result, argument in self.replaced.items()}
        division = self._division
        return tuple(
            Owned(name, i, results[i] if name in division.kept else None, name in division.stores)
            for name, i in zip(division.own, division.own_arguments, strict=False)
        )

    def result(self, leaves: Mapping[int, Any]) -> Any:
        """Return the result of a program from its leaves by position; missing ones are types."""
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._io.out_avals]
        results = [leaves.get(i, aval) for i, aval in enumerate(types)]
        return jax.tree.unflatten(self._io.out_tree, results)

    def client(self, stage: int) -> ClientFn:
        """Return the function of one participant at a stage.

        Args:
            stage: number of the stage.

        Returns:
            `(index, shared, rows, own) -> (terms, shown, kept)`, under `jax.jit`.

            - index: the participant's index, an int32.
            - shared: the arrays of the request.
            - rows: the participant's row of each array of rows of the request.
            - own: the participant's values by name: own, known and kept ones of earlier stages,
              and noise for this call (`draw_noise`). Other names are ignored.
            - terms: arrays for `merge` with the terms of other participants.
            - shown: arrays that the server reads as they are.
            - kept: arrays by name, for later stages. The last stage returns new states under the
              names of the own values that they replace after the round.
        """
        return self._clients[stage]

    def _server_names(self) -> list[str]:
        names = [*self._io.names, *(v.name for v in self.server_noise)]
        return [names[i] for i in self._division.server_arguments]

    def draw_server_noise(self) -> dict[str, Any]:
        """Draw the noise of the server for a run, by name, as `draw_noise` does."""
        return draw_noise(v._asdict() for v in self.server_noise)

    def draw_noise(self, stage: int) -> dict[str, Any]:
        """Draw the noise of one participant for a call of its function, by name.

        It comes from the operating system's randomness, and leaves the participant only in sums.
        """
        return draw_noise(v._asdict() for v in self[stage].noise)

    def merge(self, stage: int) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]:
        """Return the function `(terms, terms) -> terms` of a stage. It is associative."""
        return self._merges[stage]

    def adds(self, stage: int) -> bool:
        """Return whether all terms of a stage are sums."""
        return self._stages[stage].adds

    def weights(self, stage: int) -> Mapping[int, int]:
        """Return the place of the weight of each mean's weighted sum, by the place of the sum."""
        return self._stages[stage].weights

    def coded(self, stage: int) -> CodedStage | None:
        """Return a stage whose participants send encoded words; None if none are fewer bytes."""
        return self._coded[stage]

    def seen(self, stage: int) -> dict[str, int]:
        """Return the places, among shown values, of the values kept for a later stage, by name."""
        each = self._stages[stage]
        return {name: each.shown.index(v) for name, v in each.kept.items() if v in each.shown}

    def fold(self, stage: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Return the function that merges the rows of arrays of terms `[participants, ...]`."""
        return self._folds[stage]

    def run(self, *args: Any) -> Generator[Request, Reply | tuple[Any, Any, Any], Any]:
        """Run the server's part of the program.

        Args:
            *args: the arguments of the program. Types (`jax.ShapeDtypeStruct`) will do for values
                that participants own or know.

        Yields:
            A `Request` for each stage.

        Receives:
            A `Reply`.

        Returns:
            The result, as the value of `StopIteration`. A result that participants keep is a type.

        Raises:
            RuntimeError: an argument of the server was donated to an earlier call.
            TypeError: an argument of the server is a type, or has another type than at
                `fedpax.stages`.
            ValueError: a reply does not fit the stage.
        """
        jaxpr = self._plan.jaxpr
        arguments = zip(self._division.server_arguments, jaxpr.invars, strict=False)
        used = {v for inputs in self._server.inputs for v in inputs}
        used.update(v for v in self._server.outputs if isinstance(v, Var))
        for each in self._stages:
            used.update(each.shared, each.rows)
        given = range(len(self._io.names))
        leaves = self._io.leaves(args, [i for i, v in arguments if v in used and i in given])
        leaves += self.draw_server_noise().values()
        values: dict[Var, Any] = dict(zip(jaxpr.constvars, self._division.core.consts, strict=True))
        of_server = [leaves[i] for i in self._division.server_arguments]
        values.update(zip(jaxpr.invars, of_server, strict=False))
        stages = {stage.phase: stage for stage in self._stages}
        totals: Sequence[jax.Array] = ()
        for part, compiled in enumerate(self._parts):
            inputs = [values[v] for v in self._server.inputs[part]]
            values.update(zip(self._server.results[part], compiled(inputs, totals), strict=True))
            totals = ()
            if (stage := stages.get(part)) is not None:
                reply = yield Request(
                    stage.number,
                    tuple(values[v] for v in stage.shared),
                    tuple(values[v] for v in stage.rows),
                )
                totals, shown = stage.read(*reply)
                values.update(shown)
        outputs = zip(self._division.server_results, self._server.outputs, strict=False)
        return self.result({i: output_of(self._plan, values, v) for i, v in outputs})

    def empty(self, stage: int) -> tuple[Any, ...]:
        """Return the terms of a stage without participants."""
        return tuple(self._stages[stage].identities())

    def wiring(self) -> Wiring:
        """Return the server's parts as functions of flat arrays with numbers, for an export."""
        division, io = self._division, self._io
        return wire(
            self._plan,
            self._server,
            self._stages,
            division.core.consts,
            self._server_names(),
            [io.result_names[i] for i in division.server_results],
        )

    def own(self, *args: Any) -> dict[str, jax.Array]:
        """Return the values that participants own, `[n, ...]`, by name.

        All arguments of the program must be arrays.
        """
        leaves = self._io.leaves(args, range(len(self._io.names)))
        return dict(zip(self._division.own, self._read(*leaves), strict=False))

    def known(self, *args: Any) -> dict[str, Any]:
        """Return the values that each participant has a copy of, by name."""
        leaves = self._io.leaves(args, self._known.values())
        return {name: leaves[i] for name, i in self._known.items()}

    def with_kept(self, result: Any, args: Sequence[Any], own: Mapping[str, Any]) -> Any:
        """Return the result of a program with the values that its participants keep.

        `result` is the result of `run`, and `own` has the own values `[n, ...]` after the round.
        """
        leaves = self._io.leaves(args, range(len(self._io.names)))
        written = self._write(*leaves, *(own[name] for name in self._division.kept))
        results = jax.tree.leaves(result)
        servers = set(self._division.server_results)
        for i, x in zip((i for i in range(len(results)) if i not in servers), written, strict=True):
            results[i] = x
        return jax.tree.unflatten(self._io.out_tree, results)

    def explain(self) -> str:
        """Describe each stage: what a participant receives, has, sends and keeps, with bytes."""
        return describe(self.name, self.placement, list(self))


def stages(
    program: Callable[..., Any],
    *avals: Any,
    own: Iterable[str] | None = None,
    known: Iterable[str] = (),
) -> Stages:
    """Divide a program into the parts of the server and of one participant.

    The parts run where no process holds the values of all participants. A participant reads:

    - shared: values of the server, the same for all.
    - rows: its row of a value that the server has for all participants, such as a random key.
    - own: arguments that only participants read, row by row: data, and states between rounds, also
      in a client store.
    - known: arguments of which each participant has a copy, such as the frozen model below
      adapters.
    - noise: random numbers that it alone knows, drawn at each call for `private_secure_mean`.
    - kept: its new state, a result that replaces the own argument at the same position, of the same
      structure and types: `(state, cohort) -> (state, metrics)`.

    Reductions are over the participants that answer: a mean is divided by the sum of their weights,
    or by their number. Rows that the server reads have zeros for the others.

    Args:
        program: a function decorated with `fedpax.program`, or a function that calls one, for
            example a gradient. Bind static arguments first, with `functools.partial`.
        *avals: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
        own: names of arguments, or of pytrees of them, that participants own, as `Stages.explain`
            prints them, such as `"cohort.batches"`. Default None: all with the participants' axis,
            except those that only the server reads.
        known: names, in the same way, of arguments of which each participant has a copy.

    Raises:
        ValueError: the program cannot be divided: it has no map, or maps of several placements, or
            in a loop, or of the server's own work; the server reads an own value; a mean over
            participants is `jnp.mean`; or `own` names no argument with the participants' axis.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> @fedpax.program(clients=2)
        ... def average(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: w * x, x))
        >>> stages = fedpax.stages(average, 2.0, jnp.array([1.0, 4.0]))
        >>> print(stages.explain())
        average: 1 stage for each of 2 clients
        stage 0: receives 4 B, sends 8 B
          receives w: float32[], 4 B
          has      x: float32[], 4 B
          sends    mean of <lambda>: float32[], 4 B
          sends    number of clients: float32[], 4 B
        >>> server = stages.run(2.0, jax.ShapeDtypeStruct((2,), jnp.float32))
        >>> request = next(server)
        >>> client = stages.client(0)
        >>> terms, _, _ = client(0, request.shared, (), {"x": 1.0})
        >>> try:
        ...     server.send((terms, (), [0]))  # participant 1 did not answer
        ... except StopIteration as stop:
        ...     print(stop.value)
        2.0
    """
    with trace_for_stages():
        closed, io, signature = trace_program(program, avals)
    closed, placement = one_placement(closed)
    least = least_masked(closed.jaxpr)
    closed, server_noise, stddevs = noise_as_arguments(closed)
    noise = {f"noise {k}": stddev for k, stddev in enumerate(stddevs)}
    arguments = closed.jaxpr.invars[: len(io.names)]
    sized = {i for i, v in enumerate(arguments) if aval_of(v).shape[:1] == (placement.size,)}
    stores = set(store_reads(closed).values())
    if own is None:
        owned = stores | (sized & read_by_rows(closed, placement))
    else:
        owned = own_by_name(io.names, own, sized | stores, placement)
    division, plan = divide_arguments(
        closed, placement, signature, owned, noise, is_given=own is not None
    )
    check_means(plan)
    known_arguments = find_by_name(io.names, known, "known")
    name = function_name(program)
    return Stages(name, io, division, plan, known_arguments, noise, least, server_noise)
