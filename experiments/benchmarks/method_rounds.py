"""Rounds of the federated methods against FedAvg's: time and memory.

    python -m fedpax.experiments.benchmarks.method_rounds --model=cnn --clients=16

A method computes some gradients per batch where FedAvg computes one. `passes` is their cost in
gradients, with a forward pass as a third of one and a Hessian-vector product as two. The last
column divides the time by that of so many FedAvg rounds: 1 means that nothing is computed twice.
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

from fedpax import Cohort
from fedpax.algorithms import (
    FedAcRates,
    agnostic,
    apfl,
    ditto,
    fedac,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    hypcluster,
    mime,
    mime_lite,
    per_fedavg,
    reptile,
    scaffold,
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
from fedpax.training.algorithm import FederatedAlgorithm

FORWARD = 1 / 3
NUM_CLUSTERS = 2


class Row(NamedTuple):
    """A round of a method.

    Attributes:
        method: the method's name.
        passes: cost of its gradients, in those of FedAvg.
        temporary_bytes: bytes of the round's temporaries on one device.
        seconds: seconds of each call.
        ratio: seconds divided by those of FedAvg (paired).
    """

    method: str
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
    clients: int,
    chunk_size: ChunkSize,
    repetitions: int,
    clock: str = "wall",
    names: Sequence[str] | None = None,
) -> list[Row]:
    """Time interleaved rounds of all methods, on the devices of this process.

    Args:
        model: a name in `WORKLOADS`.
        clients: number of clients in the round.
        chunk_size: clients that a device runs at once.
        repetitions: number of timed calls of each method.
        clock: a name in `CLOCKS`.
        names: the methods to time beside FedAvg. Default None: all.
    """
    workload = WORKLOADS[model]()
    loss_fn = classification_loss(workload.model.apply)
    mesh = make_mesh(clients=-1)
    with jax.set_mesh(mesh):
        params, batches, num_examples = workload.random_arguments(clients, mesh)
        cohort = Cohort(batches, num_examples, client_ids=jnp.arange(clients))
        calls, temporaries, passes = {}, {}, {}
        for name, (cost, algorithm) in methods(loss_fn, clients).items():
            if names is not None and name not in ("FedAvg", *names):
                continue
            start = params
            if name == "HypCluster":
                start = jax.tree.map(lambda p: jnp.stack([p * s for s in (1, 0.9)]), params)
            state = algorithm.init(start)
            step: Any = algorithm.round
            step = step.with_options(chunk_size=chunk_size)
            compiled = compile_for(step, state, cohort, donate_argnums=0)
            calls[name] = repeated(compiled.call, state, cohort)
            temporaries[name], passes[name] = compiled.temporary_bytes, cost
        seconds = interleaved(calls, (), repetitions, CLOCKS[clock])
    return [
        Row(name, passes[name], temporaries[name], took, paired_ratio(took, seconds["FedAvg"]))
        for name, took in seconds.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="cnn", help="the clients' model")
    parser.add_argument("--clients", type=int, default=16, help="number of clients in the round")
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices; simulated on a CPU"
    )
    parser.add_argument(
        "--chunk_size", type=int, default=1, help="clients that a device runs at once"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="timed calls of each method")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured")
    parser.add_argument("--methods", help="names separated by commas; default: all")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    names = None if options.methods is None else options.methods.split(",")
    known = methods(lambda params, batch: (params, {}), 1)
    if unknown := {*(names or ())} - {*known}:
        parser.error(f"unknown methods {sorted(unknown)}; choose from {', '.join(known)}")
    rows = on_devices(
        options.devices,
        measure,
        options.model,
        options.clients,
        options.chunk_size,
        options.repetitions,
        options.clock,
        names,
    )
    print("method            temporaries   median s   FedAvg = 1   passes   ratio / passes")
    for row in rows:
        print(
            f"{row.method:16} {row.temporary_bytes:12,} {statistics.median(row.seconds):10.4f} "
            f"{row.ratio:12.2f} {row.passes:8.2f} {row.ratio / row.passes:16.2f}"
        )
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
