"""`fedpax.cost` counts what a program broadcasts, reduces and computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax import federated_broadcast, federated_map, federated_max, federated_mean, federated_sum
from fedpax.aggregators import (
    Aggregator,
    geometric_median,
    mark_sent,
    private_mean,
    quantized_mean,
)
from fedpax.aggregators.sent_values import mark_server
from fedpax.algorithms import FedAcRates, diloco, fedac, fedavg, fednova, mime, scaffold
from fedpax.hlo.collectives import operand_bytes_along
from fedpax.inspect.cost import count_flops

N = 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)


def cost(fn, *args, **sizes):
    return fedpax.cost(fedpax.program(**(sizes or {"clients": N}))(fn), *args)


def rows(transfers):
    return {t.name: (t.type, t.num_bytes, t.executions) for t in transfers}


def loss_fn(params, batch):
    predicted = batch["x"] @ params["kernel"] + params["bias"]
    return jnp.mean((predicted - batch["y"]) ** 2), {"size": jnp.max(jnp.abs(predicted))}


@pytest.mark.each_value
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "diloco", "quantized"])
def test_the_bytes_sent_are_those_of_the_compiled_collectives(method: str, weighted: bool):
    name = "clients" if method == "fedavg" else "islands"
    n = 16 if method == "fedavg" else 8
    if method == "fedavg":
        algorithm = fedavg(loss_fn, cohort_size=n, client_optimizer=optax.sgd(0.1))
    else:
        aggregator = quantized_mean(4) if method == "quantized" else None
        algorithm = diloco(
            loss_fn, islands=n, inner_optimizer=optax.adam(0.1), aggregator=aggregator
        )
    batches = {"x": jnp.ones((n, 2, 4, 3)), "y": jnp.ones((n, 2, 4, 5))}
    cohort = fedpax.Cohort(batches, num_examples=np.arange(1, n + 1) if weighted else None)
    # A bfloat16 leaf is accumulated in float32.
    params = {"kernel": jnp.asarray(W), "bias": jnp.ones(5, jnp.bfloat16)}
    mesh = fedpax.make_mesh(**{name: 8})
    with jax.set_mesh(mesh):
        state = jax.eval_shape(algorithm.init, params)
        counted = fedpax.cost(algorithm.round, state, cohort).placements[name]
        text = jax.jit(algorithm.round).lower(state, cohort).compile().as_text()
    assert counted.sent_bytes == operand_bytes_along(text, mesh, name)
    metrics_and_weight = 4 * (2 + weighted)
    if method == "quantized":  # 15 and 5 entries, 6 to a word along an axis of length 5
        assert counted.sent_bytes < counted.reduced_bytes == 4 * 20 + counted.sent_bytes - 4 * 4
    else:
        assert counted.sent_bytes == counted.reduced_bytes == 4 * 20 + metrics_and_weight


SGD = {"cohort_size": N, "client_optimizer": optax.sgd(0.1)}
METHODS = {
    "FedNova": fednova(loss_fn, **SGD),
    "Mime": mime(loss_fn, **SGD),
    "FedAc": fedac(loss_fn, cohort_size=N, rates=FedAcRates(0.05, 0.1, 2.0, 3.0)),
    "private": fedavg(
        loss_fn, aggregator=private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0), **SGD
    ),
    "geometric median": fedavg(loss_fn, aggregator=geometric_median(num_iterations=3), **SGD),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Mime", "geometric median") else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)
def test_bytes_of_methods_and_aggregators_are_those_of_the_compiled_collectives(name: str):
    batches = {"x": jnp.ones((N, 2, 4, 3)), "y": jnp.ones((N, 2, 4, 5))}
    cohort = fedpax.Cohort(batches, num_examples=np.arange(1, N + 1))
    params = {"kernel": jnp.asarray(W), "bias": jnp.ones(5)}
    algorithm, mesh = METHODS[name], fedpax.make_mesh(clients=8)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(algorithm.init, params)
        counted = fedpax.cost(algorithm.round, state, cohort).placements["clients"]
        text = jax.jit(algorithm.round).lower(state, cohort).compile().as_text()
    # The clients' weights and norms are put in order: two all-reduces of 8 floats, of which 7 are 0
    # for each client, and one gathered float. Cost counts the client's own two floats.
    expected = 2 * 4 * N + 4 - 2 * 4 if name == "geometric median" else 0
    assert operand_bytes_along(text, mesh, "clients") - counted.sent_bytes == expected


def test_rows_name_arguments_results_and_operations():
    def program(params, x, weights):
        local = lambda x: {"up": jnp.tanh(x @ params["kernel"]), "largest": jnp.max(x)}
        out = federated_map(local, x)
        return federated_mean(out["up"], weights), federated_max(out["largest"])

    weights = np.arange(N)
    clients = cost(program, {"kernel": W}, X, weights).placements["clients"]
    assert rows(clients.broadcast) == {"params['kernel']": ("float32[3,5]", 60, 1)}
    assert rows(clients.reduced) == {
        "mean of <lambda>['up']": ("float32[5]", 20, 1),
        "sum of weights": ("int32[]", 4, 1),
        "max of <lambda>['largest']": ("float32[]", 4, 1),
    }
    assert clients.flops == 2 * 3 * 5 + 5 + 3  # matmul, tanh, max


def test_a_server_value_that_two_maps_read_is_received_once():
    def program(w, x):
        first = federated_map(lambda x: x @ w, x)
        return federated_mean(federated_map(lambda x, y: y + x @ w, x, first))

    clients = cost(program, W, X).placements["clients"]
    assert rows(clients.broadcast) == {"w": ("float32[3,5]", 60, 1)}


def test_a_server_array_in_array_code_is_received():
    def program(w, x):
        return federated_sum(federated_map(jnp.tanh, x) * w[:, 0])

    clients = cost(program, W, X).placements["clients"]
    assert sum(t.num_bytes for t in clients.broadcast) == 12
    assert clients.flops == 3 + 3


def test_values_that_the_server_reads_one_by_one_are_gathered():
    def program(x):
        return jnp.sort(federated_map(jnp.tanh, x), axis=0)[N // 2]

    clients = cost(program, X).placements["clients"]
    assert rows(clients.reduced) == {"gather of tanh": ("float32[3]", 12, 1)}


@pytest.mark.parametrize(
    ("read", "gathered"),
    [
        (lambda w, moved: federated_mean(moved), 0),
        (lambda w, moved: federated_mean(federated_map(lambda m: m - w, moved)), 0),
        (lambda w, moved: jnp.sort(moved, axis=0)[0], 12),
        (lambda w, moved: jnp.sort(2 * moved, axis=0)[0] + federated_mean(moved), 12),
    ],
    ids=["mean", "map", "sort", "both"],
)
def test_a_loop_gathers_what_its_server_reads(read, gathered: int):
    def program(w, x):
        moved = federated_map(jnp.tanh, x)
        step = lambda w, _: (w + read(w, moved) + federated_mean(federated_map(jnp.sin, x)), None)
        return jax.lax.scan(step, w, length=3)[0]

    clients = cost(program, W[:, 0], X).placements["clients"]
    assert sum(t.num_bytes for t in clients.reduced if t.operation == "gather") == gathered


def test_placed_values_that_stay_with_participants_are_not_sent():
    def program(w, x):
        first, second = jax.lax.optimization_barrier(
            (federated_map(jnp.tanh, x), federated_map(jnp.sin, x))
        )
        second = jax.lax.scan(lambda s, k: (s * k, s), second, jnp.arange(3.0))[0]
        second = jax.lax.cond(w[0, 0] > 0, lambda s: s + 1, lambda s: s, second)
        moved = federated_map(lambda a, b: a + b @ w, first[:, :1], second)
        return moved, jax.lax.optimization_barrier(second), federated_mean(first)

    clients = cost(program, W, X).placements["clients"]
    assert rows(clients.reduced) == {"mean of tanh": ("float32[3]", 12, 1)}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (np.roll(np.arange(N), 1), {"exchange of tanh": ("float32[3]", 12, 1)}),
        (None, {"gather of tanh": ("float32[3]", 12, 1)}),  # an order that depends on the values
    ],
)
def test_participants_exchange_values_in_an_order_that_is_known(order, expected):
    def program(x):
        y = federated_map(jnp.tanh, x)
        moved = y[jnp.argsort(y[:, 0]) if order is None else jnp.asarray(order)]
        return moved if order is None else federated_map(jnp.sin, moved)

    assert rows(cost(program, X).placements["clients"].reduced) == expected


def test_equal_sums_are_sent_once_and_constants_never():
    def program(w, x, weights):
        y = federated_map(jnp.tanh, x)
        here = federated_map(lambda n: n > 0, weights)
        also_here = federated_map(lambda n: (n > 0) & True, weights)
        noise = federated_map(lambda x, k: x + k, y, federated_broadcast(jnp.arange(3.0)))
        scale = 2 * w + 1
        return (
            [federated_mean(v, weights) for v in (y, x)],
            [federated_sum(here), federated_sum(also_here), federated_sum(jnp.ones(N))],
            federated_max(noise),
            federated_max(federated_map(lambda x: x * scale, x)),
        )

    clients = cost(program, np.float32(2), X, np.arange(N)).placements["clients"]
    assert rows(clients.broadcast) == {"computed from w": ("float32[]", 4, 1)}
    assert rows(clients.reduced) == {
        "mean of tanh": ("float32[3]", 12, 1),
        "sum of weights": ("int32[]", 4, 1),
        "mean of x": ("float32[3]", 12, 1),
        "count of <lambda>": ("bool[]", 4, 1),
        "max of <lambda>": ("float32[3]", 12, 1),
    }
    assert clients.sent_bytes == 12 + 4 + 12 + 4 + 2 * 12


def test_nested_placements_count_a_client_and_an_island():
    def program(w, x):
        def on_island(x):
            return federated_mean(
                federated_map(lambda x: x @ w, x, placement="clients"), placement="clients"
            )

        return federated_mean(federated_map(on_island, x, placement="islands"), placement="islands")

    result = cost(program, W, X.reshape(2, 4, 3), islands=2, clients=4).placements
    assert result["clients"].flops == 30 and result["clients"].sent_bytes == 20
    assert result["islands"].flops == 4 * 30 + 4 * 5 and result["islands"].sent_bytes == 20
    assert result["clients"].broadcast_bytes == result["islands"].broadcast_bytes == 60

    def twice(w, v, x):
        return program(w, x), program(v, x)

    result = cost(twice, W, W + 1, X.reshape(2, 4, 3), islands=2, clients=4).placements
    assert result["clients"].flops == 2 * 30 and result["islands"].flops == 2 * (4 * 30 + 4 * 5)


def test_a_gradient_sends_the_transpose_of_what_was_broadcast():
    def loss(w, x):
        return federated_mean(federated_map(lambda x: jnp.sum(jnp.tanh(x @ w)), x))

    gradient = jax.grad(fedpax.program(clients=N)(loss))
    clients = fedpax.cost(gradient, W, X).placements["clients"]
    assert 60 in [t.num_bytes for t in clients.broadcast]
    assert [t.num_bytes for t in clients.reduced] == [60]


def test_marked_values_replace_the_update():
    def halves(state, updates, weights):
        def encode(update):
            codes = jax.tree.map(lambda x: x.astype(jnp.float16), update)
            return mark_sent(codes, instead_of=update)

        def decode(codes):
            return jax.tree.map(lambda x: x.astype(jnp.float32), codes)

        return federated_mean(federated_map(decode, federated_map(encode, updates))), state, {}

    aggregator = Aggregator(lambda params: (), halves)
    loss = lambda w, x: (jnp.mean((x @ w) ** 2), {})
    algorithm = fedavg(loss, cohort_size=N, client_optimizer=optax.sgd(0.1), aggregator=aggregator)
    cohort = fedpax.Cohort(jnp.asarray(X)[:, None, None])
    clients = fedpax.cost(algorithm.round, algorithm.init(W), cohort).placements["clients"]
    assert (clients.reduced_bytes, clients.sent_bytes) == (60 + 4, 30 + 4)


def test_peak_memory_is_that_of_the_compiled_program_and_donation_lowers_it():
    program = fedpax.program(clients=N)(lambda w, x: w + federated_mean(federated_map(jnp.sum, x)))
    w = jax.ShapeDtypeStruct((512, 512), np.float32)
    plain = fedpax.cost(program, w, X).peak_bytes
    donated = fedpax.cost(jax.jit(program, donate_argnums=0), w, X).peak_bytes
    assert plain - donated == pytest.approx(4 * 512 * 512, abs=1024)  # but for the loop's counters


def test_the_table_has_a_line_for_each_value_and_totals():
    def program(a, b, x):
        return federated_mean(federated_map(lambda x: (x * a, x * b), x))

    lines = str(cost(program, np.float32(2), np.float32(3), X)).splitlines()
    assert lines[:10] == [
        "clients: 8 participants",
        "  each receives          type        bytes",
        "    a                    float32[]       4",
        "    b                    float32[]       4",
        "    total                                8",
        "  each sends             type        bytes  sent",
        "    mean of <lambda>[0]  float32[3]     12    12",
        "    mean of <lambda>[1]  float32[3]     12    12",
        "    total                               24    24",
        "FLOPs of a participant of clients: 6",
    ]


def test_a_function_without_participants_is_refused():
    with pytest.raises(ValueError, match=r"no federated_map.* Pass a function decorated with"):
        fedpax.cost(jnp.sum, X)
    with pytest.raises(ValueError, match="no federated_map"):
        cost(federated_broadcast, W)


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (jnp.matmul, [(7, 3, 4), (7, 4, 5)], 2 * 7 * 3 * 4 * 5),
        (
            functools.partial(jax.lax.conv, window_strides=(1, 1), padding="VALID"),
            [(2, 3, 8, 8), (5, 3, 3, 3)],
            2 * (2 * 5 * 6 * 6) * (3 * 3 * 3),
        ),
        (jax.nn.relu, [(4, 5)], 20),
        (lambda x: jnp.sum(jnp.exp(x)), [(4, 5)], 40),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0], [(4, 4)], 6 * 128),
        (jax.checkpoint(lambda x: x @ x), [(4, 4)], 128),
        (jnp.sort, [(4, 5)], 0),
    ],
)
def test_flops_of_operations(fn, shapes, expected):
    jaxpr = jax.make_jaxpr(fn)(*[jnp.ones(shape) for shape in shapes])
    assert count_flops(jaxpr.jaxpr).number == expected


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"clients": 8}])
def test_client_states_in_a_store_are_neither_received_nor_sent(sizes):
    loss = lambda w, x: (jnp.mean((x @ w) ** 2), {})
    algorithm = scaffold(loss, cohort_size=N, num_clients=100, client_optimizer=optax.sgd(0.1))
    cohort = fedpax.Cohort(X[:, None, None], client_ids=np.arange(N))
    with jax.set_mesh(fedpax.make_mesh(**sizes)):
        clients = fedpax.cost(algorithm.round, algorithm.init(W), cohort).placements["clients"]
    assert clients.broadcast_bytes == 2 * 60  # model and control variate
    # Their changes and the loss, and the number of clients that are present.
    assert clients.sent_bytes == 2 * 60 + 4 + 4


def test_work_of_the_server_on_the_participants_devices_is_the_servers():
    def program(w, x):
        by_participants = federated_sum(federated_map(jnp.tanh, x))
        recompute = lambda i: mark_server(jnp.sin(i * w))
        return by_participants, federated_sum(federated_map(recompute, np.arange(N)))

    result = cost(program, W, X)
    clients = result.placements["clients"]
    assert rows(clients.broadcast) == {}
    assert rows(clients.reduced) == {"sum of tanh": ("float32[3]", 12, 1)}
    assert clients.flops == 3
    assert result.server_flops == N * (3 + 2 * 15 + 15)  # two sums, multiply and sine
