"""Measure files as clients: preparing them, opening them, and rounds of their examples.

    python -m fedpax.experiments.benchmarks.files --folder=/tmp/files --clients=1000000

prepares a Parquet file of clients with `--examples` rows of `--numbers` numbers each, beside
DuckDB's own sort of it; opens the prepared folder and a stream of rounds; reads and trains rounds
of 1,000 of its clients, beside a population of only 1,000. One row of the result gathers rows of
random clients with NumPy in memory. Times are CPU time.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.data import ClientSampler, cohort_rounds, load, prepare
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import mlp_workload
from fedpax.populations.client_arrays import ContiguousClients


def _table_batch(fields: Any) -> dict[str, Any]:
    names = [name for name in fields if name.startswith("x")]
    columns = [np.ma.filled(fields[name], 0) for name in names]
    x = np.stack(columns, -1, dtype=np.float32, casting="same_kind")
    return {"image": x, "label": fields["label"].astype(np.int32)}


class Files(Benchmark):
    clients: int = option(1_000_000, "clients of the Parquet file")
    examples: int = option(6, "rows of a client")
    numbers: int = option(9, "numbers of a row, the label included")
    missing: int = option(0, "columns of which every fifth value is missing")
    cohort: int = option(1000, "clients of a round")
    repetitions: int = option(5, "measurements of each")
    folder: str | None = option(None, "where to write; default: a temporary folder")
    columns = (
        "job {name:40} | CPU s {seconds:.4f} | compared with, CPU s {others:.4f} "
        "| ratio {ratio:.2f}"
    )

    def measure(self) -> Iterator[Row]:
        with timing.new_folder(self.folder) as folder:
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
            ClientSampler(len(source.client_names), self.cohort),
            batch_size=6,
            preprocess=_table_batch,
        )

    def _rounds_of_many(self, many: Any, few: Any) -> Iterator[Row]:
        """Measure rounds of a large population beside rounds of one of the cohort's size."""
        name = "round of many clients; of few"
        reads = [functools.partial(next, rounds) for rounds in (many, few)]
        yield self._pair(name, reads[0], reads[1], times=30)
        gathers = [self._gather_by_hand(clients) for clients in (self.clients, self.cohort)]
        yield self._pair("the same rows with NumPy", gathers[0], gathers[1], times=30)
        features = self.numbers - 1
        for hidden in ((), (64, 64)):
            sizes = (features, *hidden, 9)
            workload = mlp_workload(*sizes)
            algorithm = workload.fedavg(self.cohort)
            state = jax.jit(algorithm.init)(workload.model.init(jax.random.key(0)))
            train = jax.jit(algorithm.round)

            def read_and_train(rounds: Any, train: Any = train, state: Any = state) -> Any:
                return jax.block_until_ready(train(state, next(rounds)))

            runs = [functools.partial(read_and_train, rounds) for rounds in (many, few)]
            yield self._pair(f"the same and training {sizes}", runs[0], runs[1], times=30)

    def _gather_by_hand(self, clients: int) -> Callable[[], Any]:
        """Return a function that gathers the rows of random clients from records in memory."""
        rng, count = np.random.default_rng(0), self.examples
        records = np.zeros(clients * count, [(n, v.dtype) for n, v in self._columns(1).items()])
        records.view(np.uint8)[:] = 1  # unwritten zeros share one page of memory
        cohorts = (rng.choice(clients, self.cohort, replace=False) for _ in itertools.count())
        draws = list(itertools.islice(cohorts, 30 * self.repetitions + 3))

        def gather() -> Any:
            rows = draws.pop()[:, None] * count + np.arange(count)
            return records[rows.ravel()]

        return gather

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

        columns = self._columns(clients * self.examples)
        # Of equal sizes: rounds of few clients would always have the largest one.
        users = np.random.default_rng(1).permutation(np.repeat(np.arange(clients), self.examples))
        names = np.char.add("u", users.astype(str))
        for name in list(columns)[: self.missing]:
            columns[name] = pa.array(columns[name], mask=np.arange(len(names)) % 5 == 0)
        parquet.write_table(pa.table({"user_id": names, **columns}), file)

    def _columns(self, rows: int) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        dtypes: list[Any] = [np.float32, np.float64]
        columns = {
            f"x{k}": rng.normal(size=rows).astype(dtypes[k % 2]) for k in range(self.numbers - 1)
        }
        return {**columns, "label": rng.integers(0, 9, rows)}


main = command(Files)
