"""Rounds of methods with client states, with fedpax and as hand-written loops.

    python -m fedpax.experiments.benchmarks.store_rounds --devices=1,2,8 --clock=cpu

In the hand-written round, all clients are at home, none is absent, all take the same number of
steps, and the loop reads and writes their states in a donated array. It is compared with fedpax's
round of the same clients, whose results must be equal, and of sampled clients, some away from home.
The other baseline is FedAvg as a hand-written loop, without controls to read and to sum.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedpax import Cohort
from fedpax.algorithm import Params
from fedpax.clients.row_blocks import count_rows
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.fedavg_round import check_equal, scan_round
from fedpax.experiments.benchmarks.harness import Row, Timed, command, integers, option, some
from fedpax.experiments.benchmarks.method_rounds import CLIENTS, sample
from fedpax.experiments.benchmarks.workloads import (
    LEARNING_RATE,
    LOCAL_STEPS,
    Sizes,
    Workload,
    method,
)

FEDAVG = "FedAvg by hand"
MOST = 1.1  # of the hand-written round, the rows that move included
STRENGTH = 0.1  # FedDyn's alpha and Ditto's lambda
tree = jax.tree.map

Extra = Callable[[Params], Params]
LocalTrain = Callable[[Params, Extra], Params]  # from a model, with a term of each gradient


class HandState(NamedTuple):
    params: Params
    server: Any  # SCAFFOLD's control, FedDyn's drift
    rows: Params  # [rows, ...], sharded


class ByHand(NamedTuple):
    """A method by hand, and the names of what its state has beside `params`."""

    server: str | None
    store: str
    client: Callable[..., tuple[Params, Params, Any]]  # the trained model, the row, its change
    update: Callable[..., tuple[Params, Any]]  # of the model and the server's state


def scaffold_client(train: LocalTrain, x: Params, c: Params, row: Params) -> Any:
    """Run option II: the new control is the mean gradient."""
    correction, scale = tree(jnp.subtract, c, row), 1 / (LOCAL_STEPS * LEARNING_RATE)
    y = train(x, lambda _: correction)
    mean = tree(lambda x, y: (x - y) * scale, x, y)  # of the corrected gradients
    return y, tree(jnp.subtract, mean, correction), tree(jnp.subtract, mean, c)


def scaffold_update(x: Params, c: Params, mean: Params, change: Params, _: float) -> Any:
    """Add the changes of the cohort's controls to the server's control."""
    return tree(jnp.subtract, x, mean), tree(jnp.add, c, change)


def feddyn_client(train: LocalTrain, x: Params, h: Params, row: Params) -> Any:
    """Add alpha (x - y) to the client's gradient."""
    center = tree(lambda x, g: x + g / STRENGTH, x, row)
    y = train(x, lambda y: tree(lambda y, c: STRENGTH * (y - c), y, center))
    return y, tree(lambda g, x, y: g + STRENGTH * (x - y), row, x, y), ()


def feddyn_update(x: Params, h: Params, mean: Params, _: Any, share: float) -> Any:
    """Move the model by the clients' mean and by the drift."""
    h = tree(lambda h, m: h + STRENGTH * share * m, h, mean)
    return tree(lambda x, m, h: x - (m + h / STRENGTH), x, mean, h), h


def ditto_client(train: LocalTrain, x: Params, _: Any, row: Params) -> Any:
    """Train the shared model, then the client's model, drawn to the shared one."""
    y = train(x, lambda y: tree(jnp.zeros_like, y))
    return y, train(row, lambda v: tree(lambda v, x: STRENGTH * (v - x), v, x)), ()


def ditto_update(x: Params, _: Any, mean: Params, change: Any, share: float) -> Any:
    """Move the model by the clients' mean."""
    return tree(jnp.subtract, x, mean), ()


BY_HAND = {
    "SCAFFOLD II": ByHand("control", "client_controls", scaffold_client, scaffold_update),
    "FedDyn": ByHand("drift", "client_gradients", feddyn_client, feddyn_update),
    "Ditto": ByHand(None, "personal_params", ditto_client, ditto_update),
}


def hand_round(
    by_hand: ByHand, workload: Workload, population: int
) -> Callable[[HandState, chex.ArrayTree, jax.Array, jax.Array], tuple[HandState, None]]:
    """Make the round as a loop over the clients of a device, with one all-reduce at the end."""

    def on_device(state: HandState, batches: Any, weights: Any, ids: Any) -> HandState:
        x, server, rows = state
        first = jax.lax.axis_index("clients") * len(jax.tree.leaves(rows)[0])

        def run(i: Any, carry: Any) -> Any:
            total, change, rows = carry
            row, batches_of_client = ids[i] - first, tree(lambda batch: batch[i], batches)

            def train(start: Params, extra: Extra) -> Params:
                def step(y: Params, batch: chex.ArrayTree) -> tuple[Params, None]:
                    gradient = jax.grad(lambda y: workload.loss_fn(y, batch)[0])(y)
                    moved = tree(lambda y, g, e: y - LEARNING_RATE * (g + e), y, gradient, extra(y))
                    return moved, None

                return jax.lax.scan(step, start, batches_of_client)[0]

            y, new, own = by_hand.client(train, x, server, tree(lambda all_: all_[row], rows))
            rows = tree(lambda all_, new: all_.at[row].set(new), rows, new)
            total = tree(lambda t, x, y: t + weights[i] * (x - y), total, x, y)
            return total, tree(jnp.add, change, own), rows

        zeros = tree(jnp.zeros_like, x)
        sums = zeros, zeros if by_hand.update is scaffold_update else ()
        *sums, rows = jax.lax.fori_loop(0, len(weights), run, (*sums, rows))
        *sums, weight, count = jax.lax.psum((*sums, jnp.sum(weights), len(weights)), "clients")
        mean = tree(lambda t: t / weight, sums[0])
        change = tree(lambda t: t / population, sums[1])
        return HandState(*by_hand.update(x, server, mean, change, count / population), rows)

    placed = P("clients")
    specs = HandState(P(), P(), placed)
    mapped = jax.shard_map(
        on_device, in_specs=(specs, placed, placed, placed), out_specs=specs, check_vma=False
    )
    return lambda *arguments: (mapped(*arguments), None)


def clients_at_home(clients: int, population: int, devices: int) -> np.ndarray:
    """Sample the same number of clients from each device's rows."""
    block, random = count_rows(population, devices) // devices, np.random.default_rng(0)
    known = [min(block, population - device * block) for device in range(devices)]
    drawn = [random.permutation(size)[: clients // devices] for size in known]
    return np.concatenate([device * block + ids for device, ids in enumerate(drawn)]).astype(
        np.int32
    )


class StoreRounds(Sizes, Timed):
    clients: list[int] = option("128", "numbers of clients in the round", integers)
    population: int = option(1000, "clients with states")
    methods: list[str] | None = some(",", lambda _: BY_HAND)
    columns = (
        "devices {devices} | clients {clients:5,} | round {name:24} "
        "| temporaries {temporary_bytes:11,} | median s {seconds:.4f} "
        "| ratio to FedAvg by hand {ratio:.2f} | to the same by hand {to_hand:.2f}"
    )
    bar = f"{MOST:g} of the hand-written round"

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> list[Row]:
        params, batches, weights = workload.random_arguments(clients, mesh)
        ids = jnp.asarray(clients_at_home(clients, self.population, mesh.size))
        cohort = Cohort(batches, weights, client_ids=ids)
        inputs = batches, weights, jax.device_put(ids, P("clients"))
        moving = cohort._replace(client_ids=sample(clients, self.population, mesh.size))
        average = scan_round(workload.local_train, clients)
        plain = workload.fedavg(clients, chunk_size=1)
        rounds: dict[str, tuple[Any, ...]] = {
            FEDAVG: (lambda *arguments: (average(*arguments), None), params, batches, weights),
            "FedAvg": (plain.round, plain.init(params), cohort),
        }
        sizes: Any = {"cohort_size": clients, "num_clients": self.population, "chunk_size": 1}
        sizes["client_optimizer"] = optax.sgd(LEARNING_RATE)
        for name in self.methods or BY_HAND:
            _, function, settings = CLIENTS[name]
            algorithm = method(function, workload.loss_fn, **sizes, **settings)
            by_hand, state = BY_HAND[name], algorithm.init(params)

            def parts(state: Any, by_hand: ByHand = by_hand) -> HandState:
                server = getattr(state, by_hand.server) if by_hand.server else ()
                return HandState(state.params, server, getattr(state, by_hand.store).rows)

            step = hand_round(by_hand, workload, self.population)
            if self.repetitions:
                expected, _ = jax.jit(step)(parts(state), *inputs)
                got, _ = jax.jit(algorithm.round)(state, cohort)
                check_equal({"by hand": tuple(expected), "fedpax": tuple(parts(got))})
                del expected, got
            rounds[f"{name} by hand"] = (step, parts(state), *inputs)
            rounds[f"{name}, all at home"] = (algorithm.round, state, cohort)
            rounds[name] = (algorithm.round, state, moving)
        compiled = {k: timing.compile_for(*fn, repeats=True) for k, fn in rounds.items()}
        rows = self.compare(compiled, FEDAVG)
        seconds = {row.name: row.seconds for row in rows}
        for row in rows:
            base = row.name.removesuffix(" by hand").removesuffix(", all at home") + " by hand"
            row.to_hand = timing.paired_ratio(row.seconds, seconds[base])
            row.met = row.to_hand is None or row.to_hand <= MOST
        return rows


main = command(StoreRounds)
