"""Rounds of FedAvg with each aggregator, against the mean: time and memory.

    python -m fedpax.experiments.benchmarks.aggregator_rounds --model=cnn --clients=64

`round / mean's` is the time of a round divided by that with the plain mean. `added` is the time
that the aggregator adds to the mean in a program without training, in which clients scale the
parameters, as a fraction of the round with the mean: the time of local steps depends on where the
buffers of a program lie in memory, by several percent. `temporaries` shows the memory of robust
means, which need all updates at once.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

import fedpax
from fedpax import Cohort
from fedpax import aggregators as of
from fedpax.aggregators import Aggregator, chain, codecs, mean
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, integers, option
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Sizes, Workload


def aggregators(clients: int) -> dict[str, Aggregator]:
    """Return the aggregators by name; those that need more clients are left out."""
    neighbors: Any = {"num_neighbors": min(4, (clients - 1) // 2 * 2) or None}  # an even number
    private: dict[str, Any] = {"max_norm": 1.0, "noise_multiplier": 1.0, "seed": 0}
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
    aggregators = {
        "mean": mean(),
        "clip_by_norm": chain(of.clip_by_norm(1.0), mean()),
        "adaptive_clip": chain(of.adaptive_clip(initial_norm=1.0), mean()),
        "private_mean": of.private_mean(**private),
        "secure_mean, 4 neighbours": of.secure_mean(max_value=1.0, bits=16, seed=0, **neighbors),
        "private_secure_mean, 4 neighbours": of.private_secure_mean(**private, **neighbors),
        "quantized_mean(4)": of.quantized_mean(4),
        **{name: of.compressed_mean(codec) for name, codec in compressed.items()},
        "geometric_median": of.geometric_median(),
        "coordinate_median": of.coordinate_median(),
        "trimmed_mean(0.1)": of.trimmed_mean(0.1),
    }
    if clients >= 5:
        aggregators |= {"krum(1)": of.krum(1), "krum(1), 2 selected": of.krum(1, num_selected=2)}
    return aggregators | ({"bulyan(1)": of.bulyan(1)} if clients >= 7 else {})


class AggregatorRounds(Sizes, Timed):
    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: list[int] = option("64", "numbers of clients in the round", integers, least=2)
    devices: list[int] = option("1", "numbers of devices; simulated on a CPU", integers)
    chunk_size: int = option(1, "clients that run at once")
    repetitions: int = option(7, "timed calls of each round", least=1)
    aggregators: list[str] | None = harness.some(";", lambda run: aggregators(min(run.clients)))
    columns = (
        "aggregator {name:32} | temporaries {temporary_bytes:bytes} | round, s {seconds:.3f} "
        "| round / mean's {ratio:.2f} | added {added:+.1%}"
    )

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> Iterator[Row]:
        rounds, untrained = {}, {}
        params, batches, num_examples = workload.random_arguments(clients, mesh)
        cohort = Cohort(batches, num_examples)
        for name, aggregator in aggregators(clients).items():
            if self.aggregators is not None and name not in ("mean", *self.aggregators):
                continue
            settings = {"aggregator": aggregator, "chunk_size": self.chunk_size}
            algorithm = workload.fedavg(clients, **settings)
            state = algorithm.init(params)
            rounds[name] = timing.compile_for(algorithm.round, state, cohort)
            untrained[name] = self._untrained_round(aggregator, params, num_examples)
        rows, alone = self.compare(rounds, "mean"), self.compare(untrained, "mean")
        for row, untrained_row in zip(rows, alone, strict=True):
            pairs = zip(untrained_row.seconds, alone[0].seconds, rows[0].seconds, strict=True)
            added = statistics.median((ours - least) / whole for ours, least, whole in pairs)
            yield Row(**vars(row), untrained_seconds=untrained_row.seconds, added=added)

    def _untrained_round(
        self, aggregator: Aggregator, params: Any, num_examples: jax.Array
    ) -> timing.Compiled:
        """Compile a round in which an update is the parameters times the number of examples."""
        program = fedpax.program(clients=len(num_examples), chunk_size=self.chunk_size)

        def run(params: Any, state: Any, num_examples: jax.Array) -> Any:
            def scale(params: Any, factor: jax.Array) -> Any:
                # The barrier keeps the update an array, as a trained one is.
                return jax.lax.optimization_barrier(jax.tree.map(lambda p: p * factor, params))

            at_clients = fedpax.federated_broadcast(params)
            updates = fedpax.federated_map(scale, at_clients, num_examples)
            return aggregator.aggregate(state, updates, num_examples)[:2]

        state = jax.jit(program(aggregator.init))(params)
        return timing.compile_for(program(run), params, state, num_examples)


main = command(AggregatorRounds)
