"""Time from the start of a command to its first result: imports, the list, and the first round.

    python -m fedpax.experiments.benchmarks.first_round --exp=fedavg_digits --repetitions=5

Each repetition runs four pairs of new processes, one process after the other:

- `import fedpax` with all its public names, and `import jax`;
- `fedpax list`, and `import jax`;
- a training up to its first logged round, with an empty compilation cache, and once more with the
  cache that the former left.

Differences and ratios are medians over the pairs, because the load of a machine changes slowly.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedpax.experiments.benchmarks.timing import paired_ratio, write
from fedpax.run_files.metrics import read_metrics, select

JAX = ("-c", "import jax")
FEDPAX = ("-c", "import fedpax; [getattr(fedpax, name) for name in fedpax.__all__]")
LIST = ("-m", "fedpax", "list")


class Row(NamedTuple):
    """A pair of starts.

    Attributes:
        name: the start that is measured.
        baseline: the start that it is compared with.
        seconds: its seconds in each repetition.
        baseline_seconds: those of the other start.
        difference: median of the differences, in seconds.
        ratio: median of the ratios.
    """

    name: str
    baseline: str
    seconds: list[float]
    baseline_seconds: list[float]
    difference: float
    ratio: float


def start(arguments: Sequence[str], **variables: str) -> float:
    """Run Python to its end; return the seconds.

    Args:
        arguments: the arguments after `python`.
        **variables: environment variables to add.

    Raises:
        CalledProcessError: it fails.
    """
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
    )
    return time.perf_counter() - began


def train_first_round(exp: str, folder: Path, cache: Path) -> float:
    """Train until the first round is logged; return the seconds since the start.

    Args:
        exp: the experiment.
        folder: an empty folder for the run.
        cache: the folder of `XDG_CACHE_HOME`, with or without compiled programs.

    Raises:
        RuntimeError: the training fails.
    """
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
    difference = statistics.median(a - b for a, b in zip(seconds, baseline_seconds, strict=True))
    ratio = paired_ratio(seconds, baseline_seconds)
    return Row(name, baseline, seconds, baseline_seconds, difference, ratio)


def measure(exp: str, repetitions: int) -> list[Row]:
    """Measure all pairs.

    Args:
        exp: the experiment to train.
        repetitions: number of pairs of each kind.

    Returns:
        One row per kind.
    """
    start(LIST)  # so that the files are in memory and compiled to bytecode
    names = ("import fedpax", "fedpax list")
    imports: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    warm: list[float] = []
    cold: list[float] = []
    for _ in range(repetitions):
        for name, arguments in zip(names, (FEDPAX, LIST), strict=True):
            imports[name][0].append(start(arguments))
            imports[name][1].append(start(JAX))
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "cache"
            cold.append(train_first_round(exp, Path(folder) / "cold", cache))
            warm.append(train_first_round(exp, Path(folder) / "warm", cache))
    rows = [compare(name, "import jax", *imports[name]) for name in names]
    return [*rows, compare("first round, cache warm", "first round, cache cold", warm, cold)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exp", default="fedavg_digits", help="the experiment to train")
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of each kind")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    rows = measure(options.exp, options.repetitions)
    print(
        f"{'start':23}  {'median s':>8}  {'compared with':23}  {'median s':>8}  difference s  ratio"
    )
    for row in rows:
        print(
            f"{row.name:23}  {statistics.median(row.seconds):8.2f}  {row.baseline:23}  "
            f"{statistics.median(row.baseline_seconds):8.2f}  {row.difference:12.2f}  "
            f"{row.ratio:5.2f}"
        )
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
