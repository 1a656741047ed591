"""Measure files as clients: preparing them, opening them, and rounds of their examples.

    python -m fedpax.experiments.benchmarks.files --folder=/tmp/files --clients=1000000

prepares a Parquet file of clients with `--examples` small rows each, beside DuckDB's own sort of it
to Parquet; opens the prepared folder, and makes a stream of rounds over it; reads and trains rounds
of 1,000 of its clients, beside rounds of 1,000 clients in all. Times are CPU time.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.data import ClientSampler, cohort_rounds, load, prepare
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import Workload
from fedpax.models.classifiers import MLPConfig, mlp
from fedpax.populations.client_arrays import ContiguousClients


def _table_batch(fields: Any) -> dict[str, Any]:
    x = np.stack([fields["x"], fields["y"]], axis=-1).astype(np.float32)
    return {"image": x, "label": fields["label"].astype(np.int32)}


class Files(Benchmark):
    clients: int = option(1_000_000, "clients of the Parquet file")
    examples: int = option(6, "mean number of rows of a client")
    cohort: int = option(1000, "clients of a round")
    repetitions: int = option(5, "measurements of each")
    folder: str | None = option(None, "where to write; default: a temporary folder")
    columns = (
        "job {name:40} | CPU s {seconds:.4f} | compared with, CPU s {others:.4f} "
        "| ratio {ratio:.2f}"
    )

    def measure(self) -> Iterator[Row]:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            yield self._prepare(folder)
            yield self._pair("open the folder", lambda: load(folder / "0"))
            make_rounds = functools.partial(self._rounds_of, folder / "0")
            yield self._pair("make its rounds", make_rounds)
            self._write(folder / "few.parquet", self.cohort)
            prepare(folder / "few.parquet", folder / "few", client="user_id")
            yield from self._rounds_of_many(make_rounds(), self._rounds_of(folder / "few"))

    def _rounds_of(self, folder: Path) -> Any:
        source: Any = load(folder)
        return cohort_rounds(
            source,
            ContiguousClients(source.client_starts),
            # A client without examples, which chance makes, is not in the folder.
            ClientSampler(len(source.client_names), self.cohort * 99 // 100),
            batch_size=6,
            max_steps=2,
            preprocess=_table_batch,
        )

    def _rounds_of_many(self, many: Any, few: Any) -> Iterator[Row]:
        """Measure rounds of a large population beside rounds of one of the cohort's size."""
        name = "round of many clients; of few"
        reads = [functools.partial(next, rounds) for rounds in (many, few)]
        yield self._pair(name, reads[0], reads[1], times=10)
        for sizes in ((2, 9), (2, 64, 64, 9)):
            workload = Workload(mlp(MLPConfig(layer_sizes=sizes)), (2,), 9)
            algorithm = workload.fedavg(self.cohort * 99 // 100)
            state = jax.jit(algorithm.init)(workload.model.init(jax.random.key(0)))
            train = jax.jit(algorithm.round)

            def read_and_train(rounds: Any, train: Any = train, state: Any = state) -> Any:
                return jax.block_until_ready(train(state, next(rounds)))

            runs = [functools.partial(read_and_train, rounds) for rounds in (many, few)]
            yield self._pair(f"the same and training {sizes}", runs[0], runs[1], times=10)

    def _pair(self, name: str, run: Callable[[], Any], other: Any = None, times: int = 1) -> Row:
        calls = {"run": run} | ({"other": other} if other else {})
        count = self.repetitions * times
        warmups = 3 if times > 1 else 0
        seconds = timing.interleaved(calls, (), count, "cpu", warmups=warmups)
        others = seconds.get("other", [])
        ratio = timing.paired_ratio(seconds["run"], others) if others else None
        return Row(name=name, seconds=seconds["run"], others=others, ratio=ratio)

    def _prepare(self, folder: Path) -> Row:
        import duckdb

        file, numbers = folder / "a.parquet", itertools.count()
        self._write(file, self.clients)

        def sort() -> None:
            with duckdb.connect() as connection:
                connection.execute("SET enable_progress_bar = false")
                query = f"SELECT * FROM '{file}' ORDER BY user_id"
                connection.execute(f"COPY ({query}) TO '{folder}/sorted.parquet' (FORMAT parquet)")

        def run() -> None:
            prepare(file, folder / str(next(numbers)), client="user_id")

        return self._pair("prepare; DuckDB's sort", run, sort)

    def _write(self, file: Path, clients: int) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        rng, rows = np.random.default_rng(0), clients * self.examples
        users = np.char.add("u", rng.integers(0, clients, rows).astype(str))
        x, y = rng.normal(size=rows).astype(np.float32), rng.normal(size=rows)
        columns = {"user_id": users, "x": x, "y": y, "label": rng.integers(0, 9, rows)}
        parquet.write_table(pa.table(columns), file)


main = command(Files)
