"""Rounds of FedAvg with each aggregator, against the mean: time and memory.

    python -m fedpax.experiments.benchmarks.aggregator_rounds --model=cnn --clients=64

One round of FedAvg is timed with each aggregator, in interleaved calls. The ratio of a round's time
to that with the plain mean is what the aggregator costs a user, local steps included. Robust means
need all updates at once: `temporaries` shows their memory. On a busy machine, `--clock=cpu`
measures the CPU time of the process in place of wall-clock time.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from fedpax import Cohort
from fedpax.aggregators import (
    Aggregator,
    adaptive_clip,
    bulyan,
    chain,
    clip_by_norm,
    codecs,
    compressed_mean,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
    trimmed_mean,
)
from fedpax.algorithms import fedavg
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
from fedpax.training.table import format_bytes, markdown_table


class Row(NamedTuple):
    """A round with an aggregator.

    Attributes:
        aggregator: the aggregator's name.
        temporary_bytes: bytes of the round's temporaries on one device.
        seconds: seconds of each call.
        ratio: seconds divided by those of the round with the mean (paired).
    """

    aggregator: str
    temporary_bytes: int
    seconds: list[float]
    ratio: float


def aggregators(clients: int) -> dict[str, Aggregator]:
    """Return the aggregators by name; those that need more clients are left out.

    Args:
        clients: number of clients in the round.
    """
    neighbors = min(4, (clients - 1) // 2 * 2) or None  # an even number; None for two clients
    found = {
        "mean": mean(),
        "clip_by_norm": chain(clip_by_norm(1.0), mean()),
        "adaptive_clip": chain(adaptive_clip(initial_norm=1.0), mean()),
        "private_mean": private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
        "secure_mean, 4 neighbours": secure_mean(
            max_value=1.0, bits=16, seed=0, num_neighbors=neighbors
        ),
        "private_secure_mean, 4 neighbours": private_secure_mean(
            max_norm=1.0, noise_multiplier=1.0, seed=0, num_neighbors=neighbors
        ),
        "quantized_mean(4)": quantized_mean(4),
    }
    compressed = {
        "uniform(4)": codecs.uniform(4),
        "rotated(uniform(4))": codecs.rotated(codecs.uniform(4)),
        "drive": codecs.drive(),
        "terngrad": codecs.terngrad(),
        "sign": codecs.sign(),
        "e3m0": codecs.e3m0(),
        "top_k(1/64)": codecs.top_k(1 / 64),
        "random_k(1/64)": codecs.random_k(1 / 64),
    }
    found |= {name: compressed_mean(codec) for name, codec in compressed.items()}
    found |= {
        "geometric_median": geometric_median(),
        "coordinate_median": coordinate_median(),
        "trimmed_mean(0.1)": trimmed_mean(0.1),
    }
    if clients >= 5:
        found |= {"krum(1)": krum(1), "krum(1), 2 selected": krum(1, num_selected=2)}
    return found | ({"bulyan(1)": bulyan(1)} if clients >= 7 else {})


def measure(
    model: str,
    clients: int,
    chunk_size: int,
    repetitions: int,
    names: Sequence[str] | None = None,
    clock: str = "wall",
) -> list[Row]:
    """Time interleaved rounds with all aggregators, on the devices of this process.

    Args:
        model: a name in `WORKLOADS`.
        clients: number of clients in the round.
        chunk_size: clients that a device runs at once.
        repetitions: number of timed calls of each round.
        names: the aggregators to time beside the mean. Default None: all.
        clock: a name in `CLOCKS`.
    """
    workload = WORKLOADS[model]()
    loss_fn = classification_loss(workload.model.apply)
    mesh = make_mesh(clients=-1)
    with jax.set_mesh(mesh):
        params, batches, num_examples = workload.random_arguments(clients, mesh)
        cohort = Cohort(batches, num_examples)
        calls, temporaries = {}, {}
        for name, aggregator in aggregators(clients).items():
            if names is not None and name not in ("mean", *names):
                continue
            algorithm = fedavg(
                loss_fn,
                cohort_size=clients,
                client_optimizer=optax.sgd(LEARNING_RATE),
                aggregator=aggregator,
                chunk_size=chunk_size,
            )
            state = algorithm.init(params)
            step: Any = algorithm.round
            compiled = compile_for(step, state, cohort)
            calls[name] = functools.partial(compiled.call, state, cohort)
            temporaries[name] = compiled.temporary_bytes
        seconds = interleaved(calls, (), repetitions, CLOCKS[clock])
    return [
        Row(name, temporaries[name], took, paired_ratio(took, seconds["mean"]))
        for name, took in seconds.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=WORKLOADS, default="cnn", help="the clients' model")
    parser.add_argument("--clients", type=int, default=64, help="number of clients in the round")
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices; simulated on a CPU"
    )
    parser.add_argument("--chunk_size", type=int, default=1, help="clients that run at once")
    parser.add_argument("--repetitions", type=int, default=7, help="timed calls of each round")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured")
    parser.add_argument("--aggregators", help="names separated by semicolons; default: all")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}, expected at least 1")
    if options.clients < 2:
        parser.error(f"--clients is {options.clients}, expected at least 2")
    names = None if options.aggregators is None else options.aggregators.split(";")
    if unknown := {*(names or ())} - {*aggregators(options.clients)}:
        parser.error(
            f"unknown aggregators {sorted(unknown)}; choose from "
            + "; ".join(aggregators(options.clients))
        )
    rows = on_devices(
        options.devices,
        measure,
        options.model,
        options.clients,
        options.chunk_size,
        options.repetitions,
        names,
        options.clock,
    )
    cells = [
        [
            row.aggregator,
            format_bytes(row.temporary_bytes),
            f"{statistics.median(row.seconds):.3f} s",
            f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    print(markdown_table(["aggregator", "temporaries", "round", "round / mean's"], cells))
    write(options.json, rows, model=options.model, clients=options.clients)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
