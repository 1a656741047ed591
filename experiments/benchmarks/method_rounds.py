"""Rounds of the methods against FedAvg's or DiLoCo's: time and memory.

    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --clients=16
    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --islands=4

The second command times the methods of islands against DiLoCo with the same inner optimizer and
number of inner steps. `passes` is a method's cost in gradients per batch, with a forward pass as a
third of one and a Hessian-vector product as two; the last column divides the time by the time of so
many rounds of the baseline: 1 means that nothing is computed twice. As in training, a round starts
from the last one's state and takes over its memory.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from fedpax import Cohort, algorithms
from fedpax.algorithm import FederatedAlgorithm
from fedpax.clients import home_devices
from fedpax.data import balanced_order
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import LEARNING_RATE, WORKLOADS, method
from fedpax.parallel.mesh import make_mesh

FORWARD = 1 / 3
NUM_CLUSTERS = 2
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
ISLANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DiLoCo": ("diloco", {}),
    "data parallelism": ("data_parallel", {}),
    "Streaming DiLoCo": ("streaming_diloco", {"fragments": 1, "delay": 1}),
    "Eager DiLoCo": ("eager_diloco", {}),
    "async DiLoCo": ("async_diloco", {}),
    "SparseLoCo": ("sparseloco", {}),
    "NoLoCo": ("noloco", {}),
    "EASGD": ("easgd", {}),
    "PAPA": ("papa", {}),
    "PAPA-all": ("papa_all", {}),
    "PAPA-2": ("papa_2", {}),
    "Branch-Train-Merge": ("branch_train_merge", {}),
    # Muon's Newton-Schulz steps are part of MuLoCo's baseline.
    "DiLoCo with Muon": ("diloco", {"inner_optimizer": optax.contrib.muon(LEARNING_RATE)}),
    "MuLoCo": ("muloco", {"learning_rate": LEARNING_RATE}),
}
BASELINES = {"MuLoCo": "DiLoCo with Muon"}


def client_method(
    loss_fn: Any, clients: int, population: int, function: str, settings: Any
) -> FederatedAlgorithm:
    """Make a method of `CLIENTS`."""
    rates = algorithms.FedAcRates(LEARNING_RATE, 2 * LEARNING_RATE, 2.0, 3.0)
    sgd = optax.sgd(LEARNING_RATE, settings.get("momentum"))
    common = {"num_clients": population, "client_optimizer": sgd, "rates": rates, **settings}
    return method(function, loss_fn, cohort_size=clients, **common)


def island_method(loss_fn: Any, islands: int, function: str, settings: Any) -> FederatedAlgorithm:
    """Make a method of `ISLANDS`."""
    adamw = optax.adamw(LEARNING_RATE)
    common = {"inner_optimizer": adamw, "optimizer": adamw, **settings}
    return method(function, loss_fn, islands=islands, **common)


class MethodRounds(Timed):
    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: int = option(16, "number of clients in the round")
    islands: int | None = option(None, "time the methods of islands, and so many islands", int)
    population: int | None = option(None, "clients with states; default: the cohort", int)
    devices: int = option(1, "number of devices; simulated on a CPU")
    chunk_size: int = option(1, "participants that a device runs at once")
    methods: list[str] | None = harness.some(",")
    columns = (
        "method {method:18} | temporaries {temporary_bytes:13,} | median s {seconds:.4f} "
        "| ratio {ratio:.2f} | passes {passes:.2f} | ratio / passes {ratio_to_passes:.2f} "
        "| baseline {baseline:16}"
    )

    def __post_init__(self) -> None:
        harness.check_names("methods", self.methods, CLIENTS if self.islands is None else ISLANDS)

    def measure(self) -> Any:
        return timing.on_devices(self.devices, self.measure_here)

    def comparisons(self, loss_fn: Any) -> dict[str, tuple[str, float, FederatedAlgorithm]]:
        """Return each method's baseline, its cost in the baseline's gradients, and the method."""
        if self.islands is None:
            sizes = self.clients, self.population or self.clients
            return {
                name: ("FedAvg", cost, client_method(loss_fn, *sizes, function, settings))
                for name, (cost, function, settings) in CLIENTS.items()
            }
        return {
            name: (
                BASELINES.get(name, "DiLoCo"),
                1,
                island_method(loss_fn, self.islands, *function),
            )
            for name, function in ISLANDS.items()
        }

    def measure_here(self) -> Iterator[Row]:
        workload, participants = WORKLOADS[self.model](), self.islands or self.clients
        placement = "clients" if self.islands is None else "islands"
        with jax.set_mesh(mesh := make_mesh(clients=-1)):
            params, batches, num_examples = workload.random_arguments(participants, mesh)
        table = self.comparisons(workload.loss_fn)
        if self.methods is not None:
            used = {*self.methods, *(table[name][0] for name in self.methods)}
            used |= {table[name][0] for name in used}
            table = {name: table[name] for name in table if name in used}
        calls, temporaries = {}, {}
        sizes: Any = {placement: -1}
        with jax.set_mesh(make_mesh(**sizes)):
            batches, num_examples = jax.device_put((batches, num_examples), P(placement))
            cohort = Cohort(batches)
            if placement == "clients":
                client_ids = sample(participants, self.population or participants, self.devices)
                cohort = Cohort(batches, num_examples, client_ids=client_ids)
            for name, (_, _, algorithm) in table.items():
                start = params
                if name == "HypCluster":
                    start = jax.tree.map(lambda p: jnp.stack([p * s for s in (1, 0.9)]), params)
                state = algorithm.init(start)
                step: Any = algorithm.round
                step = step.with_options(chunk_size=self.chunk_size)
                compiled = timing.compile_for(step, state, cohort, donate_argnums=0)
                calls[name] = timing.repeated(compiled.call, state, cohort)
                temporaries[name] = compiled.temporary_bytes
            seconds = self.time(calls)
        for name, (baseline, passes, _) in table.items():
            ratio = timing.paired_ratio(seconds[name], seconds[baseline])
            yield Row(
                method=name,
                baseline=baseline,
                passes=passes,
                temporary_bytes=temporaries[name],
                seconds=seconds[name],
                ratio=ratio,
                ratio_to_passes=None if ratio is None else ratio / passes,
            )


def sample(clients: int, population: int, devices: int) -> jax.Array:
    """Sample clients, in the order of `cohort_rounds`."""
    client_ids = np.random.default_rng(0).permutation(population)[:clients]
    homes = home_devices(client_ids, population, devices)
    return jnp.asarray(client_ids[balanced_order(np.ones(clients), devices, homes=homes)])


main = command(MethodRounds)
