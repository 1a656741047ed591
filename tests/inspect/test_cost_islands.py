"""`fedpax.cost` counts the bytes of the compiled collectives for every multi-island method."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpax
from fedpax.aggregators import codecs, compressed_mean, coordinate_median, quantized_mean
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    async_diloco,
    branch_train_merge,
    data_parallel,
    decoupled_diloco,
    diloco,
    eager_diloco,
    easgd,
    halos,
    muloco,
    noloco,
    papa,
    papa_2,
    papa_all,
    sparseloco,
    streaming_diloco,
)
from fedpax.clients import ArrivalOrder, Cohort, Syncs
from fedpax.hlo.collectives import collectives
from fedpax.inspect.transfers import Transfer

N, STEPS, MODEL = 4, 6, 1120
MODELS = {"embedding": np.ones((3, 8), np.float32), "layers": np.ones((4, 8, 8), np.float32)}
BATCHES = np.ones((N, STEPS, 2, 3), np.float32), np.ones((N, STEPS, 2), np.float32)
ALL_UP = np.ones((N, 3), bool)
SYNCS = Syncs(
    num_steps=2 * ALL_UP.astype(int), weights=3.0 * ALL_UP, receives=ALL_UP, rejoins=~ALL_UP
)


def loss_fn(params, batch):
    x, y = batch
    x = x @ params["embedding"]
    for kernel in params["layers"]:
        x = x + jnp.tanh(x @ kernel)
    return jnp.mean((x.sum(-1) - y) ** 2), {}


ADAM = optax.adamw(0.01)
INNER = {"islands": N, "inner_optimizer": ADAM}
PLAIN = {"islands": N, "optimizer": ADAM}
E3M0 = compressed_mean(codecs.e3m0())
SIGN = compressed_mean(codecs.sign(bits=2), error_feedback=True)


def stream(**settings) -> FederatedAlgorithm:
    return streaming_diloco(loss_fn, **INNER, **settings)


METHODS: dict[str, tuple[Callable[[], FederatedAlgorithm], Cohort]] = {
    name: (make, Cohort(BATCHES))
    for name, make in {
        "DiLoCo": lambda: diloco(loss_fn, **INNER),
        "DiLoCo, 4 bits": lambda: diloco(loss_fn, **INNER, aggregator=E3M0),
        "DiLoCo, 4 levels": lambda: diloco(loss_fn, **INNER, aggregator=quantized_mean(4)),
        "DiLoCo, median": lambda: diloco(loss_fn, **INNER, aggregator=coordinate_median()),
        "Streaming, delay 1": lambda: stream(fragments=3, delay=1, mixing=0.5),
        "Streaming, delay 0": lambda: stream(fragments=3, delay=0),
        "Streaming, 2 fragments": lambda: stream(fragments=2, delay=2),
        "Streaming, 4 bits": lambda: stream(fragments=3, delay=1, aggregator=E3M0),
        "Streaming, 4 levels": lambda: stream(fragments=2, delay=1, aggregator=quantized_mean(4)),
        "Eager": lambda: eager_diloco(loss_fn, **INNER),
        "Eager, 4 bits": lambda: eager_diloco(loss_fn, **INNER, aggregator=E3M0),
        "Eager, median": lambda: eager_diloco(loss_fn, **INNER, aggregator=coordinate_median()),
        "MuLoCo": lambda: muloco(loss_fn, islands=N),
        "MuLoCo, 2 bits": lambda: muloco(loss_fn, islands=N, aggregator=SIGN),
        "SparseLoCo": lambda: sparseloco(loss_fn, **INNER),
        "NoLoCo": lambda: noloco(loss_fn, **INNER),
        "EASGD": lambda: easgd(loss_fn, **PLAIN),
        "PAPA": lambda: papa(loss_fn, **PLAIN),
        "PAPA-all": lambda: papa_all(loss_fn, **PLAIN),
        "PAPA-2": lambda: papa_2(loss_fn, **PLAIN),
        "PAPA-2, rotation": lambda: papa_2(loss_fn, **PLAIN, pairs="rotation"),
        "Branch-Train-Merge": lambda: branch_train_merge(loss_fn, **PLAIN),
        "Decoupled": lambda: decoupled_diloco(loss_fn, **INNER),
        "Decoupled, 3 fragments": lambda: decoupled_diloco(loss_fn, **INNER, fragments=3, delay=1),
        "Asynchronous": lambda: async_diloco(loss_fn, **INNER),
        "HALoS": lambda: halos(loss_fn, regions=(0, 0, 1, 1), inner_optimizer=ADAM),
        "data parallel": lambda: data_parallel(loss_fn, **PLAIN),
    }.items()
}
METHODS["Decoupled, schedule"] = (
    METHODS["Decoupled, 3 fragments"][0],
    Cohort(BATCHES, schedule=SYNCS),
)
METHODS["Asynchronous, schedule"] = (
    METHODS["Asynchronous"][0],
    Cohort(BATCHES, schedule=ArrivalOrder(np.arange(N))),
)
QUICK = "Eager", "NoLoCo", "Asynchronous"
EXCHANGED = {"NoLoCo": 2, "PAPA-2": N - 1, "PAPA-2, rotation": 1}  # models
FLAG = {"PAPA-2, rotation": 1}  # the byte that tells whether the partner answers


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_bytes_of_island_methods_are_those_of_the_compiled_collectives(name: str):
    make, cohort = METHODS[name]
    mesh = fedpax.make_mesh(islands=N, devices=jax.devices()[:N])
    with jax.set_mesh(mesh):
        algorithm = make()
        state = jax.eval_shape(algorithm.init, MODELS)
        counted = fedpax.cost(algorithm.round, state, cohort).placements["islands"]
        text = jax.jit(algorithm.round).lower(state, cohort).compile().as_text()
    expected = 0
    for collective in collectives(text, mesh):
        # A conditional has the permutations of 3 pairings, one of which runs. A loop of unknown
        # length counts once.
        share = 3 if collective.kind == "collective-permute" and name != "PAPA-2" else 1
        expected += collective.bytes * (collective.executions or 1) / share
    if "median" in name:
        expected -= MODEL / N  # an all-gather: the islands receive the median, each has 1 / N
    assert sum(map(_bytes_in_tiles, counted.reduced)) == expected
    if name in EXCHANGED:
        result = [t for t in counted.reduced if t.operation == "exchange"]
        sent = sum(t.sent_bytes * t.executions for t in result)
        assert sent == EXCHANGED[name] * MODEL + FLAG.get(name, 0)


def _bytes_in_tiles(transfer: Transfer) -> int:
    """Return the bytes of a value in the compiled program: an all-gather sends 128 words a tile."""
    size = transfer.sent_bytes
    if transfer.operation == "gather" and transfer.num_bytes != size:
        size = -(-size // 512) * 512
    return size * transfer.executions


@pytest.mark.parametrize(
    "name",
    [
        name if name == "NoLoCo" else pytest.param(name, marks=pytest.mark.slow)
        for name in EXCHANGED
    ],
)
def test_an_exchange_costs_the_same_without_a_mesh(name: str):
    make, cohort = METHODS[name]
    algorithm = make()
    counted = fedpax.cost(algorithm.round, jax.eval_shape(algorithm.init, MODELS), cohort)
    assert counted.placements["islands"].sent_bytes == (
        EXCHANGED[name] * MODEL + FLAG.get(name, 0) + 4
    )
