"""A SCAFFOLD round with fedpax and as a hand-written loop: what the clients' states cost at least.

    python -m fedpax.experiments.benchmarks.scaffold_round --devices=1,2,8 --clock=cpu

The hand-written round does what the method needs and no more: a device's clients are all at home,
none is absent, each takes the same number of steps, and the loop over them reads and writes their
controls in a donated array. It is compared with fedpax's round of the same clients, whose states
must be equal, and with fedpax's round of sampled clients, some of which are away from home. Ratios
are to FedAvg as a hand-written loop: a step of SCAFFOLD reads one more array of the model's size,
and a client reads and writes its control and adds its change to a second sum.
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
from fedpax.algorithms import scaffold
from fedpax.clients.row_blocks import count_rows
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.fedavg_round import check_equal, scan_round
from fedpax.experiments.benchmarks.harness import Row, Timed, command, integers, option
from fedpax.experiments.benchmarks.method_rounds import sample
from fedpax.experiments.benchmarks.workloads import (
    LEARNING_RATE,
    LOCAL_STEPS,
    Sizes,
    Workload,
)

FEDAVG, SCAFFOLD = "FedAvg by hand", "SCAFFOLD by hand"
MOST = 1.25  # of the hand-written round, the rows that move included


class HandState(NamedTuple):
    """The state of the hand-written round."""

    params: Params
    control: Params
    rows: Params  # [rows, ...], sharded


HandRound = Callable[[HandState, chex.ArrayTree, jax.Array, jax.Array], tuple[HandState, None]]


def hand_round(workload: Workload, population: int) -> HandRound:
    """Make the round as a loop over the clients of a device, with one all-reduce at the end."""
    tree, scale = jax.tree.map, 1 / (LOCAL_STEPS * LEARNING_RATE)

    def on_device(state: HandState, batches: Any, weights: Any, ids: Any) -> HandState:
        x, c, rows = state
        first = jax.lax.axis_index("clients") * len(jax.tree.leaves(rows)[0])

        def train(i: Any, carry: Any) -> Any:
            total, change, rows = carry
            row, batch_of_client = ids[i] - first, tree(lambda batch: batch[i], batches)
            correction = tree(lambda c, all_: c - all_[row], c, rows)

            def step(y: Params, batch: chex.ArrayTree) -> tuple[Params, None]:
                gradient = jax.grad(lambda y: workload.loss_fn(y, batch)[0])(y)
                return tree(
                    lambda y, g, k: y - LEARNING_RATE * (g + k), y, gradient, correction
                ), None

            y, _ = jax.lax.scan(step, x, batch_of_client)
            mean = tree(lambda x, y: (x - y) * scale, x, y)  # of the corrected gradients
            rows = tree(lambda all_, m, k: all_.at[row].set(m - k), rows, mean, correction)
            total = tree(lambda t, x, y: t + weights[i] * (x - y), total, x, y)
            return total, tree(lambda t, m, c: t + (m - c), change, mean, c), rows

        zeros = tree(jnp.zeros_like, x)
        *sums, rows = jax.lax.fori_loop(0, len(weights), train, (zeros, zeros, rows))
        total, change, weight = jax.lax.psum((*sums, jnp.sum(weights)), "clients")
        return HandState(
            tree(lambda x, t: x - t / weight, x, total),
            tree(lambda c, t: c + t / population, c, change),
            rows,
        )

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


class ScaffoldRound(Sizes, Timed):
    clients: list[int] = option("128", "numbers of clients in the round", integers)
    population: int = option(1000, "clients with states")
    columns = (
        "devices {devices} | clients {clients:5,} | round {name:22} "
        "| temporaries {temporary_bytes:11,} | median s {seconds:.4f} "
        "| ratio to FedAvg by hand {ratio:.2f} | to the same by hand {to_hand:.2f}"
    )
    bar = f"{MOST:g} of the hand-written round"

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> list[Row]:
        sizes: Any = {"cohort_size": clients, "num_clients": self.population, "chunk_size": 1}
        sgd, plain = optax.sgd(LEARNING_RATE), workload.fedavg(clients, chunk_size=1)
        method = scaffold(workload.loss_fn, client_optimizer=sgd, **sizes)
        params, batches, weights = workload.random_arguments(clients, mesh)
        ids = jnp.asarray(clients_at_home(clients, self.population, mesh.size))
        cohort = Cohort(batches, weights, client_ids=ids)
        state = method.init(params)
        hand = HandState(params, state.control, state.client_controls.rows)
        inputs = batches, weights, jax.device_put(ids, P("clients"))
        by_hand = hand_round(workload, self.population)
        if self.repetitions:
            expected, _ = jax.jit(by_hand)(hand, *inputs)
            got, _ = jax.jit(method.round)(state, cohort)
            results = got.params, got.control, got.client_controls.rows
            check_equal({"by hand": tuple(expected), "fedpax": results})
            del expected, got, results
        moving = cohort._replace(client_ids=sample(clients, self.population, mesh.size))
        average = scan_round(workload.local_train, clients)
        rounds: dict[str, tuple[Any, ...]] = {
            FEDAVG: (lambda *arguments: (average(*arguments), None), params, batches, weights),
            "FedAvg": (plain.round, plain.init(params), cohort),
            SCAFFOLD: (by_hand, hand, *inputs),
            "SCAFFOLD, all at home": (method.round, state, cohort),
            "SCAFFOLD": (method.round, state, moving),
        }
        compiled = {k: timing.compile_for(*fn, repeats=True) for k, fn in rounds.items()}
        rows = self.compare(compiled, FEDAVG)
        seconds = {row.name: row.seconds for row in rows}
        for row in rows:
            base = SCAFFOLD if "SCAFFOLD" in row.name else FEDAVG
            row.to_hand = timing.paired_ratio(row.seconds, seconds[base])
            row.met = row.to_hand is None or row.to_hand <= MOST
        return rows


main = command(ScaffoldRound)
