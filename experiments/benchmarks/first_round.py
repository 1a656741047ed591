"""Time from the start of a command to its first result: imports, the list, and the first round.

    python -m fedpax.experiments.benchmarks.first_round --exp=fedavg_digits --repetitions=5

Each repetition runs four pairs of new processes, one process after the other:

- `import fedpax` with all its public names, and `import jax`;
- `fedpax list`, and `import jax`;
- a training up to its first logged round, with an empty compilation cache, and once more with the
  cache that the former left.

Differences and ratios are medians over the pairs, because the load of a machine changes slowly.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.run_files.metrics import read_metrics, select

JAX = ("-c", "import jax")
COMMANDS = {
    "import fedpax": ("-c", "import fedpax; [getattr(fedpax, name) for name in fedpax.__all__]"),
    "fedpax list": ("-m", "fedpax", "list"),
}
COLD, WARM = "first round, cache cold", "first round, cache warm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    exp: str = option("fedavg_digits", "the experiment to train")
    repetitions: int = option(5, "pairs of each kind")


def start(arguments: Sequence[str]) -> float:
    """Run Python to its end; return the seconds."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
    )
    return time.perf_counter() - began


def train_first_round(exp: str, folder: Path, cache: Path) -> float:
    """Train until the first round is logged; return the seconds since the start."""
    command = [sys.executable, "-m", "fedpax", "train", f"--exp={exp}", f"--job_log_dir={folder}"]
    changed = {"XDG_CACHE_HOME": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--training.rounds=1"],
        env=environment | changed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        seconds = None
        while seconds is None:
            ended = process.poll() is not None
            if select(read_metrics(folder), "training"):
                seconds = time.perf_counter() - began
            elif ended:
                break
            time.sleep(0.005)
    if seconds is None or process.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed with status {process.returncode}, expected 0. Run it to "
            "see its message."
        )
    return seconds


def compare(name: str, baseline: str, seconds: list[float], baseline_seconds: list[float]) -> Row:
    """Summarize pairs of starts.

    Example:
        >>> compare("import fedpax", "import jax", [3.0, 5.0, 8.0], [2.0, 4.0, 4.0]).difference
        1.0
    """
    pairs = zip(seconds, baseline_seconds, strict=True)
    return Row(
        name=name,
        baseline=baseline,
        seconds=seconds,
        baseline_seconds=baseline_seconds,
        difference=statistics.median(a - b for a, b in pairs),
        ratio=timing.paired_ratio(seconds, baseline_seconds),
    )


def measure(settings: Settings) -> Iterator[Row]:
    """Measure all pairs."""
    start(COMMANDS["fedpax list"])  # so that the files are in memory and compiled to bytecode
    seconds: dict[str, list[float]] = {name: [] for name in (*COMMANDS, COLD, WARM)}
    imports: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(settings.repetitions):
        for name, arguments in COMMANDS.items():
            seconds[name].append(start(arguments))
            imports[name].append(start(JAX))
        with tempfile.TemporaryDirectory() as folder:
            for name in (COLD, WARM):
                runs = Path(folder) / name, Path(folder) / "cache"
                seconds[name].append(train_first_round(settings.exp, *runs))
    for name in COMMANDS:
        yield compare(name, "import jax", seconds[name], imports[name])
    yield compare(WARM, COLD, seconds[WARM], seconds[COLD])


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "start": "{name:23}",
        "median s": "{seconds:.2f}",
        "compared with": "{baseline:23}",
        "median s ": "{baseline_seconds:.2f}",
        "difference s": "{difference:.2f}",
        "ratio": "{ratio:.2f}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
