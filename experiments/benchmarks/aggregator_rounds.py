"""Rounds of FedAvg with each aggregator, against the mean: time and memory.

    python -m fedpax.experiments.benchmarks.aggregator_rounds --model=cnn --clients=64

One round of FedAvg is timed with each aggregator, in interleaved calls. `round / mean's` is its
time divided by that with the plain mean. A program without training is timed too: clients scale the
parameters. `added` is the time that the aggregator adds to the mean there, as a fraction of the
round with the mean. The local steps do not blur it: their time depends on where the buffers of a
program lie in memory, by several percent. `temporaries` shows the memory of robust means, which
need all updates at once. On a busy machine, `--clock=cpu` measures the CPU time of the process in
place of wall-clock time.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import optax
from jaxtyping import Array, Float

import fedpax
from fedpax import Cohort, federated_broadcast, federated_map
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
from fedpax.algorithm import Params
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
from fedpax.reports.table import format_bytes, markdown_table


class Row(NamedTuple):
    """A round with an aggregator.

    Attributes:
        aggregator: the aggregator's name.
        temporary_bytes: bytes of the round's temporaries on one device.
        seconds: seconds of each call.
        ratio: seconds divided by those of the round with the mean (paired).
        untrained_seconds: seconds of each call of the program without training.
        added: `untrained_seconds` more than the mean's, divided by `seconds` of the mean (paired).
    """

    aggregator: str
    temporary_bytes: int
    seconds: list[float]
    ratio: float
    untrained_seconds: list[float]
    added: float


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
        rounds, untrained, temporaries = {}, {}, {}
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
            rounds[name] = functools.partial(compiled.call, state, cohort)
            temporaries[name] = compiled.temporary_bytes
            untrained[name] = _untrained_round(aggregator, chunk_size, params, num_examples)
        seconds = interleaved(rounds, (), repetitions, CLOCKS[clock])
        alone = interleaved(untrained, (), repetitions, CLOCKS[clock])
    mean_round, mean_alone = seconds["mean"], alone["mean"]
    return [
        Row(
            aggregator=name,
            temporary_bytes=temporaries[name],
            seconds=took,
            ratio=paired_ratio(took, mean_round),
            untrained_seconds=alone[name],
            added=statistics.median(
                (own - least) / whole
                for own, least, whole in zip(alone[name], mean_alone, mean_round, strict=True)
            ),
        )
        for name, took in seconds.items()
    ]


def _untrained_round(
    aggregator: Aggregator,
    chunk_size: int,
    params: Params,
    num_examples: Float[Array, " clients"],
) -> Callable[[], Any]:
    """Compile a round in which a client's update is the parameters times its number of examples."""
    program = fedpax.program(clients=len(num_examples))

    @program
    def run(
        params: Params, state: chex.ArrayTree, num_examples: Float[Array, " clients"]
    ) -> tuple[Params, chex.ArrayTree]:
        def scale(params: Params, factor: Float[Array, ""]) -> Params:
            # The barrier keeps the update an array, as a trained one is.
            return jax.lax.optimization_barrier(jax.tree.map(lambda p: p * factor, params))

        updates = federated_map(
            scale, federated_broadcast(params), num_examples, chunk_size=chunk_size
        )
        mean, state, _ = aggregator.aggregate(state, updates, num_examples)
        return mean, state

    state = jax.jit(program(aggregator.init))(params)
    compiled = compile_for(run, params, state, num_examples)
    return functools.partial(compiled.call, params, state, num_examples)


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
            f"{row.added:+.1%}",
        ]
        for row in rows
    ]
    print(markdown_table(["aggregator", "temporaries", "round", "round / mean's", "added"], cells))
    write(options.json, rows, model=options.model, clients=options.clients)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
