"""Time from the start of a command to its first result: imports, the list, and the first round.

    python -m fedpax.experiments.benchmarks.first_round --exp=fedavg_digits --repetitions=5

Each repetition runs pairs of new processes: `import fedpax` with all its public names and `import
jax`; `fedpax list` and `import jax`; a training up to its first logged round with an empty
compilation cache, and once more. Differences and ratios are medians over the pairs.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.run_files.metrics import read_metrics, select

JAX = ("-c", "import jax")
COMMANDS = {
    "import fedpax": ("-c", "import fedpax; [getattr(fedpax, name) for name in fedpax.__all__]"),
    "fedpax list": ("-m", "fedpax", "list"),
}
COLD, WARM = "first round, cache cold", "first round, cache warm"


def start(arguments: Sequence[str]) -> float:
    """Run Python to its end; return the seconds."""
    began, pipe = time.perf_counter(), subprocess.PIPE
    command = [sys.executable, *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=pipe, check=True)
    return time.perf_counter() - began


def train_first_round(exp: str, folder: Path, cache: Path) -> float:
    """Train until the first round is logged; return the seconds since the start."""
    command = [sys.executable, "-m", "fedpax", "train", f"--exp={exp}", f"--job_log_dir={folder}"]
    changed = {"XDG_CACHE_HOME": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    began, seconds, ended, quiet = time.perf_counter(), None, False, subprocess.DEVNULL
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
    return seconds


class FirstRound(Benchmark):
    exp: str = option("fedavg_digits", "the experiment to train")
    repetitions: int = option(5, "pairs of each kind")
    columns = (
        "start {name:23} | median s {seconds:.2f} | compared with {baseline:23} "
        "| its median s {baseline_seconds:.2f} | difference s {difference:.2f} | ratio {ratio:.2f}"
    )

    def measure(self) -> Iterator[Row]:
        start(COMMANDS["fedpax list"])  # so that the files are in memory and compiled to bytecode
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = {
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
        for (name, baseline), taken in pairs.items():
            seconds, others = map(list, zip(*taken, strict=True))
            yield Row(
                name=name,
                baseline=baseline,
                seconds=seconds,
                baseline_seconds=others,
                difference=statistics.median(a - b for a, b in taken),
                ratio=timing.paired_ratio(seconds, others),
            )


main = command(FirstRound)
