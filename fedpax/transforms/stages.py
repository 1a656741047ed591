"""Stages: a program as functions of the server and of one participant, with typed messages.

The plan of a program (`fedpax.transforms.phases`) alternates between work of the server and a loop
over the participants. A stage is a loop's function of one participant, with its messages
(`fedpax.transforms.client_stages`). An engine carries the messages: a process, a batch job, or
devices on a network.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives._jax import ClosedJaxpr, Literal, Var, aval_of, evaluate, result_names
from fedpax.primitives.broadcast import federated_broadcast_p
from fedpax.primitives.casts import device_array, is_host_number
from fedpax.primitives.map import federated_map_p
from fedpax.primitives.placement import Placement
from fedpax.primitives.reduction import REDUCTIONS
from fedpax.primitives.signatures import argument_names, function_name
from fedpax.transforms.client_stages import ClientFn, Stage, client_stages
from fedpax.transforms.ownership import Division, Signature, divide, one_placement, store_reads
from fedpax.transforms.plan import make_plan
from fedpax.transforms.server_parts import ServerParts
from fedpax.transforms.streaming_plan import Atom, StreamingPlan
from fedpax.transforms.value_names import SAME, SAME_VALUE
from fedpax.transforms.wiring import Wiring, output_of, wire


class Request(NamedTuple):
    """A message of the server to the participants of a stage.

    Attributes:
        stage: number of the stage.
        shared: arrays that all participants receive.
        rows: arrays `[n, ...]`; participant i receives row i of each.
    """

    stage: int
    shared: tuple[jax.Array, ...]
    rows: tuple[jax.Array, ...]


class Reply(NamedTuple):
    """The answers of the participants to a `Request`; a plain tuple will do.

    Attributes:
        terms: the terms of the participants that answered, merged. Without an answer, `()`.
        shown: arrays `[answers, ...]`, a row for each participant that answered.
        participants: the indices of these participants, in the order of the rows.
    """

    terms: Sequence[Any]
    shown: Sequence[Any]
    participants: Sequence[int]


class Stages:
    """A program divided into stages, as `fedpax.stages` makes it.

    `len(stages)` is their number, and `stages[i]` lists the messages of one (`Stage`).

    Attributes:
        name: name of the program.
        placement: the name of the participants, and their number.
    """

    def __init__(self, name: str, ends: _Ends, division: Division, plan: StreamingPlan) -> None:
        self.name, self.placement = name, plan.placement
        self._ends, self._division, self._plan = ends, division, plan
        self._server = ServerParts(plan)
        self._parts = [
            jax.jit(functools.partial(self._server.run, part))
            for part in range(self._server.number)
        ]
        servers = [ends.names[i] for i in division.server_arguments]
        self._stages = client_stages(plan, self._server, servers, division.own, division.kept)
        self._clients = [jax.jit(stage.client) for stage in self._stages]
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
        return self._ends.names

    def client(self, stage: int) -> ClientFn:
        """Return the function of one participant at a stage.

        Args:
            stage: number of the stage.

        Returns:
            `(index, shared, rows, own) -> (terms, shown, kept)`, under `jax.jit`.

            - index: the participant's index, an int32.
            - shared: the arrays of the request.
            - rows: the participant's row of each array of rows of the request.
            - own: the participant's values by name: its data and state, and what earlier stages of
              the round returned as kept. Other names are ignored.
            - terms: arrays to merge with the terms of other participants by `merge`.
            - shown: arrays that the server reads as they are.
            - kept: arrays by name. A later stage of the round reads names that are no own values.
              The last stage returns new states under the names of the own values; they replace
              these after the round.
        """
        return self._clients[stage]

    def merge(self, stage: int) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]:
        """Return the function `(terms, terms) -> terms` of a stage. It is associative."""
        return self._merges[stage]

    def fold(self, stage: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Return the function that merges the rows of arrays of terms `[participants, ...]`."""
        return self._folds[stage]

    def run(self, *args: Any) -> Generator[Request, Reply | tuple[Any, Any, Any], Any]:
        """Run the server's part of the program.

        Args:
            *args: the arguments of the program. Values that participants own are not read: types
                (`jax.ShapeDtypeStruct`) will do for them.

        Yields:
            A `Request` for each stage.

        Receives:
            A `Reply`.

        Returns:
            The result of the program, as the value of `StopIteration`. A result that participants
            keep is its type.

        Raises:
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
        leaves = self._ends.leaves(args, [i for i, v in arguments if v in used])
        values: dict[Var, Any] = dict(zip(jaxpr.constvars, self._division.core.consts, strict=True))
        given = [leaves[i] for i in self._division.server_arguments]
        values.update(zip(jaxpr.invars, given, strict=False))
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
        results: list[Any] = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._ends.out_avals]
        for i, v in zip(self._division.server_results, self._server.outputs, strict=False):
            results[i] = output_of(self._plan, values, v)
        return jax.tree.unflatten(self._ends.out_tree, results)

    def empty(self, stage: int) -> tuple[Any, ...]:
        """Return the terms of a stage without participants."""
        return tuple(self._stages[stage].identities())

    def wiring(self) -> Wiring:
        """Return the server's parts as functions of flat arrays with numbers, for an export."""
        division, ends = self._division, self._ends
        return wire(
            self._plan,
            self._server,
            self._stages,
            division.core.consts,
            [ends.names[i] for i in division.server_arguments],
            [ends.result_names[i] for i in division.server_results],
        )

    def own(self, *args: Any) -> dict[str, jax.Array]:
        """Return the values that participants own, `[n, ...]`, by name.

        Args:
            *args: the arguments of the program, all of them arrays.
        """
        leaves = self._ends.leaves(args, range(len(self._ends.names)))
        return dict(zip(self._division.own, self._read(*leaves), strict=True))

    def with_kept(self, result: Any, args: Sequence[Any], own: Mapping[str, Any]) -> Any:
        """Return the result of a program with the values that its participants keep.

        Args:
            result: the result of `run`.
            args: the arguments of the program, all of them arrays.
            own: the own values `[n, ...]` after the round, by name.
        """
        leaves = self._ends.leaves(args, range(len(self._ends.names)))
        written = self._write(*leaves, *(own[name] for name in self._division.kept))
        results = jax.tree.leaves(result)
        servers = set(self._division.server_results)
        for i, x in zip((i for i in range(len(results)) if i not in servers), written, strict=True):
            results[i] = x
        return jax.tree.unflatten(self._ends.out_tree, results)

    def explain(self) -> str:
        """Describe each stage: what a participant receives, has, sends and keeps, with bytes."""
        size, count = self.placement.size, len(self)
        lines = [
            f"{self.name}: {count} {'stage' if count == 1 else 'stages'} for each of {size} "
            f"{self.placement.name}"
        ]
        for number, stage in enumerate(self):
            down = sum(v.nbytes for v in (*stage.shared, *stage.rows))
            up = sum(v.nbytes for v in (*stage.terms, *stage.shown))
            lines.append(f"stage {number}: receives {down:,} B, sends {up:,} B")
            for heading, values in _HEADINGS.items():
                lines += [f"  {heading:<8} {v}" for v in getattr(stage, values)]
        return "\n".join(lines)


_HEADINGS = {
    "receives": "shared",
    "its row": "rows",
    "has": "own",
    "sends": "terms",
    "shows": "shown",
    "keeps": "kept",
}


class _Ends(NamedTuple):
    """The arguments and the results of a program.

    Attributes:
        tree: structure of the arguments.
        names: name of each argument.
        avals: type of each argument.
        out_tree: structure of the results.
        result_names: name of each result.
        out_avals: type of each result.
    """

    tree: Any
    names: tuple[str, ...]
    avals: tuple[Any, ...]
    out_tree: Any
    result_names: tuple[str, ...]
    out_avals: tuple[Any, ...]

    def leaves(self, args: Sequence[Any], needed: Iterable[int]) -> list[Any]:
        """Return the flat arguments of a call; those that are needed are checked."""
        leaves, tree = jax.tree.flatten(tuple(args))
        if tree != self.tree:
            raise ArgumentTypeError(
                f"The arguments have the structure {tree}, expected {self.tree}, as in the call of "
                "fedpax.stages(). Call fedpax.stages() again for other arguments."
            )
        for i in needed:
            leaf, aval, name = leaves[i], self.avals[i], self.names[i]
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ArgumentTypeError(
                    f"{name} is a type, expected an array {aval.str_short()}: the server reads it. "
                    "Pass its value; types will do only for what participants own."
                )
            leaf = device_array(leaf, name) if is_host_number(leaf) else leaf
            if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
                raise ArgumentTypeError(
                    f"{name} is {leaf.dtype}{list(leaf.shape)}, expected {aval.dtype}"
                    f"{list(aval.shape)}, as in the call of fedpax.stages(). Call fedpax.stages() "
                    "again for other arguments."
                )
            leaves[i] = leaf
        return leaves


def stages(program: Callable[..., Any], *avals: Any, own: Iterable[str] | None = None) -> Stages:
    """Divide a program into the parts of the server and of one participant.

    The parts run where no process holds the values of all participants: one after another, as a
    batch job, or on devices with data of their own. A participant reads values of four kinds:

    - shared: values of the server, the same for all.
    - rows: its row of a value that the server has for all participants, such as a random key.
    - own: arguments that only participants read, row by row: data, and states between rounds, also
      those in a client store. They stay at the participant.
    - kept: its new state, a result that takes the place of an own argument. A result takes the
      place of an argument if they are at the same position of the results and of the arguments
      (`(state, cohort) -> (state, metrics)`), and of the same structure and types.

    A participant that does not answer is absent: sums, means, maxima and minima are over those that
    answer, a mean is divided by the sum of their weights (their number, if it has none), and
    rows that the server reads have zeros in its place.

    Args:
        program: a function decorated with `fedpax.program`, or a function that calls one, for
            example a gradient. Bind static arguments first, with `functools.partial`.
        *avals: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
        own: names of the arguments, or of pytrees of them, that participants own, as
            `Stages.explain` prints them, such as `"cohort.batches"`. Default None: all arguments
            with the participants' axis, except those that only the server reads.

    Returns:
        The stages.

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
    leaves, tree = jax.tree.flatten(avals)
    types = tuple(map(_type, leaves))
    closed, out_shape = jax.make_jaxpr(
        lambda *leaves: program(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*types)
    paths = [path for path, _ in jax.tree.leaves_with_path(avals)]
    positions = argument_names(program, len(avals))
    names = tuple(positions[key.idx] + jax.tree_util.keystr(tuple(rest)) for key, *rest in paths)
    out_avals = tuple(closed.out_avals)
    results = tuple(
        f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(out_shape)
    )
    ends = _Ends(tree, names, types, jax.tree.structure(out_shape), results, out_avals)
    signature = Signature(names, _replaced(avals, types, out_shape, out_avals))
    closed, placement = one_placement(closed)
    sized = {
        i for i, v in enumerate(closed.jaxpr.invars) if aval_of(v).shape[:1] == (placement.size,)
    }
    stores = set(store_reads(closed).values())
    if own is None:
        owned = stores | (sized & _read_by_rows(closed, placement))
    else:
        owned = _named(names, own, sized | stores, placement)
    while True:
        division = divide(closed, placement, signature, owned)
        plan = make_plan(division.core.jaxpr, placement)
        read_by_server = _read_by_server(plan, division)
        for name, by_clients in read_by_server.items():
            if own is not None or by_clients:
                raise ArgumentError(
                    f"stages(): the server reads {name}, a value of the participants. To send it, "
                    "return it from a federated_map(). If the server has it, pass own= without it."
                )
        if not read_by_server:
            break
        arguments = dict(zip(division.own, division.own_arguments, strict=True))
        owned = owned - {arguments[name] for name in read_by_server}
    _check_means(plan)
    return Stages(function_name(program), ends, division, plan)


def _type(leaf: Any) -> Any:
    """Return the type that an argument has on the devices."""
    if isinstance(leaf, jax.Array | int | float | complex):
        return jax.typeof(leaf)
    return jax.core.ShapedArray(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _replaced(
    avals: Sequence[Any], types: Sequence[Any], out: Any, out_types: Sequence[Any]
) -> tuple[int | None, ...]:
    """Return, for each result, the position of the argument whose place it takes, or None."""
    results = list(out) if type(out) in (tuple, list) else [out]
    found: list[int | None] = []
    first = 0
    for position, result in enumerate(results):
        count = len(jax.tree.leaves(result))
        kinds = [(a.shape, a.dtype) for a in out_types[len(found) : len(found) + count]]
        own = range(first, first)
        same = False
        if position < len(avals):
            own = range(first, first + len(jax.tree.leaves(avals[position])))
            structure: Any = jax.tree.structure
            same = structure(result) == structure(avals[position])
        first = own.stop
        same = same and kinds == [(types[i].shape, types[i].dtype) for i in own]
        found += own if same else [None] * count
    return tuple(found)


def _named(
    names: Sequence[str], own: Iterable[str], placed: set[int], placement: Placement
) -> set[int]:
    """Return the positions of the arguments that participants own, given by name."""
    if isinstance(own, str):
        raise ArgumentTypeError(
            f"stages() got own={own!r}, expected a list of names. Pass own=[{own!r}]."
        )
    owned: set[int] = set()
    for prefix in own:
        found = {
            i
            for i, name in enumerate(names)
            if name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))
        }
        if not found:
            close = difflib.get_close_matches(prefix, names, n=3, cutoff=0.0)
            raise ArgumentError(
                f"stages(): own names {prefix!r}, which is no argument. The nearest names are "
                f"{', '.join(map(repr, close))}."
            )
        for i in sorted(found - placed):
            raise ArgumentError(
                f"stages(): own names {names[i]!r}, expected an argument with one row for each of "
                f"the {placement.size} {placement.name}. Pass own= without it."
            )
        owned |= found
    return owned


# ---- checks of a plan


def _read_by_rows(closed: ClosedJaxpr, placement: Placement) -> set[int]:
    """Return the arguments of which participants read rows, or that a reduction reads.

    The others are the server's, also if their first axis has the number of participants by chance.
    """
    plan = make_plan(closed.jaxpr, placement)
    read: set[Var] = set()
    for phase in plan.loops:
        read.update(plan.loop_inputs(phase)[1])
    for eqn in reversed(closed.jaxpr.eqns):
        reduces = eqn.primitive in REDUCTIONS and eqn.params["placement"] == placement
        if eqn.primitive is federated_broadcast_p:
            continue  # every participant reads all rows
        if reduces or not read.isdisjoint(eqn.outvars):
            operands = (v for v in eqn.invars if isinstance(v, Var))
            read.update(v for v in operands if aval_of(v).shape[:1] == (placement.size,))
    return {i for i, v in enumerate(closed.jaxpr.invars) if v in read}


def _read_by_server(plan: StreamingPlan, division: Division) -> dict[str, bool]:
    """Return the own values that the server reads, and whether participants read them too."""
    own = dict(zip(plan.jaxpr.invars[len(division.server_arguments) :], division.own, strict=True))
    copies = {  # results of the map that returns its argument
        v: own[operand]
        for v, one in plan.producer.items()
        if one.eqn.primitive is federated_map_p
        and result_names(one.eqn.params["jaxpr"]) == (SAME,)
        and isinstance(operand := plan.operands(one.eqn)[0], Var)
        and operand in own
    }
    server = ServerParts(plan)
    results = server.outputs[: len(division.server_results)]
    read = [v for inputs in server.inputs for v in inputs] + results
    by_clients: set[Var] = set()
    for phase in plan.loops:
        read += plan.loop_inputs(phase)[0]
        uses = [(one.eqn, one.axes.operands) for one in plan.computed(phase)]
        uses += [(each.eqn, each.axes) for each in plan.reductions.get(phase, ())]
        for eqn, axes in uses:
            rows = zip(plan.operands(eqn), axes, strict=True)
            by_clients.update(v for v, a in rows if isinstance(v, Var) and a is not None)
    names = {**own, **copies}
    found = dict.fromkeys(v for v in read if isinstance(v, Var) and v in names)
    return {names[v]: v in copies and v in by_clients for v in found}


def _check_means(plan: StreamingPlan) -> None:
    """Raise a ValueError if a sum over participants is divided by their number.

    That number is a constant in the program, so participants that do not answer would count.
    """
    size = plan.placement.size
    if size == 1:
        return
    sums: set[Var] = set()
    constants: dict[Var, float] = {}

    def constant(v: Atom) -> float | None:
        if isinstance(v, Literal):
            return float(np.asarray(v.val)) if np.size(v.val) == 1 else None
        return constants.get(v)

    def is_sum(v: Atom) -> bool:
        return isinstance(v, Var) and v in sums

    for eqn in plan.jaxpr.eqns:
        name, operands = eqn.primitive.name, plan.operands(eqn)
        if name == "reduce_sum" and id(eqn) in plan.candidates:
            sums.update(eqn.outvars)
        elif name in SAME_VALUE and operands:
            if is_sum(operands[0]):
                sums.update(eqn.outvars)
            if (value := constant(operands[0])) is not None:
                constants[eqn.outvars[0]] = value
        elif name == "div" and is_sum(operands[0]):
            divisor = constant(operands[1])
            if divisor is not None and divisor % size == 0:
                raise ArgumentError(
                    f"stages() found a sum over the {plan.placement.name} divided by "
                    f"{divisor:g}, a multiple of their number, as jnp.mean computes it: "
                    "participants that do not answer would count. Use federated_mean(), or divide "
                    "one federated_sum() by another."
                )
