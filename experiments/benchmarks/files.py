"""Measure files as clients: preparing them, opening them, and rounds of their examples.

    python -m fedpax.experiments.benchmarks.files --folder=/tmp/files --clients=1000000

prepares a Parquet file of clients with `--examples` small rows each, beside DuckDB's own sort of it
to Parquet; opens the prepared folder, and makes a stream of rounds over it; and reads rounds of
1,000 clients of 29 images of 28 x 28, beside a copy of what is sent. Times are CPU time.
"""

import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.data import ClientSampler, cohort_rounds, load, prepare
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.populations.contiguous_clients import ContiguousClients

IMAGES = 29  # of a client


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    clients: int = option(1_000_000, "clients of the Parquet file")
    examples: int = option(6, "mean number of rows of a client")
    cohort: int = option(1000, "clients of a round of images")
    repetitions: int = option(5, "measurements of each")
    folder: str | None = option(None, "where to write; default: a temporary folder")


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for each pair of a job and what it is compared with."""
    with tempfile.TemporaryDirectory(dir=settings.folder) as name:
        folder = Path(name)
        yield from _prepare(settings, folder)
        yield _pair("open the folder", lambda: load(folder / "0"), None, settings)
        source: Any = load(folder / "0")
        sampler = ClientSampler(len(source.client_names), min(1000, settings.clients))
        population = ContiguousClients(source.client_starts)

        def make_rounds() -> None:
            cohort_rounds(source, population, sampler, batch_size=6, preprocess=_numbers)

        yield _pair("make its rounds", make_rounds, None, settings)
        yield from _image_rounds(settings)


def _prepare(settings: Settings, folder: Path) -> Iterator[Row]:
    import duckdb
    import pyarrow as pa
    from pyarrow import parquet

    rng, rows = np.random.default_rng(0), settings.clients * settings.examples
    table = pa.table(
        {
            "user_id": np.char.add("u", rng.integers(0, settings.clients, rows).astype(str)),
            "x": rng.normal(size=rows).astype(np.float32),
            "y": rng.normal(size=rows),
            "label": rng.integers(0, 9, rows),
        }
    )
    file = folder / "a.parquet"
    parquet.write_table(table, file)
    numbers = itertools.count()

    def sort() -> None:
        with duckdb.connect() as connection:
            connection.execute("SET enable_progress_bar = false")
            query = f"COPY (SELECT * FROM '{file}' ORDER BY user_id) TO '{folder}/sorted.parquet'"
            connection.execute(f"{query} (FORMAT parquet)")

    yield _pair(
        "prepare; DuckDB's sort",
        lambda: prepare(file, folder / str(next(numbers)), client="user_id"),
        sort,
        settings,
    )


def _numbers(fields: Any) -> dict[str, Any]:
    return {name: fields[name] for name in ("x", "y", "label")}


def _images(dtype: type[np.generic], fields: Any) -> dict[str, np.ndarray]:
    return {"image": fields["image"].astype(dtype, copy=False)}


def _image_rounds(settings: Settings) -> Iterator[Row]:
    clients = 4 * settings.cohort
    pixels = np.random.default_rng(0).integers(0, 256, (clients * IMAGES, 28, 28, 1), np.uint8)
    owners = np.repeat(np.arange(clients), IMAGES)
    source: Any = load({"client": owners, "image": pixels}, client="client")
    for dtype in (np.uint8, np.float32):
        rounds = cohort_rounds(
            source,
            ContiguousClients(source.client_starts),
            ClientSampler(clients, settings.cohort),
            batch_size=IMAGES,
            preprocess=functools.partial(_images, dtype),
        )
        image = next(rounds).batches["image"]
        name = f"round as {np.dtype(dtype)}; copy of its {image.nbytes / 1e6:.0f} MB"
        yield _pair(name, functools.partial(next, rounds), image.copy, settings)


def _pair(
    name: str, run: Callable[[], Any], other: Callable[[], Any] | None, settings: Settings
) -> Row:
    """Time two functions in turn."""
    seconds: list[float] = []
    others: list[float] = []
    for _ in range(settings.repetitions):
        for function, times in ((run, seconds), (other, others)):
            if function is not None:
                started = time.process_time()
                function()
                times.append(time.process_time() - started)
    ratios = [a / b for a, b in zip(seconds, others, strict=False)]
    return Row(name=name, seconds=seconds, others=others, ratio=ratios)


def _text(values: list[float], form: str) -> str:
    return format(float(np.median(values)), form) if values else ""


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "job": "{name:40}",
        "CPU s": lambda row: _text(row.seconds, ".4f"),
        "compared with, CPU s": lambda row: _text(row.others, ".4f"),
        "ratio": lambda row: _text(row.ratio, ".2f"),
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
