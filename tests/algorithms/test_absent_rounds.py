"""A participant of weight 0, and a round of them, move neither the model nor any state."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from test_any_aggregator import METHODS, SGD, STEPS, N, loss_fn

from fedpax import Cohort
from fedpax.aggregators import add_noise, chain, mean, private_mean
from fedpax.algorithms import (
    async_diloco,
    branch_train_merge,
    data_parallel,
    diloco,
    eager_diloco,
    fedavg,
    fedbuff,
    mime,
    noloco,
    papa,
    papa_2,
    papa_all,
    server_adam,
)

MOMENTUM = optax.sgd(0.05, momentum=0.9)
CLIENTS = {"cohort_size": N, "client_optimizer": SGD}
SERVERS = {
    "FedAvgM": lambda **a: fedavg(
        loss_fn, server_optimizer=optax.sgd(1.0, momentum=0.9), **CLIENTS, **a
    ),
    "weight decay": lambda **a: fedavg(
        loss_fn, server_optimizer=optax.adamw(0.1, weight_decay=0.1), **CLIENTS, **a
    ),
    "fedbuff": lambda **a: fedbuff(
        loss_fn,
        buffer_size=N,
        max_staleness=1,
        client_optimizer=SGD,
        server_optimizer=server_adam(0.1),
        **a,
    ),
    "data_parallel": lambda: data_parallel(loss_fn, islands=N, optimizer=optax.adam(0.1)),
    "noloco": lambda: noloco(loss_fn, islands=N, inner_optimizer=SGD),
    "papa": lambda: papa(loss_fn, islands=N, optimizer=SGD),
    "papa_2": lambda: papa_2(loss_fn, islands=N, optimizer=SGD),
    "papa_all": lambda: papa_all(loss_fn, islands=N, optimizer=SGD),
    "branch_train_merge": lambda: branch_train_merge(loss_fn, islands=N, optimizer=SGD),
    "async_diloco": lambda: async_diloco(loss_fn, islands=N, inner_optimizer=SGD),
    **METHODS,  # less one, whose outer gradients of the round before arrive: tested below
}
SERVERS["mime"] = lambda: mime(loss_fn, cohort_size=N, client_optimizer=MOMENTUM)
del SERVERS["eager_diloco"]
FAST = (
    *("FedAvgM", "weight decay", "FedAdam", "self-tuning", "mime", "fednova", "diloco"),
    *("data_parallel", "noloco", "papa"),
)


def cohort(num_steps: int) -> Cohort:
    random = np.random.default_rng(0)
    x = random.normal(size=(N, STEPS, 4, 5)).astype(np.float32)
    batches = {"x": x, "y": x[..., :2] + 1, "mask": np.ones((N, STEPS, 4), np.float32)}
    batches["mask"][:, num_steps:] = 0
    return Cohort(batches, client_ids=np.arange(N))


ABSENT = {"padding": cohort(0), "weights": cohort(STEPS)._replace(num_examples=np.zeros(N))}


def start(method, name=""):
    params = {"kernel": jnp.ones((5, 2)), "bias": jnp.zeros(2)}
    if name == "hypcluster":
        params = jax.tree.map(lambda p: jnp.stack([p, -p]), params)
    return method.init(params)


CASES = [
    pytest.param(
        *(name, absent),
        id=f"{name}-{how}",
        marks=[pytest.mark.slow]
        if name not in FAST or (how == "weights" and "data" not in name)
        else [],
    )
    for how, absent in ABSENT.items()
    for name in SERVERS
]


@pytest.mark.parametrize(("name", "absent"), CASES)
def test_the_model_and_the_server_optimizer_stay(name, absent):
    method = SERVERS[name]()
    step = jax.jit(method.round)
    state, _ = step(start(method, name), cohort(STEPS))  # momentum
    after, _ = step(state, absent)
    later, _ = step(after, cohort(STEPS))
    same = lambda a, b: jax.tree.map(np.array_equal, a, b)
    for field in (
        *("params", "server_optimizer_state", "outer_optimizer_state", "momentum"),
        "optimizer_state" if name == "data_parallel" else "params",
        *("local_params", "log_hyperparameters", "hyper_optimizer_state"),
    ):
        # Islands that share a model take it at the end of each round.
        if hasattr(state, field) and not (field == "local_params" and "params" in state._fields):
            old, new = getattr(state, field), getattr(after, field)
            assert all(jax.tree.leaves(same(old, new))), field
    if name == "mime":
        assert all(
            jax.tree.leaves(same(state.client_optimizer_state, after.client_optimizer_state))
        )
    assert not all(jax.tree.leaves(same(later.params, after.params)))


CHUNKED = ("fedavg", "scaffold I", "scaffold II", "feddyn", "apfl", "ditto", "agnostic", "mime")
FAST_CHUNKED = ("fedavg", "scaffold II", "feddyn", "apfl", "ditto")
WITHOUT_STORES = (
    *("FedAdam", "self-tuning", "fedprox", "mime_lite", "fedac", "fednova", "hypcluster"),
    *("per_fedavg", "reptile", "fedbuff"),
)
ISLAND_METHODS = (
    *(
        "diloco",
        "local_sgd",
        "muloco",
        "eager_diloco",
        "streaming_diloco",
        "easgd",
        "data_parallel",
    ),
    *("noloco", "papa", "papa_2", "papa_all", "branch_train_merge", "async_diloco"),
)
WITH_STEPS = ("feddyn", "scaffold II", "diloco")


@pytest.mark.parametrize(
    ("name", "chunk_size", "devices"),
    [
        *((name, None, 1) for name in (*FAST_CHUNKED, "diloco")),
        *(pytest.param(name, None, 1, marks=pytest.mark.slow) for name in ISLAND_METHODS[1:]),
        *(
            pytest.param(name, *how, marks=pytest.mark.slow)
            for name in CHUNKED + WITHOUT_STORES
            for how in ((None, 1), (1, 1), (2, 1), (None, 4), (1, 4))
            if (name not in FAST_CHUNKED or how != (None, 1))
            and not (name == "self-tuning" and how[0])  # it differentiates the round
        ),
    ],
)
def test_a_participant_of_weight_0_is_an_empty_slot(name, chunk_size, devices):
    """Whatever its data and steps are: the state, the metrics and the stored rows are the same."""
    method = (SERVERS | METHODS)[name](**({} if chunk_size is None else {"chunk_size": chunk_size}))
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    with contextlib.nullcontext() if devices == 1 else jax.set_mesh(mesh):
        step = jax.jit(method.round)
        full, slot = cohort(STEPS), 3
        state, _ = step(start(method, name), full._replace(num_examples=np.arange(1, N + 1)))
        ids = np.where(np.arange(N) == slot, -1, np.arange(N)).astype(np.int32)
        expected = step(state, full._replace(num_examples=np.arange(1, N + 1), client_ids=ids))
        x = full.batches["x"].copy()
        x[slot] = np.nan
        for data in (full.batches["x"], x):
            weights = np.where(np.arange(N) == slot, 0, np.arange(1, N + 1))
            given = Cohort({**full.batches, "x": data}, weights)
            if name not in ISLAND_METHODS:
                given = given._replace(client_ids=np.arange(N))
            for steps in (None, np.full(N, STEPS)) if name in WITH_STEPS else (None,):
                after = step(state, given._replace(num_steps=steps))
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), after, expected
                )


def test_weights_alone_keep_the_reverse_derivative_of_a_round_of_islands():
    method = SERVERS["diloco"]()
    given = cohort(STEPS)._replace(num_examples=np.arange(N), client_ids=None)

    def loss_after(params):
        return method.round(method.init(params), given)[1]["loss"]

    jax.make_jaxpr(jax.grad(loss_after))({"kernel": jnp.ones((5, 2)), "bias": jnp.zeros(2)})


ISLANDS = {"islands": N, "inner_optimizer": MOMENTUM}


@pytest.mark.parametrize(
    "make",
    [
        lambda: diloco(loss_fn, **ISLANDS),
        *(
            pytest.param(make, marks=pytest.mark.slow)
            for make in (
                lambda: async_diloco(loss_fn, **ISLANDS),
                lambda: noloco(loss_fn, **ISLANDS),
                lambda: papa(loss_fn, islands=N, optimizer=MOMENTUM),
                lambda: branch_train_merge(loss_fn, islands=N, optimizer=MOMENTUM),
            )
        ),
    ],
)
def test_islands_that_are_absent_keep_their_own_states(make):
    method = make()
    step = jax.jit(method.round)
    full = cohort(STEPS)
    state, _ = step(start(method), full)
    after, _ = step(state, full._replace(client_ids=-np.ones(N, np.int32)))
    if hasattr(state, "round"):
        after = after._replace(round=state.round)
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(after)))
    # Of an island alone: its optimizer, whatever the others do.
    field = (
        "inner_optimizer_state" if hasattr(state, "inner_optimizer_state") else "optimizer_state"
    )
    absent = np.arange(N) == 2
    for mark in ({"client_ids": np.where(absent, -1, 0)}, {"num_examples": np.where(absent, 0, 1)}):
        some, _ = step(state, full._replace(**mark))
        leaves = (jax.tree.leaves(getattr(s, field)) for s in (state, some))
        for old, new in zip(*leaves, strict=True):
            assert np.array_equal(old[2], new[2]) and not np.array_equal(old[1], new[1])


@pytest.mark.slow
def test_the_last_outer_gradients_of_eager_diloco_arrive_in_a_round_without_islands():
    method = eager_diloco(loss_fn, islands=N, inner_optimizer=SGD, outer_optimizer=optax.sgd(1.0))
    step = jax.jit(method.round)
    state, _ = step(start(method), cohort(STEPS))
    for _ in range(2):
        before, (state, _) = state, step(state, cohort(0))
    # Each island has the progress of all now: the second of these rounds changes nothing.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, before.local_params, state.local_params)
    for leaf in jax.tree.leaves(state.local_params):
        close(leaf, np.broadcast_to(np.mean(leaf, axis=0), leaf.shape))
    assert not np.allclose(state.params["kernel"], 1)


@pytest.mark.parametrize(
    "aggregator",
    [
        private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
        chain(add_noise(0.1, seed=0), mean()),
    ],
    ids=["private_mean", "add_noise"],
)
def test_the_noise_of_the_server_hides_that_nobody_took_part(aggregator):
    method = SERVERS["FedAvgM"](aggregator=aggregator)
    after, _ = jax.jit(method.round)(start(method), cohort(0))
    assert not np.array_equal(after.params["kernel"], np.ones((5, 2)))


def test_a_round_without_weights_has_no_further_reduction():
    """Participation is not dynamic: the graph has the sums of the means alone."""
    method = diloco(loss_fn, islands=N, inner_optimizer=SGD)
    plain = cohort(STEPS)
    plain = Cohort({name: plain.batches[name] for name in ("x", "y")})
    text = str(jax.make_jaxpr(method.round)(start(method), plain))
    assert text.count("federated_mean[") == 4  # two parameters and two metrics
    assert "federated_sum[" not in text
