"""Rounds of the methods against FedAvg's or DiLoCo's: time and memory.

    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --clients=16
    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --islands=4

The second command compares with DiLoCo. `passes` is a method's cost in gradients per batch, with a
forward pass as a third of one and a Hessian-vector product as two; the last column divides the time
by that of so many rounds of the baseline: 1 means that nothing is computed twice.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedpax import Cohort, algorithms
from fedpax.algorithm import FederatedAlgorithm
from fedpax.clients import home_devices
from fedpax.data import balanced_order
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, integers, option
from fedpax.experiments.benchmarks.workloads import (
    LEARNING_RATE,
    WORKLOADS,
    Sizes,
    Workload,
    method,
)
from fedpax.parallel.mesh import make_mesh

FORWARD = 1 / 3
NUM_CLUSTERS = 2
MUON = "DiLoCo with Muon"
MOMENTUM: Any = {"momentum": 0.9}
META: Any = {"adaptation_learning_rate": LEARNING_RATE}
# The cost in gradients, the function and its settings.
CLIENTS: dict[str, tuple[float, str, dict[str, Any]]] = {
    "FedAvg": (1, "fedavg", {}),
    "FedProx": (1, "fedprox", {"mu": 0.1}),
    "SCAFFOLD II": (1, "scaffold", {}),
    "SCAFFOLD I": (2, "scaffold", {"option": "I"}),
    "FedNova": (1, "fednova", {}),
    "FedDyn": (1, "feddyn", {"alpha": 0.1}),
    "Mime": (3, "mime", MOMENTUM),
    "MimeLite": (2, "mime_lite", MOMENTUM),
    "FedAc": (1, "fedac", {}),
    "agnostic": (1 + FORWARD, "agnostic", {"mixture_learning_rate": 0.01}),
    "APFL": (2, "apfl", {"mixing": 0.5}),
    "Ditto": (2, "ditto", {"lam": 0.1}),
    "HypCluster": (1 + NUM_CLUSTERS * FORWARD, "hypcluster", {"num_clusters": NUM_CLUSTERS}),
    # Gradients of half a batch each: one to adapt, one at the adapted model.
    "Per-FedAvg (FO)": (1, "per_fedavg", {**META, "first_order": True}),
    "Per-FedAvg": (2, "per_fedavg", META),
    "Reptile": (1, "reptile", {"meta_learning_rate": 0.5}),
}
ISLANDS: dict[str, tuple[float, str, dict[str, Any]]] = {
    "DiLoCo": (1, "diloco", {}),
    "data parallelism": (1, "data_parallel", {}),
    "Streaming DiLoCo": (1, "streaming_diloco", {"fragments": 1, "delay": 1}),
    "Eager DiLoCo": (1, "eager_diloco", {}),
    "async DiLoCo": (1, "async_diloco", {}),
    "SparseLoCo": (1, "sparseloco", {}),
    "NoLoCo": (1, "noloco", {}),
    "EASGD": (1, "easgd", {}),
    "PAPA": (1, "papa", {}),
    "PAPA-all": (1, "papa_all", {}),
    "PAPA-2": (1, "papa_2", {}),
    "Branch-Train-Merge": (1, "branch_train_merge", {}),
    # Muon's Newton-Schulz steps are part of MuLoCo's baseline.
    MUON: (1, "diloco", {"inner_optimizer": optax.contrib.muon(LEARNING_RATE)}),
    "MuLoCo": (1, "muloco", {"learning_rate": LEARNING_RATE}),
}


class MethodRounds(Sizes, Timed):
    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: list[int] = option("16", "numbers of clients in the round", integers)
    devices: list[int] = option("1", "numbers of devices; simulated on a CPU", integers)
    islands: int | None = option(None, "time the methods of islands, and so many islands", int)
    population: int | None = option(None, "clients with states; default: the cohort", int)
    chunk_size: int = option(1, "participants that a device runs at once")
    methods: list[str] | None = harness.some(",", lambda rounds: rounds._table)
    columns = (
        "method {name:18} | temporaries {temporary_bytes:13,} | median s {seconds:.4f} "
        "| ratio {ratio:.2f} | passes {passes:.2f} | ratio / passes {ratio_to_passes:.2f} "
        "| baseline {baseline:16}"
    )

    @property
    def _table(self) -> dict[str, tuple[float, str, dict[str, Any]]]:
        return CLIENTS if self.islands is None else ISLANDS

    def _method(self, loss_fn: Any, name: str, clients: int) -> FederatedAlgorithm:
        _, function, settings = self._table[name]
        rates = algorithms.FedAcRates(LEARNING_RATE, 2 * LEARNING_RATE, 2.0, 3.0)
        sgd = optax.sgd(LEARNING_RATE, settings.get("momentum"))
        optimizer = sgd if self.islands is None else optax.adamw(LEARNING_RATE)
        common = {f"{prefix}optimizer": optimizer for prefix in ("client_", "inner_", "")}
        common |= {"num_clients": self.population or clients, "islands": self.islands}
        common |= {"cohort_size": clients, "rates": rates}
        return method(function, loss_fn, **common | settings)

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> Iterator[Row]:
        participants = self.islands or clients
        placement = "clients" if self.islands is None else "islands"
        params, batches, num_examples = workload.random_arguments(participants, mesh)
        baselines = dict.fromkeys(self._table, next(iter(self._table))) | {"MuLoCo": MUON}
        used = {*(self.methods or self._table)}
        for _ in range(2):  # a baseline has a baseline too
            used |= {baselines[name] for name in used}
        rounds, sizes = {}, dict[str, Any]({placement: -1})
        with jax.set_mesh(make_mesh(devices=list(mesh.devices.flat), **sizes)):
            batches, num_examples = jax.device_put((batches, num_examples), P(placement))
            cohort = Cohort(batches)
            if placement == "clients":
                client_ids = sample(participants, self.population or participants, mesh.size)
                cohort = Cohort(batches, num_examples, client_ids=client_ids)
            for name in (name for name in self._table if name in used):
                start, algorithm = params, self._method(workload.loss_fn, name, clients)
                if name == "HypCluster":
                    start = jax.tree.map(lambda p: jnp.stack([p * s for s in (1, 0.9)]), params)
                step: Any = algorithm.round
                step = step.with_options(chunk_size=self.chunk_size)
                rounds[name] = timing.compile_for(step, algorithm.init(start), cohort, repeats=True)
            rows = self.compare(rounds, baselines)
        for row in rows:
            passes, ratio = self._table[row.name][0], row.ratio
            yield Row(**vars(row), passes=passes, ratio_to_passes=ratio and ratio / passes)


def sample(clients: int, population: int, devices: int) -> jax.Array:
    """Sample clients, in the order of `cohort_rounds`."""
    client_ids = np.random.default_rng(0).permutation(population)[:clients]
    homes = home_devices(client_ids, population, devices)
    return jnp.asarray(client_ids[balanced_order(np.ones(clients), devices, homes=homes)])


main = command(MethodRounds)
