"""Rounds of the methods against FedAvg's or DiLoCo's: time and memory.

    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --clients=16
    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --islands=4

The first command times the methods of clients against FedAvg. The second command times those of
islands against DiLoCo with the same inner optimizer and number of inner steps.

A method computes some gradients per batch where FedAvg and DiLoCo compute one. `passes` is their
cost in gradients, with a forward pass as a third of one and a Hessian-vector product as two. The
last column divides the time by that of so many rounds of the baseline: 1 means that nothing is
computed twice.
As in training, a round starts from the last one's state and takes over its memory. On a busy
machine, `--clock=cpu` measures the CPU time of the process in place of wall-clock time.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
from fedpax.experiments.benchmarks.timing import (
    CLOCKS,
    compile_for,
    interleaved,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.experiments.benchmarks.workloads import LEARNING_RATE, WORKLOADS
from fedpax.models.losses import classification_loss
from fedpax.parallel.mesh import make_mesh
from fedpax.primitives.placement import ChunkSize

FORWARD = 1 / 3
NUM_CLUSTERS = 2


class Row(NamedTuple):
    """A round of a method.

    Attributes:
        method: the method's name.
        baseline: the method that it is compared with.
        passes: cost of its gradients, in those of the baseline.
        temporary_bytes: bytes of the round's temporaries on one device.
        seconds: seconds of each call.
        ratio: seconds divided by those of the baseline (paired).
    """

    method: str
    baseline: str
    passes: float
    temporary_bytes: int
    seconds: list[float]
    ratio: float


def methods(loss_fn: Any, clients: int) -> dict[str, tuple[float, FederatedAlgorithm]]:
    """Return each method's cost in gradients, and the method, for a cohort that is the population.

    Args:
        loss_fn: the clients' loss.
        clients: number of clients.
    """

    def build(
        algorithm: Callable[..., FederatedAlgorithm], momentum: float | None = None, **settings: Any
    ) -> FederatedAlgorithm:
        optimizer = optax.sgd(LEARNING_RATE, momentum)
        return algorithm(loss_fn, cohort_size=clients, client_optimizer=optimizer, **settings)

    stored = functools.partial(build, num_clients=clients)
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
    """Return each method's baseline, and the method. Each computes one gradient per batch.

    Args:
        loss_fn: the islands' loss.
        islands: number of islands.
    """
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
    """Return a function that runs one more round, from the state that the last one left.

    Args:
        step: `(state, cohort) -> (state, metrics)`; it may donate the state.
        state: the first state, which is copied.
        cohort: the cohort of every round.
    """
    last = [jax.tree.map(jnp.copy, state)]

    def run() -> Any:
        last[0], metrics = step(last[0], cohort)
        return last[0], metrics

    return run


def measure(
    model: str,
    participants: int,
    chunk_size: ChunkSize,
    repetitions: int,
    clock: str = "wall",
    names: Sequence[str] | None = None,
    placement: str = "clients",
) -> list[Row]:
    """Time interleaved rounds of all methods, on the devices of this process.

    Args:
        model: a name in `WORKLOADS`.
        participants: number of clients or islands in the round.
        chunk_size: participants that a device runs at once.
        repetitions: number of timed calls of each method.
        clock: a name in `CLOCKS`.
        names: the methods to time beside their baselines. Default None: all.
        placement: "clients", or "islands" for the methods of islands.
    """
    workload = WORKLOADS[model]()
    loss_fn = classification_loss(workload.model.apply)
    with jax.set_mesh(mesh := make_mesh(clients=-1)):
        params, batches, num_examples = workload.random_arguments(participants, mesh)
    table = comparisons(placement, loss_fn, participants)
    if names is not None:
        used = {*names, *(table[name][0] for name in names)}
        used |= {table[name][0] for name in used}
        table = {name: table[name] for name in table if name in used}
    calls, temporaries = {}, {}
    sizes: Any = {placement: -1}
    with jax.set_mesh(make_mesh(**sizes)):
        batches, num_examples = jax.device_put((batches, num_examples), P(placement))
        cohort = Cohort(batches)
        if placement == "clients":
            cohort = Cohort(batches, num_examples, client_ids=jnp.arange(participants))
        for name, (_, _, algorithm) in table.items():
            start = params
            if name == "HypCluster":
                start = jax.tree.map(lambda p: jnp.stack([p * s for s in (1, 0.9)]), params)
            state = algorithm.init(start)
            step: Any = algorithm.round
            step = step.with_options(chunk_size=chunk_size)
            compiled = compile_for(step, state, cohort, donate_argnums=0)
            calls[name] = repeated(compiled.call, state, cohort)
            temporaries[name] = compiled.temporary_bytes
        seconds = interleaved(calls, (), repetitions, CLOCKS[clock])
    return [
        Row(
            name,
            baseline,
            passes,
            temporaries[name],
            seconds[name],
            paired_ratio(seconds[name], seconds[baseline]),
        )
        for name, (baseline, passes, _) in table.items()
    ]


def comparisons(
    placement: str, loss_fn: Any, participants: int
) -> dict[str, tuple[str, float, FederatedAlgorithm]]:
    """Return each method's baseline, its cost in the baseline's gradients, and the method."""
    if placement == "clients":
        found = methods(loss_fn, participants)
        return {name: ("FedAvg", cost, algorithm) for name, (cost, algorithm) in found.items()}
    return {
        name: (baseline, 1, algorithm)
        for name, (baseline, algorithm) in island_methods(loss_fn, participants).items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="cnn", help="the clients' model")
    parser.add_argument("--clients", type=int, default=16, help="number of clients in the round")
    parser.add_argument(
        "--islands", type=int, help="time the methods of islands, and so many islands"
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices; simulated on a CPU"
    )
    parser.add_argument(
        "--chunk_size", type=int, default=1, help="participants that a device runs at once"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="timed calls of each method")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured")
    parser.add_argument("--methods", help="names separated by commas; default: all")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    names = None if options.methods is None else options.methods.split(",")
    placement = "clients" if options.islands is None else "islands"
    known = comparisons(placement, lambda params, batch: (params, {}), 1)
    if unknown := {*(names or ())} - {*known}:
        parser.error(f"unknown methods {sorted(unknown)}; choose from {', '.join(known)}")
    rows = on_devices(
        options.devices,
        measure,
        options.model,
        options.clients if options.islands is None else options.islands,
        options.chunk_size,
        options.repetitions,
        options.clock,
        names,
        placement,
    )
    print("method              temporaries   median s   ratio   passes   ratio / passes  baseline")
    for row in rows:
        print(
            f"{row.method:18} {row.temporary_bytes:12,} {statistics.median(row.seconds):10.4f} "
            f"{row.ratio:7.2f} {row.passes:8.2f} {row.ratio / row.passes:16.2f}  {row.baseline}"
        )
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
