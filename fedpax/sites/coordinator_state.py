"""The state of a method without what its clients keep, which the coordinator never has."""

from typing import Any, NamedTuple

import jax

from fedpax.algorithm import FederatedAlgorithm, Params, State
from fedpax.clients.cohort import Cohort
from fedpax.transforms.stages import Stages, stages


class CoordinatorState(NamedTuple):
    """The content of a coordinator's checkpoints, for `fedpax evaluate`, `generate` and `export`.

    Attributes:
        params: the model.
        server: further values of the server by name, such as a server optimizer's state.
    """

    params: Params
    server: dict[str, jax.Array]


def divide(algorithm: FederatedAlgorithm, state: Any, cohort: Cohort, frozen: Any) -> Stages:
    """Divide the rounds of a method, whose third argument, if any, each site has."""
    if frozen is None:
        return stages(algorithm.round, state, cohort)
    return stages(algorithm.round, state, cohort, frozen, known=["frozen"])


def server_leaves(stages: Stages, state: State) -> dict[str, Any]:
    """Return the leaves of a state that no client keeps, by name."""
    own = {value.name for stage in stages for value in stage.own}
    leaves = {
        "state" + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }
    return {name: leaf for name, leaf in leaves.items() if name not in own}


def initial_state(
    algorithm: FederatedAlgorithm, params: Params, stages: Stages
) -> tuple[CoordinatorState, State]:
    """Return the server's part of a new state, and the whole state's types."""
    types = jax.eval_shape(algorithm.init, params)
    # Under `jit`, what clients keep is not computed.
    make = jax.jit(lambda params: server_leaves(stages, algorithm.init(params)))
    return pack(types, make(params)), types


def pack(like: State, leaves: dict[str, Any]) -> CoordinatorState:
    """Make the state of a coordinator from the server's leaves by name."""
    params, tree = jax.tree.flatten_with_path(like.params)
    names = ["state.params" + jax.tree_util.keystr(path) for path, _ in params]
    model = jax.tree.unflatten(tree, [leaves[name] for name in names])
    return CoordinatorState(model, {n: x for n, x in leaves.items() if n not in names})


def unpack(like: State, packed: CoordinatorState) -> State:
    """Put the server's values in their places; what clients keep stays a type."""
    flat, tree = jax.tree.flatten_with_path(like)
    params = {
        "state.params" + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(packed.params)
    }
    known = {**params, **packed.server}
    names = ["state" + jax.tree_util.keystr(path) for path, _ in flat]
    leaves = [known.get(name, leaf) for name, (_, leaf) in zip(names, flat, strict=True)]
    return jax.tree.unflatten(tree, leaves)
