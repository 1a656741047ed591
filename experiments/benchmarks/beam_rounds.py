"""Measure what a FedAvg round on Apache Beam costs: CPU seconds at the start, and for each client.

    python -m fedpax.experiments.benchmarks.beam_rounds

prepares a table of clients with 20 examples of 64 features, and trains a network of 15,010
parameters for one round of few and of many of them. CPU seconds are of all processes, without the
imports of this one. Needs the extras `beam` and `files`.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.data import ClientSampler, CohortRounds, cohort_rounds, load, partition_natural, prepare
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import Workload
from fedpax.models.classifiers import MLPConfig, mlp

FEATURES, CLASSES, EXAMPLES = 64, 10, 20


def open_rounds(folder: str, size: int) -> CohortRounds:
    """Open rounds of a number of clients of a prepared folder."""
    source = load(folder)
    population = partition_natural(source, "client")
    sampler = ClientSampler(len(population), size)
    return cohort_rounds(source, population, sampler, batch_size=10, preprocess=preprocess)


def preprocess(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch."""
    features = np.stack([columns[f"x{i}"] for i in range(FEATURES)], axis=1)
    return {"image": features.astype(np.float32), "label": np.asarray(columns["label"], np.int32)}


def write_clients(folder: Path, num_clients: int) -> None:
    """Write a table of random examples, and prepare it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random, count = np.random.default_rng(0), num_clients * EXAMPLES
    columns: dict[str, Any] = {"client": np.repeat(np.arange(num_clients), EXAMPLES)}
    features = random.normal(size=(FEATURES, count)).astype(np.float32)
    columns |= {f"x{i}": feature for i, feature in enumerate(features)}
    columns["label"] = random.integers(CLASSES, size=count)
    pq.write_table(pa.table(columns), folder / "table.parquet")
    prepare(str(folder / "table.parquet"), folder / "prepared", client="client")


class BeamRounds(Benchmark):
    few: int = option(20, "clients of the small round")
    many: int = option(2020, "clients of the large round")
    repetitions: int = option(3, "pairs of jobs")
    beam_flags: str = option("", "flags of the pipeline")
    columns = "clients {clients} | CPU s {seconds:.2f}"

    def measure(self) -> Iterator[Row]:
        from fedpax.deploy.beam import run_beam

        model = mlp(MLPConfig(layer_sizes=(FEATURES, 200, CLASSES)))
        workload = Workload(model, (FEATURES,), CLASSES)
        with tempfile.TemporaryDirectory() as temporary:
            write_clients(Path(temporary), self.many)
            for size in self.repetitions * (self.few, self.many):
                method = workload.fedavg(size)
                state = method.init(jax.jit(model.init)(jax.random.key(0)))
                opened = functools.partial(open_rounds, f"{temporary}/prepared", size)
                before = time.process_time() + timing.children_cpu_seconds()
                run_beam(method.round, state, clients=opened, flags=self.beam_flags.split())
                after = time.process_time() + timing.children_cpu_seconds()
                yield Row(clients=size, seconds=after - before)

    def summary(self, rows: list[Row]) -> str:
        few, many = (
            statistics.median(row.seconds for row in rows if row.clients == size)
            for size in (self.few, self.many)
        )
        client = (many - few) / (self.many - self.few)
        return f"a job: {few - client * self.few:.2f} CPU s; a client: {1000 * client:.2f} CPU ms"


main = command(BeamRounds)
