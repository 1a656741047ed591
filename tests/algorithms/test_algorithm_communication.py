"""The collectives of a round, read from its compiled text: kinds, axes, executions."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from method_problem import STEPS, loss_fn
from method_table import (
    METHODS,
    fresh_state,
    mark_slow,
    mesh_of,
    place_batches,
    place_params,
    problem,
    trainer,
    use,
)

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import data_parallel, diloco
from fedpax.hlo.collectives import Collective, collectives, operand_bytes_along
from fedpax.parallel.mesh import make_mesh

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")

METRICS = 3
# Of a model whose kernel and bias are cut over two devices.
SHARDS = Counter({"f32[3,10]": 1, "f32[5]": 1, "f32[10,5]": 1})
WHOLE = Counter({"f32[6,10]": 1, "f32[10]": 1, "f32[10,5]": 1})
# Methods whose participants send one model per round.
AT_THE_END = (
    "FedAvg",
    "FedAdam",
    "DiLoCo",
    *["Streaming DiLoCo", "PAPA", "PAPA-all", "EASGD"],
    *["FedProx", "FedNova", "local SGD", "Reptile"],
)


def between(name: str, mesh: str) -> list[Collective]:
    """Return the collectives of a method's round along its placement's axis."""
    compiled = trainer(name, mesh)
    communication = collectives(compiled.round.as_text(), compiled.mesh)
    return [c for c in communication if compiled.method.placement in c.axes]


def check_operands(communication: list[Collective], name: str, mesh: str) -> None:
    """Check that each device sends its shard of every parameter once, and a few scalars."""
    assert {c.kind for c in communication} == {"all-reduce"}
    assert {c.axes for c in communication} == {(METHODS[name].placement,)}
    shapes = Counter(shape for c in communication for shape in c.shapes)
    scalars = shapes.pop("f32[]")
    model = WHOLE if mesh.startswith("8") else SHARDS
    # On explicit axes jax 0.10 makes the operands of a partly manual shard_map whole.
    if "explicit" in mesh and jax.__version_info__ < (0, 11):
        assert shapes in (model, WHOLE)
    else:
        assert shapes == model
    # The parameter that is a scalar, the metrics; a weighted mean may send its weight with each.
    sent = 1 + METRICS
    leaves = model.total() + sent
    assert sent <= scalars <= (sent + leaves if METHODS[name].weighted else sent)
    assert len(communication) <= leaves


@pytest.mark.each_value
@pytest.mark.parametrize(
    "mesh",
    [
        "4x2 explicit",
        "4x2 automatic",
        *[pytest.param(f"8 {k}", marks=pytest.mark.slow) for k in ("automatic", "explicit")],
    ],
)
@pytest.mark.parametrize("name", mark_slow(AT_THE_END))
def test_participants_communicate_once_per_round(name: str, mesh: str):
    communication = between(name, mesh)
    assert all(c.executions == 1 and not c.in_loop for c in communication)
    check_operands(communication, name, mesh)


@pytest.mark.parametrize(
    "mesh",
    ["4x2 automatic", *[pytest.param(f"{n} explicit", marks=pytest.mark.slow) for n in ("4x2", 8)]],
)
def test_data_parallelism_communicates_at_every_step(mesh: str):
    communication = between("data parallelism", mesh)
    assert all(c.executions == STEPS and c.in_loop for c in communication)
    check_operands(communication, "data parallelism", mesh)


def test_diloco_sends_the_bytes_of_one_step_per_round():
    sent = {}
    for name in ("DiLoCo", "data parallelism"):
        compiled = trainer(name, "4x2 automatic")
        sent[name] = operand_bytes_along(compiled.round.as_text(), compiled.mesh, "islands")
    assert sent["data parallelism"] == STEPS * sent["DiLoCo"]
    assert sent["DiLoCo"] == 4 * (30 + 5 + 50 + 1 + METRICS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "DiLoCo"])
def test_a_derivative_communicates_outside_the_local_steps(name: str):
    method = METHODS[name]
    mesh = mesh_of("4x2 automatic", method.placement)
    algorithm = method.algorithm()
    params, (batches,), (weights,) = problem(1)

    def loss(params, cohort):
        state, _ = algorithm.round(algorithm.init(params), cohort)
        _, metrics = algorithm.round(state, cohort)
        return metrics["loss"]

    with use(mesh):
        cohort = place_batches(method.cohort(batches, weights), mesh, method.placement)
        gradient = jax.jit(jax.grad(loss))
        text = gradient.lower(place_params(params, mesh), cohort).compile().as_text()
    communication = [c for c in collectives(text, mesh) if method.placement in c.axes]
    assert communication
    assert all(c.executions == 1 and not c.in_loop for c in communication)


# ---- one island: ordinary SPMD training

optimizer = optax.adamw(0.01)


def by_hand(state: tuple, cohort: Cohort) -> tuple:
    """Scan over optimizer steps, written without fedpax."""

    def step(state, batch):
        params, optimizer_state = state
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), {**aux, "loss": loss}

    state, metrics = jax.lax.scan(step, state, jax.tree.map(lambda b: b[0], cohort.batches))
    return state, jax.tree.map(lambda m: jnp.mean(m.astype(jnp.float32)), metrics)


PLAIN = FederatedAlgorithm(lambda params: (params, optimizer.init(params)), by_hand)
ONE_ISLAND = (
    data_parallel(loss_fn, islands=1, optimizer=optimizer),
    diloco(loss_fn, islands=1, inner_optimizer=optimizer),
)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"fsdp": 2}, AxisType.Auto),
        pytest.param({"islands": 1, "fsdp": 2}, AxisType.Auto, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param({"islands": 1, "fsdp": 2}, AxisType.Explicit, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_island_compiles_to_the_hand_written_scan(sizes: dict[str, int], kind: AxisType):
    mesh = make_mesh(devices=jax.devices()[:2], axis_types=kind, **sizes)
    params, (batches,), _ = problem(1)
    batches = jax.tree.map(lambda b: b[:1], batches)

    def compiled(algorithm: FederatedAlgorithm) -> Counter:
        with use(mesh):
            state = fresh_state(algorithm, "islands", params, mesh, participants=1)
            given = place_batches(Cohort(batches), mesh, "islands")
            text = (
                jax.jit(algorithm.round, donate_argnums=0).lower(state, given).compile().as_text()
            )
        return Counter((c.kind, c.axes, c.shapes, c.executions) for c in collectives(text, mesh))

    expected = compiled(PLAIN)
    assert {kind for kind, *_ in expected} == {"all-gather", "all-reduce"}
    assert {axes for _, axes, *_ in expected} == {("fsdp",)}
    for algorithm in ONE_ISLAND:
        assert compiled(algorithm) == expected
