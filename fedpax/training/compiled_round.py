"""The compiled round: one federated round, compiled once before the training starts."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpax.algorithm import Metrics, Params, State, marked_masks
from fedpax.clients.cohort import Cohort, CohortStream
from fedpax.clients.store import ClientStore
from fedpax.errors import ArgumentError
from fedpax.hlo.collectives import operand_bytes_along
from fedpax.parallel.axes import ShardingTree, check_divisible
from fedpax.parallel.compiler_options import run_once_options
from fedpax.run_files.metrics import RESERVED_METRICS
from fedpax.training.agreement import check_same_program
from fedpax.training.experiment import Run
from fedpax.training.spikes import report_update_norm
from fedpax.training.spikes import skip_spikes as guard_against_spikes
from fedpax.transforms.inlining import program_placements
from fedpax.transforms.marks import LOSS_MASK, has_live_mark


class CompiledRound(NamedTuple):
    """A compiled round."""

    # `(state, cohort) -> (state, metrics)`, or `(state, cohort, frozen) -> ...` if the run has
    # frozen values; the input state's buffers are donated. A round that skips spikes has one more
    # argument after the state, the threshold.
    round: jax.stages.Compiled
    state: State  # the state's abstract values, each with its sharding
    num_parameters: int
    num_participants: int
    # operand bytes per round of collectives along the placement's mesh axis, as the sum over the
    # devices at one index of this axis; read from the compiled text. NaN if they depend on values;
    # 0 if the mesh has no axis of this name.
    bytes_across_placement: float
    ignores_mask: bool  # whether batches have a mask, and the loss does not read it
    metrics: Metrics


def compile_round(
    run: Run,
    cohort: Cohort,
    *,
    update_norm: bool = False,
    skip_spikes: bool = False,
) -> CompiledRound:
    """Compile a run's round for its mesh and shardings."""
    params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
    state = jax.eval_shape(run.algorithm.init, params)
    if not hasattr(state, "params"):
        raise ArgumentError(
            f"algorithm.init returns a {type(state).__name__} without a field params, expected a "
            "NamedTuple whose field params is the server's model. Return one from init."
        )
    _check_population(state, getattr(run.cohorts, "num_clients", None))
    num_participants = jax.tree.leaves(cohort)[0].shape[0]
    shardings = run_state_shardings(run, params, state, num_participants)
    check_divisible("params", params, run.resolved_shardings.params)
    check_divisible("cohort", cohort, run.resolved_shardings.cohort)
    check_divisible("state", state, shardings)
    state = with_shardings(state, shardings)
    arguments: tuple[Any, ...] = (state, cohort)
    if run.frozen is not None:
        arguments = (*arguments, run.frozen.shapes)
    replicated = NamedSharding(run.mesh, PartitionSpec())
    plain_arguments = arguments
    if skip_spikes:
        threshold = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
        arguments = (state, threshold, *arguments[1:])
    with marked_masks() as losses:
        traced = jax.jit(run.algorithm.round).trace(*plain_arguments)
    _check_placement(run.placement, traced)
    after, metrics = traced.out_info
    _check_round(state, after, metrics, num_participants)
    round = report_update_norm(run.algorithm.round) if update_norm else run.algorithm.round
    if skip_spikes:
        round = guard_against_spikes(round)
    step = jax.jit(round, donate_argnums=0, out_shardings=(shardings, replicated))
    lowered = step.lower(*arguments)
    check_same_program(lowered)
    compiled = lowered.compile(dict(run.compiler_options or {}))
    return CompiledRound(
        round=compiled,
        state=state,
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        num_participants=num_participants,
        bytes_across_placement=_bytes_across_placement(compiled, run),
        ignores_mask=bool(losses) and not has_live_mark(traced.jaxpr.jaxpr, LOSS_MASK),
        metrics=metrics,
    )


def run_state_shardings(
    run: Run, params: Params, state: State, num_participants: int
) -> ShardingTree:
    """Return the shardings of a run's state, as derived and as changed by `Shardings.state`."""
    derived = state_shardings(
        state,
        params,
        run.resolved_shardings.params,
        run.mesh,
        placement=run.placement,
        num_participants=num_participants,
    )
    if run.resolved_shardings.state is None:
        return derived
    return jax.tree.map(
        lambda leaf: leaf.sharding, with_shardings(state, run.resolved_shardings.state(derived))
    )


def with_shardings(shapes: chex.ArrayTree, shardings: ShardingTree) -> Any:
    """Attach shardings to abstract values."""
    return jax.tree.map(
        lambda sharding, below: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), below
        ),
        shardings,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, NamedSharding),
    )


def init_state(run: Run, like: State, seed: int, params: Params | None = None) -> State:
    """Create the initial state of a run, on the shardings of abstract values."""
    options: dict[str, Any] = {
        "out_shardings": jax.tree.map(lambda leaf: leaf.sharding, like),
        "compiler_options": run_once_options(run.mesh.devices.flat[0].platform),
    }
    if params is not None:
        return jax.jit(run.algorithm.init, donate_argnums=0, **options)(params)
    init = jax.jit(lambda key: run.algorithm.init(run.init(key)), **options)
    return init(jax.random.key(seed))


def _check_round(before: State, after: State, metrics: Metrics, num_participants: int) -> None:
    """Check that a round keeps the state's types and returns scalar metrics with a loss."""
    given: Any = jax.tree.structure(before)
    returned: Any = jax.tree.structure(after)
    if given != returned:
        raise ArgumentError(
            f"algorithm.round returns a state of structure {returned}, expected the structure of "
            f"its argument, {given}. Return a state of the same type with the same fields."
        )
    paths = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ArgumentError(
                f"algorithm.round changes state{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}, expected the same "
                "shape and dtype in every round. Cast the update, or the initial state."
            )
    if not isinstance(metrics, dict) or "loss" not in metrics:
        is_array = hasattr(metrics, "shape")
        type_name = "an array" if is_array else f"a {type(metrics).__name__}"
        returned_value = str(sorted(metrics)) if isinstance(metrics, dict) else type_name
        raise ArgumentError(
            f"algorithm.round returns the metrics {returned_value}, expected a dict of scalars "
            'with the key "loss". Add the mean training loss of the round as metrics["loss"].'
        )
    if reserved := sorted(RESERVED_METRICS & metrics.keys()):
        raise ArgumentError(
            f"algorithm.round returns the metrics {reserved}, expected names that the training "
            "loop does not use itself: it would overwrite them in metrics.jsonl. Rename them in "
            "loss_fn or in the round."
        )
    for name, value in metrics.items():
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        real = dtype is not None and (
            jnp.issubdtype(dtype, jnp.floating)
            or jnp.issubdtype(dtype, jnp.integer)
            or dtype == jnp.bool_
        )
        is_vector = shape == (num_participants,) and name != "loss"  # logged as quantiles
        if not real or not (shape == () or is_vector):
            returned_value = (
                f"{dtype}{list(shape)}" if shape is not None else f"a {type(value).__name__}"
            )
            raise ArgumentError(
                f"algorithm.round returns metrics[{name!r}] as {returned_value}, expected a scalar "
                "of a real dtype, or, except for the loss, a value for each of the "
                f"{num_participants} participants. Reduce it in the round, for example with "
                "jnp.mean or fedpax.federated_mean, or keep it in the state."
            )


def check_same_types(number: int, cohort: Cohort, first: Cohort) -> None:
    """Check that a cohort has the types for which the round was compiled."""
    now, before = _types_by_path(cohort), _types_by_path(first)
    if now == before:
        return
    differences = [
        f"cohort{path} is {now.get(path, 'missing')} and was {before.get(path, 'missing')}"
        for path in dict.fromkeys((*before, *now))
        if now.get(path) != before.get(path)
    ]
    raise ArgumentError(
        f"The cohort of round {number} differs from the first cohort: "
        f"{', '.join(differences)}. Expected equal structure, shapes and dtypes, because a round "
        "is compiled once. Pad the steps to a fixed number, and mark padding by num_steps or a "
        "mask, as fedpax.data.cohort_rounds does."
    )


def _types_by_path(cohort: Cohort) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(cohort)
    }


def _check_population(state: Any, num_clients: int | None) -> None:
    """Check that a state has room for all clients of the cohorts."""
    for store in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ClientStore)):
        if isinstance(store, ClientStore) and num_clients is not None:
            if store.num_clients < num_clients:
                raise ArgumentError(
                    f"the method keeps states of num_clients={store.num_clients} clients, expected "
                    f"{num_clients}, the size of the population: the other clients would never "
                    f"keep theirs. Pass num_clients={num_clients} to the method."
                )


def _check_placement(placement: str, traced: jax.stages.Traced) -> None:
    names = program_placements(traced.jaxpr.jaxpr)
    if names and placement not in names:
        raise ArgumentError(
            f"Run.placement={placement!r} is not a placement of algorithm.round, expected "
            f"{' or '.join(map(repr, sorted(names)))}. Set Run.placement to this name."
        )


def _bytes_across_placement(compiled: jax.stages.Compiled, run: Run) -> float:
    if run.mesh.shape.get(run.placement, 1) == 1:  # without reading the text
        return 0.0
    devices = run.mesh.size // run.mesh.shape[run.placement]
    try:
        text = compiled.as_text() or ""
        return float(devices * operand_bytes_along(text, run.mesh, run.placement))
    except ValueError:  # a loop whose trip count depends on values: training works all the same
        return math.nan


class CompiledLengths:
    """The round of a run, compiled for each length of the axis of steps that it meets."""

    def __init__(
        self, stream: CohortStream, first: Cohort, compile: Callable[[Cohort], CompiledRound]
    ) -> None:
        self._has_lengths = getattr(stream, "pad_to", None) == "round"
        self._first = jax.tree.map(jax.typeof, first)
        self._compile = compile
        self.first = compile(first)
        self._by_length = {self._length(first): self.first}

    def of(
        self, number: int, cohort: Cohort, compiling: Callable[[], AbstractContextManager[None]]
    ) -> CompiledRound:
        """Return the round for a cohort, whose types are checked; compile for a new length."""
        expected, length = self._first, self._length(cohort)
        if self._has_lengths:
            batches = jax.tree.map(
                lambda x: x.update(shape=(x.shape[0], length, *x.shape[2:])), expected.batches
            )
            expected = expected._replace(batches=batches)
        check_same_types(number, cohort, expected)
        if length not in self._by_length:
            with compiling():
                self._by_length[length] = self._compile(cohort)
        return self._by_length[length]

    def _length(self, cohort: Cohort) -> int:
        if not self._has_lengths:
            return 0
        return int(jax.tree.leaves(cohort.batches)[0].shape[1])


# ---- shardings of an algorithm's state, derived from the shardings of the parameters


def state_shardings(
    state: State,
    params: Params,
    params_shardings: ShardingTree,
    mesh: Mesh,
    *,
    placement: str,
    num_participants: int,
) -> ShardingTree:
    """Derive the shardings of a state from the shardings of the parameters."""
    # The compiler cannot infer them: zeros of a new optimizer state do not depend on the
    # parameters. A leaf belongs to a parameter if its path ends with the parameter's path and its
    # last axes are the parameter's, or some rows of them.
    known = _specs_of_parameters(params, params_shardings)
    divides = placement in mesh.shape and num_participants % mesh.shape[placement] == 0

    def parameter_of(path: tuple[Any, ...], leaf: Any) -> tuple[Any, int, PartitionSpec] | None:
        """Return the path before the parameter's, the axes before the parameter's, and its spec."""
        for name, shape, spec in known:
            front, before = path[: len(path) - len(name)], leaf.ndim - len(shape)
            if path[len(front) :] != name or before < 0:
                continue
            own = leaf.shape[before:]
            unsharded = tuple(spec)[:1] in ((), (None,))
            is_rows = len(shape) > 1 and own[1:] == shape[1:] and own[0] < shape[0] and unsharded
            if is_rows and leaf.shape[:1] == own[:1] == (num_participants,) and leaf.ndim == 2:
                is_rows = front in fragments
            if own == shape or is_rows:
                return front, before, spec
        return None

    # Trees that hold rows of stacked matrices hold rows of stacked vectors too.
    fragments: set[tuple[Any, ...]] = set()
    for path, leaf in jax.tree.leaves_with_path(state):
        parameter = parameter_of(path, leaf)
        if parameter and parameter[1] == 0 and leaf.ndim > 2:
            fragments.add(parameter[0])

    def sharding_of(
        path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, *, is_row: bool = False
    ) -> NamedSharding:
        parameter = parameter_of(path, leaf)
        axes = tuple(parameter[2]) if parameter else ()
        front = leaf.shape[: parameter[1]] if parameter else leaf.shape
        placed = (is_row and placement in mesh.shape) or (
            divides and front[:1] == (num_participants,)
        )
        first = ((placement if placed else None),) + (None,) * (len(front) - 1) if front else ()
        spec = PartitionSpec(*first, *axes) if placed or axes else PartitionSpec()
        return NamedSharding(mesh, spec)

    def shardings_of(path: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, ClientStore):
            return sharding_of(path, node)
        return jax.tree_util.tree_map_with_path(
            lambda end, leaf: sharding_of((*path, *end), leaf, is_row=True), node
        )

    return jax.tree_util.tree_map_with_path(
        shardings_of, state, is_leaf=lambda node: isinstance(node, ClientStore)
    )


def _specs_of_parameters(
    params: Params, shardings: ShardingTree
) -> list[tuple[tuple[Any, ...], tuple[int, ...], PartitionSpec]]:
    """Return the path, shape and spec of each parameter, the longest path first."""
    # A leaf "layer.w" of a state must match the parameter "layer.w" before "w".
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    try:
        specs = jax.tree.broadcast(shardings, params, is_leaf=_is_sharding)
    except ValueError:
        raise ArgumentError(
            f"shardings.params has the structure {jax.tree.structure(shardings)}, expected the "
            f"parameters' structure, {structure}, or one NamedSharding for all. Pass one "
            "NamedSharding for each parameter."
        ) from None
    known = [
        (path, leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(specs), strict=True)
    ]
    return sorted(known, key=lambda entry: -len(entry[0]))


def _is_sharding(leaf: Any) -> bool:
    return isinstance(leaf, NamedSharding)
