"""A compiled round has one all-reduce over the clients' axis, and none in local steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import normal, positive
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum
from fedpax.hlo.collectives import collectives
from fedpax.hlo.costs import count_costs
from fedpax.hlo.parsing import parse

CLIENTS, STEPS, BATCH, WIDTH = 8, 3, 2, 6


def loss(model, x):
    hidden = jnp.tanh(x @ model["in"] + model["bias"])
    return jnp.mean((hidden @ model["out"] - x) ** 2)


def local_steps(model, batches):
    def step(model, batch):
        value, gradient = jax.value_and_grad(loss)(model, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, gradient), value

    after, losses = jax.lax.scan(step, model, batches)
    return jax.tree.map(jnp.subtract, after, model), {"loss": losses.mean(), "last": losses[-1]}


@fedpax.program(clients=CLIENTS)
def fedavg_round(model, batches, num_examples):
    change, metrics = federated_map(local_steps, federated_broadcast(model), batches)
    change, metrics = federated_mean((change, metrics), num_examples)
    return jax.tree.map(jnp.add, model, change), metrics


@fedpax.program(clients=CLIENTS)
def closing_round(model, batches, num_examples):
    change, metrics = federated_map(lambda batches: local_steps(model, batches), batches)
    return federated_mean((change, metrics), num_examples)


def gradient_of_round(model, batches, num_examples):
    after = lambda model: fedavg_round(model, batches, num_examples)[1]["loss"]
    return jax.grad(after)(model)


def arguments():
    specs = {"in": P(None, "fsdp"), "bias": P("fsdp"), "out": P("fsdp", None)}
    shapes = {"in": (WIDTH, 4), "bias": (4,), "out": (4, WIDTH)}
    model = {k: jax.device_put(normal(*shapes[k]), specs[k]) for k in shapes}
    batches = jax.device_put(normal(CLIENTS, STEPS, BATCH, WIDTH), P("clients"))
    return model, batches, jax.device_put(positive(CLIENTS), P("clients"))


def compiled_text(fn):
    return jax.jit(fn).lower(*arguments()).compile().as_text()


def over_clients(text, mesh):
    return [c for c in collectives(text, mesh) if "clients" in c.axes]


@pytest.mark.each_value
@pytest.mark.parametrize("fn", [fedavg_round, closing_round], ids=["broadcast", "closure"])
@pytest.mark.parametrize("kind", ["automatic", "mixed"])
def test_a_round_reduces_over_the_clients_once(fn, kind, clients_fsdp):
    mesh = clients_fsdp(kind)
    with jax.set_mesh(mesh):
        text = compiled_text(fn)
    result = over_clients(text, mesh)
    assert {c.kind for c in result} == {"all-reduce"}
    assert all(c.axes == ("clients",) for c in result)
    assert all(c.executions == 1 and not c.in_loop for c in result)
    # One for all leaves and weights together, or one a leaf and one for the weights.
    leaves = 3 + 2
    assert len(result) in (1, leaves + 1)
    # Per device: its half of the model's numbers, two metrics, the weights; float32 each. The sum
    # of the weights may be reduced once for every leaf.
    numbers = (WIDTH * 4 + 4 + 4 * WIDTH) // 2 + 2
    total = sum(c.bytes for c in result)
    assert 4 * (numbers + 1) <= total <= 4 * (numbers + leaves)


def test_a_gradient_of_a_round_reduces_over_the_clients_outside_of_loops(clients_fsdp):
    mesh = clients_fsdp()
    with jax.set_mesh(mesh):
        text = compiled_text(gradient_of_round)
    result = over_clients(text, mesh)
    assert {c.kind for c in result} == {"all-reduce"}
    assert all(c.executions == 1 and not c.in_loop for c in result)
    assert len(result) <= 2 + 3  # the loss's mean and its weights, and a gradient for each leaf
    numbers = (WIDTH * 4 + 4 + 4 * WIDTH) // 2
    assert 4 * numbers <= sum(c.bytes for c in result) <= 4 * (numbers + 4)


def test_local_steps_use_the_model_axis_in_loops(clients_fsdp):
    # The counts above mean something only if collectives inside loops are found.
    mesh = clients_fsdp()
    with jax.set_mesh(mesh):
        text = compiled_text(fedavg_round)
    inside = [c for c in collectives(text, mesh) if c.in_loop]
    assert inside
    assert all(c.axes == ("fsdp",) for c in inside)


def test_broadcasts_and_maps_alone_communicate_nothing(mesh_only):
    w, x = normal(4), jax.device_put(normal(8, 4), P("clients"))
    program = fedpax.program(clients=8)(
        lambda w, x: federated_map(lambda w, x: jnp.sin(w * x), federated_broadcast(w), x)
    )
    text = jax.jit(program).lower(w, x).compile().as_text()
    assert not over_clients(text, mesh_only)


def test_a_weighted_mean_of_one_value_is_one_all_reduce(mesh_only):
    x, n = jax.device_put(normal(8, 4), P("clients")), jax.device_put(positive(8), P("clients"))
    program = fedpax.program(clients=8)(federated_mean)
    text = jax.jit(program).lower(x, n).compile().as_text()
    result = over_clients(text, mesh_only)
    assert [c.kind for c in result] == ["all-reduce"]
    assert result[0].bytes == 4 * (4 + 1)


def test_the_gradient_in_a_closed_over_value_is_one_all_reduce(mesh_only):
    w, x = normal(4), jax.device_put(normal(8, 4), P("clients"))
    program = fedpax.program(clients=8)(
        lambda w, x: federated_sum(federated_map(lambda x: jnp.sin(w * x), x))
    )
    text = jax.jit(jax.grad(lambda w, x: jnp.sum(program(w, x)))).lower(w, x).compile().as_text()
    result = over_clients(text, mesh_only)
    assert [c.kind for c in result] == ["all-reduce"]
    assert result[0].bytes == 4 * 4


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}])
def test_a_participant_alone_on_its_device_keeps_its_conditional(options, mesh_only):
    n = 8 if options else 4
    x = jax.device_put(normal(n, 4), P("clients"))
    fn = lambda x: jax.lax.cond(x[0] > 0, lambda x: jnp.sin(x @ x), lambda x: x @ x, x)
    program = fedpax.program(clients=n, **options)(lambda x: federated_map(fn, x))
    text = jax.jit(program).lower(x).compile().as_text()
    assert re.search(r"\bconditional\(", text)
    batched = fedpax.program(clients=8)(lambda x: federated_map(fn, x))
    text = jax.jit(batched).lower(jax.device_put(normal(8, 4), P("clients"))).compile().as_text()
    assert not re.search(r"\bconditional\(", text)


def test_loops_of_participants_are_independent(mesh_only):
    # A collective in the loop condition would make all participants run the longest loop.
    fn = lambda x: jax.lax.while_loop(lambda v: jnp.sum(v) < 50, lambda v: v * 1.5 + 1, x)
    program = fedpax.program(clients=8)(lambda x: federated_map(fn, x))
    x = jax.device_put(np.abs(normal(8, 4)), P("clients"))
    text = jax.jit(program).lower(x).compile().as_text()
    assert " while(" in text
    assert not over_clients(text, mesh_only)


# ---- one participant

ROWS, COLUMNS = 128, 256  # a batch of 131,072 bytes


def training_step(model, batch):
    def loss(model):
        hidden = batch
        for w in model:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean((hidden - batch) ** 2)

    value, gradient = jax.value_and_grad(loss)(model)
    return jax.tree.map(lambda w, g: w - 0.1 * g, model, gradient), value


def mapped_and_averaged(model, batch):
    return federated_mean(federated_map(lambda batch: training_step(model, batch), batch))


def mapped(model, batch):
    return federated_map(training_step, model, batch)


def by_hand_of_stacked(model, batch):
    model, batch = jax.tree.map(lambda x: jnp.squeeze(x, 0), (model, batch))
    return jax.tree.map(lambda x: jnp.expand_dims(x, 0), training_step(model, batch))


@pytest.mark.parametrize(
    ("averaged", "islands_axis", "chunk_size"),
    [
        (True, True, None),
        (True, False, 1),
        (False, True, 1),
        (False, False, None),
        pytest.param(True, True, 1, marks=pytest.mark.slow),
        pytest.param(True, False, None, marks=pytest.mark.slow),
        pytest.param(False, True, None, marks=pytest.mark.slow),
        pytest.param(False, False, 1, marks=pytest.mark.slow),
    ],
)
def test_one_participant_is_the_plain_function(averaged, islands_axis, chunk_size):
    """The same temporary memory as the function written by hand, and no copy of the batch."""
    model, batch = [normal(COLUMNS, COLUMNS, seed=i) for i in range(3)], normal(1, ROWS, COLUMNS)
    by_hand = (lambda model, batch: training_step(model, batch[0])) if averaged else None
    if not averaged:
        model, by_hand = [w[None] for w in model], by_hand_of_stacked
    fn = mapped_and_averaged if averaged else mapped
    program = fedpax.program(islands=1, chunk_size=chunk_size)(fn)
    with jax.set_mesh(jax.make_mesh((1,), ("islands" if islands_axis else "data",))):
        result, expected = (
            jax.jit(f, donate_argnums=0).lower(model, batch).compile() for f in (program, by_hand)
        )
    temporaries = [c.memory_analysis().temp_size_in_bytes for c in (result, expected)]
    assert temporaries[0] < temporaries[1] + 4 * COLUMNS  # less than a row of the batch
    batch_copy = rf"f32\[(1,)?{ROWS},{COLUMNS}\]\S* copy\("
    assert not re.search(batch_copy, result.as_text())


# ---- loops that overwrite their inputs


def double_and_sum(x):
    return 2 * x, jnp.sum(x)


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize(
    ("fn", "reads_apart"), [(lambda x: 2 * x + 1, False), (double_and_sum, True)]
)
def test_rows_are_copied_only_where_another_value_is_made_from_them(fn, reads_apart, chunk_size):
    """And no loop copies the rows of all participants."""
    columns = 1000

    def compiled(participants):
        program = fedpax.program(clients=participants, chunk_size=chunk_size)(
            lambda x: federated_map(fn, x)
        )
        x = jax.ShapeDtypeStruct((participants, columns), jnp.float32)
        return jax.jit(program, donate_argnums=0).lower(x).compile().as_text()

    texts = {n: compiled(n) for n in (16, 64)}
    traffic = {n: count_costs(parse(text)).memory_traffic for n, text in texts.items()}
    assert traffic[64] < 4.1 * traffic[16]
    assert traffic[64] < 64 * 4 * columns * (5.5 if reads_apart else 2.1)  # bytes: a read, a write
    assert ("conditional(" in texts[64]) == reads_apart
