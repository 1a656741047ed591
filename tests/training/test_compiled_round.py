from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_regression import regression, single_client

import fedpax
from fedpax.algorithm import FederatedAlgorithm
from fedpax.clients import client_store, gather_clients, scatter_clients
from fedpax.errors import ArgumentError
from fedpax.parallel.mesh import make_mesh
from fedpax.training.compiled_round import (
    CompiledRound,
    check_same_types,
    compile_round,
    init_state,
)
from fedpax.training.experiment import Run, Shardings
from fedpax.training.prefetch import put_on_mesh


def one_round(run: Run) -> tuple[Any, Any, Any]:
    with jax.set_mesh(run.mesh):
        batches = put_on_mesh(next(run.cohorts), run.resolved_shardings.cohort)
        compiled = compile_round(run, batches)
        return compiled, init_state(run, compiled.state, seed=3), batches


@pytest.fixture(scope="module")
def compiled() -> tuple[Run, CompiledRound, Any]:
    """Compile the regression's round once for all tests."""
    run = regression().build()
    compiled, _, batches = one_round(run)
    return run, compiled, batches


def test_a_round_donates_and_keeps_structure_dtypes_and_shardings(
    compiled: tuple[Run, CompiledRound, Any],
) -> None:
    run, compiled, batches = compiled
    with jax.set_mesh(run.mesh):
        state = init_state(run, compiled.state, seed=3)
    assert (compiled.num_parameters, compiled.num_participants) == (16 * 32 + 32, 8)
    new, metrics = compiled.round(state, batches)
    assert state.params["hidden"].is_deleted()
    assert new.params["hidden"].sharding == run.shardings.params["hidden"]
    assert new.momentum["hidden"].sharding.spec == PartitionSpec("clients", None, "fsdp")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, compiled.state)
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(
        lambda x: x.sharding, compiled.state
    )
    assert np.isfinite(float(metrics["loss"]))


def test_the_compiled_round_equals_the_algorithm_without_a_mesh(
    compiled: tuple[Run, CompiledRound, Any],
) -> None:
    run, compiled, batches = compiled
    with jax.set_mesh(run.mesh):
        state, metrics = compiled.round(init_state(run, compiled.state, seed=3), batches)
    plain, expected = run.algorithm.round(
        run.algorithm.init(run.init(jax.random.key(3))), jax.device_get(batches)
    )
    chex.assert_trees_all_close(
        (state.params, state.momentum, metrics),
        (plain.params, plain.momentum, expected),
        rtol=1e-5,
        atol=1e-6,
    )


def test_bytes_across_placement_count_the_model_and_a_few_scalars(
    compiled: tuple[Run, CompiledRound, Any],
) -> None:
    _, compiled, _ = compiled
    model = 4 * compiled.num_parameters
    assert model <= compiled.bytes_across_placement <= model + 64
    alone, *_ = one_round(single_client().build())
    assert alone.bytes_across_placement == 0


class Descent(NamedTuple):
    params: jax.Array


def run_of(round_fn: Any, init: Any = Descent, axis_type: AxisType = AxisType.Auto) -> Run:
    mesh = make_mesh(clients=8, axis_types=axis_type)
    rng = np.random.default_rng(0)

    class Stream:
        def __next__(self) -> np.ndarray:
            return rng.normal(size=(8, 2, 3)).astype(np.float32)

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: Any) -> None: ...

    return Run(
        algorithm=FederatedAlgorithm(init, round_fn),
        init=lambda key: jax.random.normal(key, (3,)),
        cohorts=Stream(),
        evaluate=lambda params: {"loss": 0.0},
        mesh=mesh,
        shardings=Shardings(
            NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("clients"))
        ),
        items_per_round=16,
        placement="clients",
    )


def descend(state: Descent, batches: jax.Array) -> tuple[Descent, dict[str, jax.Array]]:
    error = state.params - batches.mean((0, 1))
    return Descent(state.params - 0.1 * error), {"loss": jnp.sum(error**2)}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rounds_run_on_meshes_with_automatic_and_explicit_axes(axis_type: AxisType) -> None:
    compiled, state, batches = one_round(run_of(descend, axis_type=axis_type))
    before = np.asarray(state.params)
    state, _ = compiled.round(state, batches)
    state, _ = compiled.round(state, batches)
    goal = np.asarray(batches).mean((0, 1))
    np.testing.assert_allclose(state.params, goal + 0.81 * (before - goal), rtol=1e-5, atol=1e-6)


def other_shape(state: Any, batches: Any) -> Any:
    return Descent(jnp.zeros((4,))), {"loss": 0.0}


def other_dtype(state: Any, batches: Any) -> Any:
    return Descent(state.params.astype(jnp.bfloat16)), {"loss": 0.0}


def other_structure(state: Any, batches: Any) -> Any:
    return (state.params,), {"loss": 0.0}


def no_loss(state: Any, batches: Any) -> Any:
    return state, {"error": 0.0}


def loss_alone(state: Any, batches: Any) -> Any:
    return state, jnp.mean(state.params)


def loss_of_each_client(state: Any, batches: Any) -> Any:
    return state, {"loss": batches.mean((1, 2))}


def accuracies_of_other_length(state: Any, batches: Any) -> Any:
    return state, {"loss": jnp.float32(0.0), "accuracy": batches.mean((1, 2))[1:]}


def complex_metric(state: Any, batches: Any) -> Any:
    return state, {"loss": jnp.complex64(1j)}


def nested_metric(state: Any, batches: Any) -> Any:
    return state, {"loss": jnp.float32(0.0), "more": {"norm": jnp.float32(0.0)}}


def throughput_of_its_own(state: Any, batches: Any) -> Any:
    zero = jnp.float32(0.0)
    return state, {"loss": zero, "seconds": zero, "items": zero, "accuracy": zero}


@pytest.mark.parametrize(
    ("round_fn", "init", "words"),
    [
        (other_shape, Descent, r"state\.params from float32\[3\] to float32\[4\]"),
        (other_dtype, Descent, r"to bfloat16\[3\].*Cast the update"),
        (other_structure, Descent, "expected the structure of its argument"),
        (loss_alone, Descent, "metrics an array, expected a dict of scalars"),
        (
            loss_of_each_client,
            Descent,
            r"metrics\['loss'\] as float32\[8\], expected a scalar.*Reduce",
        ),
        (
            accuracies_of_other_length,
            Descent,
            r"metrics\['accuracy'\] as float32\[7\], expected a.*each of the 8 participants",
        ),
        (
            complex_metric,
            Descent,
            r"metrics\['loss'\] as complex64\[\], expected a scalar of a real",
        ),
        (nested_metric, Descent, r"metrics\['more'\] as a dict, expected a scalar"),
        (throughput_of_its_own, Descent, r"\['items', 'seconds'\], expected names.*Rename them"),
        (no_loss, Descent, 'a dict of scalars with the key "loss"'),
        (descend, lambda params: {"model": params}, "without a field params"),
    ],
)
def test_a_round_that_breaks_the_contract_raises(round_fn: Any, init: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        one_round(run_of(round_fn, init))


def test_a_placement_that_the_round_does_not_declare_raises() -> None:
    @fedpax.program(clients=8)
    def round(state: Descent, batches: jax.Array) -> tuple[Descent, dict[str, jax.Array]]:
        loss = fedpax.federated_mean(fedpax.federated_map(jnp.mean, batches))
        return state, {"loss": loss}

    run = run_of(round)._replace(placement="client")
    with pytest.raises(
        ValueError, match=r"Run.placement='client' is not a .* expected 'clients'. Set"
    ):
        one_round(run)


@pytest.mark.parametrize("placement", ["clients", "islands"])
def test_by_default_the_model_is_replicated_and_participants_are_sharded(placement: str) -> None:
    run = run_of(descend)._replace(shardings=None, placement=placement)
    assert run.resolved_shardings.params.spec == PartitionSpec()
    axis = "clients" if placement == "clients" else None  # the mesh has no axis islands
    assert run.resolved_shardings.cohort.spec == PartitionSpec(axis)
    compiled, state, _ = one_round(run)
    assert state.params.sharding.is_fully_replicated and compiled.num_parameters == 3


def test_bytes_that_depend_on_values_are_nan() -> None:
    def until_close(state: Descent, batches: jax.Array) -> Any:
        def gradient(params: jax.Array) -> jax.Array:  # depends on all clients at every step
            return jnp.tanh(params - batches).mean((0, 1))

        params = jax.lax.while_loop(
            lambda params: jnp.sum(gradient(params) ** 2) > 1e-4,
            lambda params: params - gradient(params),
            state.params,
        )
        return Descent(params), {"loss": jnp.sum(gradient(params) ** 2)}

    compiled, state, batches = one_round(run_of(until_close))
    _, metrics = compiled.round(state, batches)
    assert float(metrics["loss"]) <= 1e-4
    assert np.isnan(compiled.bytes_across_placement)


def test_a_store_of_too_few_clients_is_refused() -> None:
    class State(NamedTuple):
        params: Any
        taken: Any

    class Cohorts(NamedTuple):
        num_clients: int

    algorithm = FederatedAlgorithm(
        lambda params: State(params, client_store(jnp.int32(0), num_clients=8)), None
    )
    run = regression().build()._replace(algorithm=algorithm, cohorts=Cohorts(12))
    with pytest.raises(ValueError, match=r"=8 clients, expected 12.*Pass num_clients=12"):
        compile_round(run, {"x": np.zeros((4, 1))})


def test_a_client_store_in_the_state_is_sharded_over_the_mesh() -> None:
    mesh = make_mesh(devices=jax.devices()[:4], clients=4)
    spread = NamedSharding(mesh, PartitionSpec("clients"))

    class State(NamedTuple):
        params: Any
        taken: Any  # number of rounds in which each client took part

    def init(params: Any) -> State:
        return State(params, client_store(jnp.int32(0), num_clients=1001))

    def round(state: State, batches: Any) -> tuple[State, dict[str, Any]]:
        own = gather_clients(state.taken, batches["clients"])
        taken = scatter_clients(state.taken, batches["clients"], own + 1)
        return State(state.params, taken), {"loss": own.sum().astype(jnp.float32)}

    run = (
        regression()
        .build()
        ._replace(
            algorithm=FederatedAlgorithm(init, round),
            init=lambda key: {"w": jax.random.normal(key, (3,))},
            mesh=mesh,
            shardings=Shardings(
                params={"w": NamedSharding(mesh, PartitionSpec())},
                cohort=spread,
                state=lambda derived: derived._replace(taken=spread),
            ),
        )
    )
    cohorts = [np.array([5, 1000, 7, 250]), np.array([5, 6, 7, 8])]
    with jax.set_mesh(mesh):
        batches = [put_on_mesh({"clients": cohort}, spread) for cohort in cohorts]
        compiled = compile_round(run, batches[0])
        state = init_state(run, compiled.state, seed=0)
        for cohort in batches:
            state, metrics = compiled.round(state, cohort)
    assert state.taken.rows.sharding == spread
    assert {shard.data.shape for shard in state.taken.rows.addressable_shards} == {(252,)}
    assert float(metrics["loss"]) == 2.0  # 5 and 7 had taken part before
    expected = np.zeros(1001, np.int32)
    for cohort in cohorts:
        expected[cohort] += 1
    np.testing.assert_array_equal(state.taken.to_host(), expected)


def test_a_round_is_compiled_with_the_options_of_its_run() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        one_round(single_client().build()._replace(compiler_options={"no_such_option": "false"}))


def test_a_cohort_of_other_types_is_told() -> None:
    one, other = (fedpax.Cohort({"x": np.ones((2, steps, 4))}) for steps in (3, 5))
    with pytest.raises(ArgumentError, match=r"is float64\[2, 5, 4\] and was float64\[2, 3, 4\]"):
        check_same_types(7, other, one)
