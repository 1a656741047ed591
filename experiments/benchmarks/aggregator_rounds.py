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

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

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
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, option
from fedpax.experiments.benchmarks.workloads import LEARNING_RATE, WORKLOADS
from fedpax.models.losses import classification_loss
from fedpax.parallel.mesh import make_mesh
from fedpax.reports.table import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Timed):
    """The options."""

    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: int = option(64, "number of clients in the round")
    devices: int = option(1, "number of devices; simulated on a CPU")
    chunk_size: int = option(1, "clients that run at once")
    repetitions: int = option(7, "timed calls of each round")
    aggregators: list[str] | None = option(
        None, "names separated by semicolons; default: all", harness.names_with_commas
    )

    def __post_init__(self) -> None:
        harness.check_at_least(1, repetitions=self.repetitions)
        harness.check_at_least(2, clients=self.clients)
        harness.check_names("aggregators", self.aggregators, aggregators(self.clients))


def aggregators(clients: int) -> dict[str, Aggregator]:
    """Return the aggregators by name; those that need more clients are left out."""
    neighbors = min(4, (clients - 1) // 2 * 2) or None  # an even number; None for two clients
    aggregators = {
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
    aggregators |= {name: compressed_mean(codec) for name, codec in compressed.items()}
    aggregators |= {
        "geometric_median": geometric_median(),
        "coordinate_median": coordinate_median(),
        "trimmed_mean(0.1)": trimmed_mean(0.1),
    }
    if clients >= 5:
        aggregators |= {"krum(1)": krum(1), "krum(1), 2 selected": krum(1, num_selected=2)}
    return aggregators | ({"bulyan(1)": bulyan(1)} if clients >= 7 else {})


def measure(settings: Settings) -> list[Row]:
    """Time timing.interleaved rounds with all aggregators, on the devices of this process."""
    workload = WORKLOADS[settings.model]()
    loss_fn = classification_loss(workload.model.apply)
    mesh = make_mesh(clients=-1)
    timed = settings.repetitions, settings.clock
    with jax.set_mesh(mesh):
        params, batches, num_examples = workload.random_arguments(settings.clients, mesh)
        cohort = Cohort(batches, num_examples)
        rounds, untrained, temporaries = {}, {}, {}
        for name, aggregator in aggregators(settings.clients).items():
            if settings.aggregators is not None and name not in ("mean", *settings.aggregators):
                continue
            algorithm = fedavg(
                loss_fn,
                cohort_size=settings.clients,
                client_optimizer=optax.sgd(LEARNING_RATE),
                aggregator=aggregator,
                chunk_size=settings.chunk_size,
            )
            state = algorithm.init(params)
            compiled = timing.compile_for(algorithm.round, state, cohort)
            rounds[name] = functools.partial(compiled.call, state, cohort)
            temporaries[name] = compiled.temporary_bytes
            untrained[name] = _untrained_round(
                aggregator, settings.chunk_size, params, num_examples
            )
        seconds = timing.interleaved(rounds, (), *timed)
        alone = timing.interleaved(untrained, (), *timed)
    return [
        Row(
            aggregator=name,
            temporary_bytes=temporaries[name],
            seconds=took,
            ratio=timing.paired_ratio(took, seconds["mean"]),
            untrained_seconds=alone[name],
            added=statistics.median(
                (own - least) / whole
                for own, least, whole in zip(
                    alone[name], alone["mean"], seconds["mean"], strict=True
                )
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
    compiled = timing.compile_for(run, params, state, num_examples)
    return functools.partial(compiled.call, params, state, num_examples)


main = Benchmark(
    __doc__,
    Settings,
    lambda settings: timing.on_devices(settings.devices, measure, settings),
    {
        "aggregator": "{aggregator:32}",
        "temporaries": lambda row: format_bytes(row.temporary_bytes),
        "round, s": "{seconds:.3f}",
        "round / mean's": "{ratio:.2f}",
        "added": "{added:+.1%}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
