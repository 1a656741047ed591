"""The program of a coordinator's rounds, the types of its messages, and its state."""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import FederatedAlgorithm, Params, State
from fedpax.clients.cohort import Cohort
from fedpax.errors import ConfigurationError
from fedpax.sites.site_experiment import CoordinatorRun, Json
from fedpax.sites.tasks import SHOWN, TERM, WORD, is_key
from fedpax.transforms.client_stages import Stage, has_opened_noise
from fedpax.transforms.coded_terms import CodedStage
from fedpax.transforms.stages import Request, Stages, stages


class CoordinatorState(NamedTuple):
    """The content of a coordinator's checkpoints, which `fedpax evaluate` and others read."""

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


class CoordinatorProgram(NamedTuple):
    """The rounds of a number of clients."""

    run: CoordinatorRun
    stages: Stages
    state: Any  # types
    cohort: Cohort  # types

    def serve(self, state: CoordinatorState | None) -> Generator[Request, Any, Any]:
        """Run the server's part of a round."""
        assert state is not None
        frozen = () if self.run.frozen is None else (self.run.frozen,)
        return self.stages.run(unpack(self.state, state), self.cohort, *frozen)


def batch_types(batches: Mapping[str, Any]) -> Json:
    """Return the dtype and the shape of each field of a batch, as sites tell them."""
    return {
        name: [str(np.dtype(x.dtype)), list(np.shape(x))] for name, x in sorted(batches.items())
    }


def cohort_types(types: Json | None, cohort_size: int) -> Cohort:
    """Return the types of a cohort of one step from a batch's, as `batch_types` describes them."""
    assert types is not None
    fields = {
        name: jax.ShapeDtypeStruct((cohort_size, 1, *shape), np.dtype(dtype))
        for name, (dtype, shape) in types.items()
    }
    per_client: Any = jax.ShapeDtypeStruct((cohort_size,), np.int32)
    return Cohort(fields, per_client, per_client, per_client)


def expected_arrays(stage: Stage) -> dict[str, tuple[tuple[int | None, ...], np.dtype]]:
    """Return the shape and dtype of each array of a site's reply to a stage."""
    terms = {f"{TERM} {i}": (v.shape, np.dtype(v.dtype)) for i, v in enumerate(stage.terms)}
    shown = {
        f"{SHOWN} {i}": ((None, *v.shape), np.dtype(v.dtype)) for i, v in enumerate(stage.shown)
    }
    return {**terms, **shown}


def coded_arrays(coded: CodedStage | None) -> dict[str, tuple[tuple[int | None, ...], np.dtype]]:
    """Return the shape and dtype of each array of a reply of encoded words."""
    values = () if coded is None else coded.values
    return {f"{WORD} {i}": (v.shape, np.dtype(v.dtype)) for i, v in enumerate(values)}


def check_masks(divided: Stages, has_secure_sums: bool) -> None:
    """Raise if the terms of a program must be masked, and are not."""
    if divided.least_masked is not None and not has_secure_sums:
        raise ConfigurationError(
            "the aggregator is secure_mean or private_secure_mean, whose terms must be masked, "
            "expected secure sums. Start the syncer with --secure_sums."
        )


MOST_EXAMPLES = 2.0**31 - 1
"""No client has more: its number is an int32."""

WEIGHT = "sum of weight"
"""The name of a term that is a sum of weights."""


def weight_limits(stage: Stage, weights: str) -> dict[str, float]:
    """Return the weight that a client may have at most, by the name of the term that sums it."""
    rule, _, most = weights.partition(":")
    limit = {"equal": 1.0, "capped": float(most or 0)}.get(rule, MOST_EXAMPLES)
    return {f"{TERM} {i}": limit for i, v in enumerate(stage.terms) if v.name == WEIGHT}


def weighted_terms(divided: Stages, number: int) -> dict[str, str]:
    """Return the name of the term by which each weighted sum is divided, by the sum's name."""
    return {f"{TERM} {i}": f"{TERM} {k}" for i, k in divided.weights(number).items()}


def check_repeatable(divided: Stages, stage: int, number: int) -> None:
    """Raise if a round that ends before a stage has opened a private sum."""
    if has_opened_noise(divided.noisy_request, [each.noise for each in divided], stage):
        raise ConfigurationError(
            f"round {number}: a site left after a private sum of an earlier stage was opened. The "
            "same round again would spend its epsilon twice, which the metric does not count. To "
            "accept it, run the same command again to resume."
        )


def check_program(divided: Stages, is_guarded: bool) -> None:
    """Raise if the rounds of a program cannot run over sites with these rules."""
    if is_guarded and len(divided) > 1:
        raise ConfigurationError(
            f"norm_factor and accept_if look at the last of {len(divided)} stages of this round, "
            "which does not tell what a site changes, expected a round of one stage. Leave "
            "--norm_factor and --accept_if out, or choose another aggregator."
        )
    for stage in divided:
        for value in (*stage.terms, *stage.shown):
            if is_key(value.dtype):
                raise ConfigurationError(
                    f"a site would send random keys ({value.name}), expected numbers alone. Choose "
                    "another aggregator, such as --aggregator=mean."
                )


def no_reply(stage: Stage) -> tuple[Any, Any, list[int]]:
    """Return the reply of a stage that no client takes part in."""
    return (), [jnp.zeros((0, *v.shape), v.dtype) for v in stage.shown], []
