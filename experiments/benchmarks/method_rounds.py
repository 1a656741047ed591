"""Rounds of the methods against FedAvg's or DiLoCo's: time and memory.

    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --clients=16
    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --islands=4

The first command times the methods of clients against FedAvg. The second command times the methods
of islands against DiLoCo with the same inner optimizer and number of inner steps.

A method computes some gradients per batch where FedAvg and DiLoCo compute one. `passes` is their
cost in gradients, with a forward pass as a third of one and a Hessian-vector product as two. The
last column divides the time by the time of so many rounds of the baseline: 1 means that nothing is
computed twice.
As in training, a round starts from the last one's state and takes over its memory. On a busy
machine, `--clock=cpu` measures the CPU time of the process in place of wall-clock time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from fedpax import Cohort
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    async_diloco,
    branch_train_merge,
    data_parallel,
    diloco,
    ditto,
    eager_diloco,
    easgd,
    fedac,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    hypcluster,
    mime,
    mime_lite,
    muloco,
    noloco,
    papa,
    papa_2,
    papa_all,
    per_fedavg,
    reptile,
    scaffold,
    sparseloco,
    streaming_diloco,
)
from fedpax.clients import home_devices
from fedpax.data import balanced_order
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, option
from fedpax.experiments.benchmarks.workloads import LEARNING_RATE, WORKLOADS
from fedpax.models.losses import classification_loss
from fedpax.parallel.mesh import make_mesh

FORWARD = 1 / 3
NUM_CLUSTERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Timed):
    """The options."""

    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: int = option(16, "number of clients in the round")
    islands: int | None = option(None, "time the methods of islands, and so many islands", int)
    population: int | None = option(None, "clients with states; default: the cohort", int)
    devices: int = option(1, "number of devices; simulated on a CPU")
    chunk_size: int = option(1, "participants that a device runs at once")
    methods: list[str] | None = option(
        None, "names separated by commas; default: all", harness.names
    )

    def __post_init__(self) -> None:
        known = comparisons(self.placement, lambda params, batch: (params, {}), 1, 1)
        harness.check_names("methods", self.methods, known)

    @property
    def placement(self) -> str:
        """The placement of the methods."""
        return "clients" if self.islands is None else "islands"


def methods(
    loss_fn: Any, clients: int, population: int
) -> dict[str, tuple[float, FederatedAlgorithm]]:
    """Return each method's cost in gradients, and the method."""

    def build(
        algorithm: Callable[..., FederatedAlgorithm], momentum: float | None = None, **settings: Any
    ) -> FederatedAlgorithm:
        optimizer = optax.sgd(LEARNING_RATE, momentum)
        return algorithm(loss_fn, cohort_size=clients, client_optimizer=optimizer, **settings)

    stored = functools.partial(build, num_clients=population)
    rates = FedAcRates(LEARNING_RATE, 2 * LEARNING_RATE, 2.0, 3.0)
    meta = functools.partial(build, per_fedavg, adaptation_learning_rate=LEARNING_RATE)
    return {
        "FedAvg": (1, build(fedavg)),
        "FedProx": (1, build(fedprox, mu=0.1)),
        "SCAFFOLD II": (1, stored(scaffold)),
        "SCAFFOLD I": (2, stored(scaffold, option="I")),
        "FedNova": (1, build(fednova)),
        "FedDyn": (1, stored(feddyn, alpha=0.1)),
        "Mime": (3, build(mime, momentum=0.9)),
        "MimeLite": (2, build(mime_lite, momentum=0.9)),
        "FedAc": (1, fedac(loss_fn, cohort_size=clients, rates=rates)),
        "agnostic": (1 + FORWARD, stored(agnostic, mixture_learning_rate=0.01)),
        "APFL": (2, stored(apfl, mixing=0.5)),
        "Ditto": (2, stored(ditto, lam=0.1)),
        "HypCluster": (1 + NUM_CLUSTERS * FORWARD, build(hypcluster, num_clusters=NUM_CLUSTERS)),
        # Gradients of half a batch each: one to adapt, one at the adapted model.
        "Per-FedAvg (FO)": (1, meta(first_order=True)),
        "Per-FedAvg": (2, meta()),
        "Reptile": (1, build(reptile, meta_learning_rate=0.5)),
    }


def island_methods(loss_fn: Any, islands: int) -> dict[str, tuple[str, FederatedAlgorithm]]:
    """Return each method's baseline, and the method. Each computes one gradient per batch."""
    inner = optax.adamw(LEARNING_RATE)

    def build(algorithm: Callable[..., FederatedAlgorithm], **settings: Any) -> Any:
        return "DiLoCo", algorithm(loss_fn, islands=islands, **settings)

    dilocos = functools.partial(build, inner_optimizer=inner)
    populations = functools.partial(build, optimizer=inner)
    with_muon = build(diloco, inner_optimizer=optax.contrib.muon(LEARNING_RATE))
    return {
        "DiLoCo": dilocos(diloco),
        "data parallelism": populations(data_parallel),
        "Streaming DiLoCo": dilocos(streaming_diloco, fragments=1, delay=1),
        "Eager DiLoCo": dilocos(eager_diloco),
        "async DiLoCo": dilocos(async_diloco),
        "SparseLoCo": dilocos(sparseloco),
        "NoLoCo": dilocos(noloco),
        "EASGD": populations(easgd),
        "PAPA": populations(papa),
        "PAPA-all": populations(papa_all),
        "PAPA-2": populations(papa_2),
        "Branch-Train-Merge": populations(branch_train_merge),
        # Muon's Newton-Schulz steps are part of its baseline.
        "DiLoCo with Muon": with_muon,
        "MuLoCo": ("DiLoCo with Muon", build(muloco, learning_rate=LEARNING_RATE)[1]),
    }


def repeated(step: Callable[..., Any], state: Any, cohort: Cohort) -> Callable[[], Any]:
    """Return a function that runs one more round, from the state that the last one left."""
    last = [jax.tree.map(jnp.copy, state)]

    def run() -> Any:
        last[0], metrics = step(last[0], cohort)
        return last[0], metrics

    return run


def measure(settings: Settings) -> list[Row]:
    """Time interleaved rounds of all methods, on the devices of this process."""
    workload, placement = WORKLOADS[settings.model](), settings.placement
    participants = settings.islands or settings.clients
    with jax.set_mesh(mesh := make_mesh(clients=-1)):
        params, batches, num_examples = workload.random_arguments(participants, mesh)
    population = settings.population or participants
    loss_fn = classification_loss(workload.model.apply)
    table = comparisons(placement, loss_fn, participants, population)
    if settings.methods is not None:
        used = {*settings.methods, *(table[name][0] for name in settings.methods)}
        used |= {table[name][0] for name in used}
        table = {name: table[name] for name in table if name in used}
    calls, temporaries = {}, {}
    sizes: Any = {placement: -1}
    with jax.set_mesh(make_mesh(**sizes)):
        batches, num_examples = jax.device_put((batches, num_examples), P(placement))
        cohort = Cohort(batches)
        if placement == "clients":
            client_ids = sample(participants, population, settings.devices)
            cohort = Cohort(batches, num_examples, client_ids=client_ids)
        for name, (_, _, algorithm) in table.items():
            start = params
            if name == "HypCluster":
                start = jax.tree.map(lambda p: jnp.stack([p * s for s in (1, 0.9)]), params)
            state = algorithm.init(start)
            step: Any = algorithm.round
            step = step.with_options(chunk_size=settings.chunk_size)
            compiled = timing.compile_for(step, state, cohort, donate_argnums=0)
            calls[name] = repeated(compiled.call, state, cohort)
            temporaries[name] = compiled.temporary_bytes
        seconds = timing.interleaved(calls, (), settings.repetitions, settings.clock)
    rows = []
    for name, (baseline, passes, _) in table.items():
        ratio = timing.paired_ratio(seconds[name], seconds[baseline])
        rows.append(
            Row(
                method=name,
                baseline=baseline,
                passes=passes,
                temporary_bytes=temporaries[name],
                seconds=seconds[name],
                ratio=ratio,
                ratio_to_passes=None if ratio is None else ratio / passes,
            )
        )
    return rows


def sample(clients: int, population: int, devices: int) -> jax.Array:
    """Sample clients, in the order of `cohort_rounds`."""
    client_ids = np.random.default_rng(0).permutation(population)[:clients]
    homes = home_devices(client_ids, population, devices)
    return jnp.asarray(client_ids[balanced_order(np.ones(clients), devices, homes=homes)])


def comparisons(
    placement: str, loss_fn: Any, participants: int, population: int
) -> dict[str, tuple[str, float, FederatedAlgorithm]]:
    """Return each method's baseline, its cost in the baseline's gradients, and the method."""
    if placement == "clients":
        client_methods = methods(loss_fn, participants, population)
        return {
            name: ("FedAvg", cost, algorithm) for name, (cost, algorithm) in client_methods.items()
        }
    return {
        name: (baseline, 1, algorithm)
        for name, (baseline, algorithm) in island_methods(loss_fn, participants).items()
    }


main = Benchmark(
    __doc__,
    Settings,
    lambda settings: timing.on_devices(settings.devices, measure, settings),
    {
        "method": "{method:18}",
        "temporaries": "{temporary_bytes:13,}",
        "median s": "{seconds:.4f}",
        "ratio": "{ratio:.2f}",
        "passes": "{passes:.2f}",
        "ratio / passes": "{ratio_to_passes:.2f}",
        "baseline": "{baseline:16}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
