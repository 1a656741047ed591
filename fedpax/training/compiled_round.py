"""A run's round, compiled ahead and once, with what there is to know of it."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.hlo.collectives import placement_bytes
from fedpax.training.algorithm import State
from fedpax.training.experiment import Run
from fedpax.training.shardings import state_shardings


class Program(NamedTuple):
    """A compiled round.

    Attributes:
        round: ``(state, batches) -> (state, metrics)``; the state that it is given is donated.
        state: the state's abstract values, each with its sharding.
        parameters: how many numbers the server's model has.
        participants: the placement's size.
        bytes_across_placement: bytes that the devices of one position on the placement's mesh axis
            together hand to collectives along it in a round, read from the compiled program; NaN
            if they depend on values. A mesh without the axis sends nothing along it: 0.
    """

    round: jax.stages.Compiled
    state: State
    parameters: int
    participants: int
    bytes_across_placement: float


def compile_round(run: Run, batches: Any) -> Program:
    """Compiles a run's round for its mesh and shardings.

    Args:
        run: what to compile; its mesh must be set.
        batches: the batches of one round, on the devices; every other round's are like them.

    Returns:
        The compiled round.

    Raises:
        ValueError: if the round breaks the contract of ``FederatedAlgorithm``.
    """
    params = jax.eval_shape(run.init, jax.random.key(0))
    state = jax.eval_shape(run.algorithm.init, params)
    if not hasattr(state, "params"):
        raise ValueError(
            f"The algorithm's state is a {type(state).__name__} without a field params: return a "
            "NamedTuple whose field params is the server's model from init."
        )
    participants = jax.tree.leaves(batches)[0].shape[0]
    shardings = shardings_of_state(run, params, state, participants)
    state = with_shardings(state, shardings)
    _check_round(state, *jax.eval_shape(run.algorithm.round, state, batches))
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    step = jax.jit(run.algorithm.round, donate_argnums=0, out_shardings=(shardings, everywhere))
    compiled = step.lower(state, batches).compile()
    return Program(
        round=compiled,
        state=state,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        participants=participants,
        bytes_across_placement=_bytes_across_placement(compiled, run),
    )


def shardings_of_state(run: Run, params: Any, state: State, participants: int) -> Any:
    """Says where a run's state lives.

    Args:
        run: what is trained.
        params: the parameters' abstract values.
        state: the state's abstract values.
        participants: the placement's size.

    Returns:
        A tree of ``NamedSharding`` with the structure of the state.
    """
    derived = state_shardings(
        state,
        params,
        run.shardings.params,
        run.mesh,
        placement=run.placement,
        participants=participants,
    )
    if run.shardings.state is None:
        return derived
    return jax.tree.map(
        lambda leaf: leaf.sharding, with_shardings(state, run.shardings.state(derived))
    )


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Gives abstract values their shardings.

    Args:
        shapes: a tree of what has a shape and a dtype.
        shardings: a ``NamedSharding``, or a tree of them that is a prefix of ``shapes``.

    Returns:
        The same tree of ``jax.ShapeDtypeStruct``.

    Example:
        >>> where = NamedSharding(jax.make_mesh((1,), ("clients",)), PartitionSpec("clients"))
        >>> types = with_shardings({"x": jax.ShapeDtypeStruct((2, 3), "float32")}, where)
        >>> types["x"].shape, tuple(types["x"].sharding.spec)
        ((2, 3), ('clients',))
    """
    return jax.tree.map(
        lambda sharding, below: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), below
        ),
        shardings,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, NamedSharding),
    )


def fresh_state(run: Run, program: Program, seed: int) -> State:
    """Makes the state with which a run begins, on its shardings.

    Args:
        run: what is trained; its mesh must be set.
        program: its compiled round.
        seed: seed of the parameters.

    Returns:
        The algorithm's state of fresh parameters.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    init = jax.jit(lambda key: run.algorithm.init(run.init(key)), out_shardings=shardings)
    return init(jax.random.key(seed))


def _check_round(before: State, after: State, metrics: Any) -> None:
    """Refuses a round that does not return a state like the one it was given, and a loss."""
    given: Any = jax.tree.structure(before)
    returned: Any = jax.tree.structure(after)
    if given != returned:
        raise ValueError(
            "The algorithm's round returns a state of another structure than it was given: "
            f"{returned} in the place of {given}."
        )
    paths = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"The algorithm's round turns state{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} into {new.dtype}{list(new.shape)}: a state keeps "
                "its shapes and dtypes. Cast the update, or the fresh state."
            )
    if not isinstance(metrics, dict) or "loss" not in metrics:
        raise ValueError(
            'The algorithm\'s round must return a dict of scalars with "loss" as its metrics; '
            f"it returned {metrics}."
        )


def _bytes_across_placement(compiled: jax.stages.Compiled, run: Run) -> float:
    if run.placement not in run.mesh.shape:
        return 0.0
    devices = run.mesh.size // run.mesh.shape[run.placement]
    try:
        text = compiled.as_text() or ""
        return float(devices * placement_bytes(text, run.mesh, run.placement))
    except ValueError:  # a loop whose length depends on values: no reason not to train
        return math.nan
