"""Metrics of long runs: CPU time to resume and to show a run, and bytes copied to a bucket.

    python -m fedpax.experiments.benchmarks.long_metrics --rounds=1000,100000,1000000

The lines imitate a run with an evaluation and a checkpoint every 100 rounds. Bytes are the sizes of
the parts that each checkpoint writes.
"""

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, integers, option
from fedpax.run_files.goodput import BUCKETS
from fedpax.run_files.line_files import part_starts
from fedpax.run_files.metrics import MetricsWriter
from fedpax.run_files.paths import METRICS

EVALUATE_EVERY = SAVE_EVERY = 100
RESUME_SECONDS, SHOW_SECONDS, SHOW_MB = 2.0, 5.0, 400.0
SHOW = (
    "import resource, sys; from fedpax.main import main; main(sys.argv[1:]); "
    "usage = resource.getrusage(resource.RUSAGE_SELF); print(usage.ru_maxrss)"
)


def write_run(folder: Path, rounds: int) -> None:
    """Write the metrics of a run."""
    generator = random.Random(0)
    with MetricsWriter(folder) as metrics:
        metrics._add_scalars = lambda *scalars: None  # type: ignore[method-assign]  # no TensorBoard
        metrics.write_sizes(10**6, 1, "tokens", 8)
        for number in range(1, rounds + 1):
            loss = 2 + 8 / (1 + number / 1000)
            so_far = {"items": number * 65536, "bytes_across_placement": number * 123456.0}
            so_far |= {f"{bucket}_seconds": number * generator.random() for bucket in BUCKETS}
            so_far |= {"wall_seconds": 0.1 * number}
            noise = generator.gauss(0, 0.05)
            counts = {"spikes": 0, "skipped_rounds": 0, "non_finite_rounds": 0}
            times = {"seconds": 0.1 + generator.random() / 100, "items_per_second": 65536 / 0.1}
            line = {"loss": loss + noise, "update_norm": generator.random(), **counts, **times}
            metrics.write("training", number, line | so_far)
            if number % EVALUATE_EVERY == 0:
                metrics.write("evaluation", number, {"loss": loss, **so_far})
        metrics.sync()


def resume(folder: Path, rounds: int) -> float:
    """Return the CPU seconds to open the metrics of a run that resumes."""
    began = time.process_time()
    with MetricsWriter(folder, after=rounds):
        return time.process_time() - began


def show(folder: Path) -> tuple[float, float]:
    """Return the CPU seconds and the peak of the memory in MB of `fedpax show` with a picture."""
    flags = f"--job_log_dir={folder}", f"--picture={folder / 'run.png'}"
    _, seconds, output = timing.run_python("-c", SHOW, "show", *flags)
    return seconds, int(output.split()[-1]) / 1e3


def copied(size: int, checkpoints: int) -> float:
    """Return the bytes that all checkpoints copy to a bucket, as a multiple of the file's size."""
    written, before = 0, dict[int, int]()
    for number in range(1, checkpoints + 1):
        end = size * number // checkpoints
        parts = dict(itertools.pairwise([*part_starts(end), end]))
        written += sum(stop - start for start, stop in parts.items() if before.get(start) != stop)
        before = parts
    return written / size


class LongMetrics(Benchmark):
    rounds: list[int] = option("1000,100000,1000000", "numbers of rounds", integers)
    columns = (
        "rounds {rounds:,} | MB {megabytes:.1f} | resume (CPU s) {resume_seconds:.2f} "
        "| show (CPU s) {show_seconds:.2f} | show (MB) {show_mb:.0f} "
        "| copied / size {copied:.1f} | whole files {whole:,.1f}"
    )
    bar = f"resume {RESUME_SECONDS:g} s, show {SHOW_SECONDS:g} s and {SHOW_MB:g} MB"

    def measure(self) -> Iterator[Row]:
        for rounds in self.rounds:
            with timing.new_folder() as folder:
                write_run(folder, rounds)
                seconds = min(resume(folder, rounds) for _ in range(3))
                show_seconds, show_mb = show(folder)
                size = (folder / METRICS).stat().st_size
            yield Row(
                rounds=rounds,
                bytes=size,
                megabytes=size / 1e6,
                resume_seconds=seconds,
                show_seconds=show_seconds,
                show_mb=show_mb,
                copied=copied(size, rounds // SAVE_EVERY),
                whole=(rounds // SAVE_EVERY + 1) / 2,
                met=seconds < RESUME_SECONDS and show_seconds < SHOW_SECONDS and show_mb < SHOW_MB,
            )


main = command(LongMetrics)
