"""Time from the start of a command to its first result: imports, the list, and the first round.

    python -m fedpax.experiments.benchmarks.first_round --exp=fedavg_digits --repetitions=5

Each repetition runs pairs of new processes: `import fedpax` with all its public names and `import
jax`; `fedpax list` and `import jax`; a training up to its first logged round with an empty
compilation cache, and once more. Differences and ratios are medians over the pairs. The CPU seconds
are of the whole process and of the processes that it started: a training also evaluates and saves
after its round. `BARS` has the most CPU seconds of the trainings, on a machine with two cores.
"""

import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.run_files.metrics import read_metrics, select

JAX = ("-c", "import jax")
COMMANDS = {
    "import fedpax": ("-c", "import fedpax; [getattr(fedpax, name) for name in fedpax.__all__]"),
    "fedpax list": ("-m", "fedpax", "list"),
}
COLD, WARM = "first round, cache cold", "first round, cache warm"
BARS = {"fedavg_digits": {COLD: 13.0, WARM: 5.1}, "diloco_text": {COLD: 18.9, WARM: 8.3}}


class Taken(NamedTuple):
    """The resources that a process took."""

    seconds: float
    cpu_seconds: float


def children_cpu() -> float:
    """Return the CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start(arguments: Sequence[str]) -> Taken:
    """Run Python to its end."""
    began, before, pipe = time.perf_counter(), children_cpu(), subprocess.PIPE
    command = [sys.executable, *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=pipe, check=True)
    return Taken(time.perf_counter() - began, children_cpu() - before)


def train_first_round(exp: str, folder: Path, cache: Path) -> Taken:
    """Train a round; the seconds are until it is logged."""
    command = [sys.executable, "-m", "fedpax", "train", f"--exp={exp}", f"--job_log_dir={folder}"]
    changed = {"XDG_CACHE_HOME": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    before, began, seconds, ended = children_cpu(), time.perf_counter(), None, False
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*command, "--training.rounds=1"], env=environment | changed, stdout=quiet, stderr=quiet
    ) as process:
        while seconds is None and not ended:
            ended = process.poll() is not None
            if select(read_metrics(folder), "training"):
                seconds = time.perf_counter() - began
            time.sleep(0.005)
    if seconds is None or process.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed with status {process.returncode}, expected 0. Run it to "
            "see its message."
        )
    return Taken(seconds, children_cpu() - before)


class FirstRound(Benchmark):
    exp: str = option("fedavg_digits", "the experiment to train")
    repetitions: int = option(5, "pairs of each kind")
    columns = (
        "start {name:23} | median s {seconds:.2f} | CPU s {cpu_seconds:.2f} "
        "| compared with {baseline:23} | its median s {baseline_seconds:.2f} "
        "| its CPU s {baseline_cpu_seconds:.2f} | difference s {difference:.2f} | ratio {ratio:.2f}"
    )
    bar = "CPU seconds of a training with a cold and a warm cache"

    def measure(self) -> Iterator[Row]:
        start(COMMANDS["fedpax list"])  # so that the files are in memory and compiled to bytecode
        pairs: dict[tuple[str, str], list[tuple[Taken, Taken]]] = {
            **{(name, "import jax"): [] for name in COMMANDS},
            (WARM, COLD): [],
        }
        for _ in range(self.repetitions):
            for name, arguments in COMMANDS.items():
                pairs[name, "import jax"].append((start(arguments), start(JAX)))
            with tempfile.TemporaryDirectory() as name:
                cold, warm = (
                    train_first_round(self.exp, Path(name, kind), Path(name, "cache"))
                    for kind in (COLD, WARM)
                )
            pairs[WARM, COLD].append((warm, cold))
        bars = BARS.get(self.exp, {})
        for (name, baseline), taken in pairs.items():
            seconds, others = ([t.seconds for t in own] for own in zip(*taken, strict=True))
            cpu, cpu_others = ([t.cpu_seconds for t in own] for own in zip(*taken, strict=True))
            yield Row(
                name=name,
                baseline=baseline,
                seconds=seconds,
                cpu_seconds=cpu,
                baseline_seconds=others,
                baseline_cpu_seconds=cpu_others,
                difference=statistics.median(a - b for a, b in zip(seconds, others, strict=True)),
                ratio=timing.paired_ratio(seconds, others),
                met=all(
                    statistics.median(own) <= bars.get(start, math.inf)
                    for start, own in ((name, cpu), (baseline, cpu_others))
                ),
            )


main = command(FirstRound)
